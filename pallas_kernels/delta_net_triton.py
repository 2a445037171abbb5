"""The update of a gated delta net with the rule in a Pallas-Triton kernel."""

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels import delta_net_xla
from pallas_kernels.delta_net import DeltaNetSizes, DeltaNetWeights
from pallas_kernels.recurrent_states import StateRows, States
from pallas_kernels.recurrent_triton import TritonStates


@dataclasses.dataclass(frozen=True)
class TritonDeltaNet(TritonStates):
    """The update, with a kernel that is compiled for NVIDIA GPUs or interpreted anywhere."""

    def update(
        self,
        projected: Float[Array, "T width"],
        weights: DeltaNetWeights,
        states: States,
        rows: StateRows,
        *,
        sizes: DeltaNetSizes,
        eps: float,
    ) -> tuple[Float[Array, "T inner"], States]:
        """Compute the layer's tokens and update its states; see ``DeltaNetKernel.update``."""
        return delta_net_xla.update_by(self.update_states, projected, weights, states, rows, sizes, eps)


TRITON = TritonDeltaNet()
INTERPRETED = TritonDeltaNet(is_interpreted=True)
