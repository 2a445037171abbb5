"""Phi-3.5-MoE: layer norms, two experts chosen by SparseMixer, and biases, also of the logits."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_one_window
from jaxserve.models.hf_rope import RopeDefaults, rope_fields
from jaxserve.models.sparse_decoder import SparseConfig, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=1_000_000.0, original_positions=4096),
    attention_bias=False,
    windows=read_one_window,
    sizes=class_sizes(32064, 4096, 6400, 32, 32, 131072),
)
_NAMES: Final = ExpertNames(("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhiMoeConfig(SparseConfig):
    """A decoder of Phi-3.5-MoE's form.

    Attributes:
        head_bias: Whether logits have a bias.
    """

    head_bias: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> PhiMoeConfig:
    """Read a config of PhimoeForCausalLM: cosines and sines have a factor of their own beyond the original length;
    their frequencies are those of the original length at every length, as in transformers."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    scaling = rope_fields(fields)
    if base.rope.kind == "longrope":
        factors = {name: scaling.number(name) for name in ("short_mscale", "long_mscale")}
        rope = dataclasses.replace(base.rope, long_factor=base.rope.short_factor, **factors)
        base = dataclasses.replace(base, rope=rope)
    routing = read_routing(fields, "num_local_experts", 16, 2, is_normalized=False, scoring="sparsemixer")
    if routing.experts_per_token != 2:
        fields.note("num_experts_per_tok", f"expected 2, got {routing.experts_per_token}")
    jitter = fields.number("router_jitter_noise", 0.01, is_zero_allowed=True)
    return PhiMoeConfig(
        **vars(base),
        routing=dataclasses.replace(routing, jitter=jitter),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
        head_bias=fields.flag("lm_head_bias", False),
    )


def build(config: PhiMoeConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    norm = LayerNorm(config.hidden_size, eps=config.norm_eps, scope=scope.at("model.norm"))
    return build_decoder(config, scope, _build_layer, norm=norm, head_bias=config.head_bias)


def _build_layer(config: PhiMoeConfig, index: int, scope: Scope) -> LayerNormLayer:
    norm, inner = partial(LayerNorm, config.hidden_size, eps=config.norm_eps), scope.at("block_sparse_moe")
    return LayerNormLayer(
        norm(scope=scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn")),
        norm(scope=scope.at("post_attention_layernorm")),
        SparseMLP(config.hidden_size, config.expert_ffn_size, config.routing, scope=inner, names=_NAMES),
    )
