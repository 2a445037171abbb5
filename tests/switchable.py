"""A toy family for tests: every variation of the layers is a field of its config."""

import dataclasses
from typing import cast

from jaxserve.layers.decoder import PreNormLayer, RMSNormLayer
from jaxserve.layers.grouped_query_attention import QkNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder
from jaxserve.models.olmo2 import PostNormLayer

ARCHITECTURE = "SwitchableForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchableConfig(DecoderConfig):
    """Defaults are Llama's."""

    qk_norm: QkNorm = "none"
    norm_after: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


def config_from_hf(fields: ConfigFields, architecture: str) -> SwitchableConfig:
    """Reads a config of Llama's form; ``norm_after`` and ``qk_norm`` may be there too."""
    base = read_decoder(fields, architecture, FamilyDefaults())
    return SwitchableConfig(
        **vars(base),
        norm_after=fields.flag("norm_after", False),
        qk_norm=cast(QkNorm, fields.text("qk_norm", "none")),
    )


def build(config: SwitchableConfig, scope: Scope) -> CausalLM:
    return build_decoder(
        config,
        scope,
        build_layer,
        embedding_multiplier=config.embedding_multiplier,
        logits_divisor=config.logits_divisor,
    )


def build_layer(config: SwitchableConfig, index: int, scope: Scope) -> RMSNormLayer:
    kind = PostNormLayer if config.norm_after else PreNormLayer
    options = {"qk_norm": config.qk_norm, "scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
    return kind(
        build_norm(config, scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn"), **options),
        build_norm(config, scope.at("post_attention_layernorm")),
        build_mlp(config, scope.at("mlp")),
        residual_multiplier=config.residual_multiplier,
    )
