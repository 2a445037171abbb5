"""The update of a Mamba-2 layer with the rule in a Pallas-Triton kernel."""

import dataclasses
import functools

from jaxtyping import Array, Float

from pallas_kernels import mamba2_xla, recurrent_triton, recurrent_xla
from pallas_kernels.mamba2 import GroupNorm, Mamba2Sizes, Mamba2Weights, StepLimits
from pallas_kernels.recurrent_states import StateRows, States, copy_states


@dataclasses.dataclass(frozen=True)
class TritonMamba2:
    """The update, with a kernel that is compiled for NVIDIA GPUs or interpreted anywhere."""

    is_interpreted: bool = False

    state_shape = staticmethod(recurrent_xla.state_shape)
    to_layout = staticmethod(recurrent_xla.to_layout)
    from_layout = staticmethod(recurrent_xla.from_layout)
    copy_states = staticmethod(copy_states)

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None."""
        num_keys = sizes.get("state_dim", 1)
        return recurrent_triton.unsupported(self.is_interpreted, platform, device_kind, dtype, num_keys)

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
        update_states = functools.partial(recurrent_triton.update_states, is_interpreted=self.is_interpreted)
        return mamba2_xla.update_by(update_states, projected, weights, states, rows, sizes, limits, norm, is_gated)


TRITON = TritonMamba2()
INTERPRETED = TritonMamba2(is_interpreted=True)
