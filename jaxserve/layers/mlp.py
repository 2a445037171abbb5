"""The gated MLP (arXiv:2002.05202) with its two input projections fused."""

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import DtypePolicy, Parallel


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; each device holds matching rows of gate and up."""

    def __init__(self, config: ModelConfig, *, parallel: Parallel, policy: DtypePolicy):
        bias, parts = config.mlp_bias, parallel.parts(parallel.ffn)
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            2 * config.ffn_size,
            outer_axis="ffn",
            parts=parts,
            bias=bias,
            activation=config.activation,
            policy=policy,
        )
        self.down = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            inner_axis="ffn",
            mesh_axis=parallel.ffn,
            parts=parts,
            bias=bias,
            policy=policy,
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "T D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """Compute ``residual + scale * mlp(norm(x))``, of ``num_rows`` rows alone where that is given."""
        gated = self.gate_up(x, norm=norm, num_rows=num_rows)
        return self.down(gated, residual=residual, scale=scale, num_rows=num_rows)
