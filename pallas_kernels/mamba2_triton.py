"""The update of a Mamba-2 layer with the rule in a Pallas-Triton kernel."""

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels import mamba2_xla
from pallas_kernels.mamba2 import GroupNorm, Mamba2Sizes, Mamba2Weights, StepLimits
from pallas_kernels.recurrent_states import StateRows, States
from pallas_kernels.recurrent_triton import TritonStates


@dataclasses.dataclass(frozen=True)
class TritonMamba2(TritonStates):
    """The update, with a kernel that is compiled for NVIDIA GPUs or interpreted anywhere."""

    def update(
        self,
        projected: Float[Array, "T width"],
        weights: Mamba2Weights,
        states: States,
        rows: StateRows,
        *,
        sizes: Mamba2Sizes,
        limits: StepLimits,
        norm: GroupNorm | None,
        is_gated: bool = True,
    ) -> tuple[Float[Array, "T inner"], States]:
        """Compute the layer's tokens and update its states; see ``Mamba2Kernel.update``."""
        return mamba2_xla.update_by(self.update_states, projected, weights, states, rows, sizes, limits, norm, is_gated)


TRITON = TritonMamba2()
INTERPRETED = TritonMamba2(is_interpreted=True)
