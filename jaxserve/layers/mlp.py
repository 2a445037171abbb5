"""The gated MLP (arXiv:2002.05202) with its two input projections fused."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; each device holds matching rows of gate and up."""

    def __init__(self, config: ModelConfig, *, parallel: Parallel, policy: DtypePolicy):
        bias = config.mlp_bias
        self.gate_up = ColumnParallelLinear(
            config.hidden_size, 2 * config.ffn_size, outer_axis="ffn", bias=bias, policy=policy
        )
        self.down = RowParallelLinear(
            config.ffn_size, config.hidden_size, inner_axis="ffn", mesh_axis=parallel.ffn, bias=bias, policy=policy
        )
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)
        width = gate_up.shape[1] // 2
        return self.down(ACTIVATIONS[self.activation](gate_up[:, :width]) * gate_up[:, width:])
