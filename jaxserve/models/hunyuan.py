"""Hunyuan, dense: each query and key head is normalized after it has rotated, at a base that is fixed."""

from typing import Any, Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import rope_fields

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    attention_bias=False,
    sizes=class_sizes(290943, 4096, 11008, 32, 32, 2048),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of HunYuanDenseV1ForCausalLM: a dynamic scaling with ``alpha`` is a base that is raised once."""
    fields = fields.with_aliases({"attention_head_dim": "head_dim"})
    if fields.flag("use_cla", False):
        fields.note("use_cla", "expected false: layers do not share keys and values")
    return read_decoder(_with_fixed_base(fields), architecture, _DEFAULTS)


def _with_fixed_base(fields: ConfigFields) -> ConfigFields:
    """Return the fields with ``rope_theta * alpha ** (H / (H - 2))`` as base, where they have such a factor."""
    scaling = rope_fields(fields)
    kind = scaling.raw.get("rope_type") or scaling.raw.get("type")
    if kind != "dynamic" or not scaling.raw.get("alpha"):
        return fields
    given = fields.with_defaults(_DEFAULTS.sizes)
    size = fields.integer("head_dim", given.integer("hidden_size") // given.integer("num_attention_heads"), minimum=4)
    base = (scaling if scaling.is_given("rope_theta") else fields).number("rope_theta", 10000.0)
    theta = base * scaling.number("alpha") ** (size / (size - 2))
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    return fields.replaced({"rope_scaling": None, "rope_parameters": plain})


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def build_hunyuan_attention(config: DecoderConfig, index: int, scope: Scope) -> GroupedQueryAttention:
    """Build the attention of a layer."""
    names = ("query_layernorm", "key_layernorm")
    return build_attention(config, index, scope, qk_norm="head", norm_names=names, is_normed_last=True)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    return build_layer(config, index, scope, attention=build_hunyuan_attention(config, index, scope.at("self_attn")))
