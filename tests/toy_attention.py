"""A kind of attention for tests, and a family whose odd layers have it: keys are the values too, and not rotated."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import rows_of
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

ARCHITECTURE = "ToyAttentionForCausalLM"


class SharedValueAttention(Attention):
    """Keys serve as values: a projection less, and here one head of them."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, *, scope: Scope, **options: Any):
        super().__init__(num_heads, 1, head_dim, scope=scope, rope=None, **options)
        width = num_heads * head_dim
        rows = rows_of(("q_proj", "k_proj"), (width, head_dim), (head_dim,) * 2)
        self.qk = ColumnParallelLinear(
            hidden_size, rows, outer_axis="q_heads", mesh_axis=self.mesh_axis, bias=False, scope=scope
        )
        self.out = RowParallelLinear(
            width, hidden_size, inner_axis="q_heads", mesh_axis=self.mesh_axis, bias=False, scope=scope.at("o_proj")
        )

    def project(
        self, x: Float[Array, "T D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        projected = self.qk(x, norm=norm, num_rows=num_rows)
        return jnp.concatenate([projected, projected[:, self.num_heads * self.head_dim :]], axis=1)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    return read_decoder(fields, architecture, FamilyDefaults())


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    inner = scope.at("self_attn")
    attention = build_attention(config, index, inner)
    if index % 2:
        attention = SharedValueAttention(config.hidden_size, config.num_heads, config.head_dim, scope=inner)
    return PreNormLayer(
        build_norm(config, scope.at("input_layernorm")),
        attention,
        build_norm(config, scope.at("post_attention_layernorm")),
        build_mlp(config, scope.at("mlp")),
    )
