"""The gated short convolution of LFM2: ``out(C * conv(B * x))``, whose state is the latest products ``B * x``."""

from typing import cast

from jaxtyping import Array, Float

from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split, rows_of
from jaxserve.layers.recurrent import CausalConvolution, Mixed, Recurrent, StateArrays
from pallas_kernels.recurrent_states import StateRows
from pallas_kernels.short_convolution import ShortConvolutionKernel


class ShortConvolution(Recurrent):
    """A gated convolution over few tokens; devices share its channels.

    Args:
        hidden_size: D.
        taps: Tokens that an output depends on.
        has_bias: Whether the convolution and both projections have biases.
        scope: Scope of the module.
    """

    def __init__(self, hidden_size: int, taps: int, *, has_bias: bool, scope: Scope):
        super().__init__(scope, (Split(hidden_size, f"hidden_size {hidden_size}"),))
        own = scope.over(self.mesh_axis)
        self.projection = ColumnParallelLinear(
            hidden_size,
            rows_of(["in_proj"], (hidden_size,) * 3, (1,) * 3),
            outer_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=has_bias,
            scope=own,
        )
        channels = [Rows("conv", hidden_size)]
        self.convolution = CausalConvolution(channels, taps, has_bias=has_bias, scope=own, mesh_axis=self.mesh_axis)
        self.out = RowParallelLinear(
            hidden_size,
            hidden_size,
            inner_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=has_bias,
            scope=scope.at("out_proj"),
        )
        self.kernel = cast(ShortConvolutionKernel, self.load_kernel("short_convolution", scope, taps=taps))
        self.state_spec = (self.convolution.tail,)

    def update(self, projected: Float[Array, "T width"], states: StateArrays, rows: StateRows) -> Mixed:
        """Take the tokens of each row into its state."""
        (tail,) = states
        mixed, tail = self.kernel.update(projected, self.convolution.arrays, tail, rows)
        return Mixed(mixed, (tail,))
