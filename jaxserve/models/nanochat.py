"""nanochat: norms without weights, also of the embeddings and of each query and key head, and squared ReLU."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder

_DEFAULTS: Final = FamilyDefaults(
    bos_token_id=0,
    eos_token_ids=(1,),
    activation="relu2",
    has_gates=False,
    attention_bias=False,
    sizes=class_sizes(50304, 768, 8192, 12, 6, 2048),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """A decoder of nanochat's form.

    Attributes:
        logits_soft_cap: Cap of the logits; None for none.
    """

    logits_soft_cap: float | None


def config_from_hf(fields: ConfigFields, architecture: str) -> NanoChatConfig:
    """Read a config of NanoChatForCausalLM, whose heads rotate the other way."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    base = dataclasses.replace(base, rope=dataclasses.replace(base.rope, is_reversed=True))
    return NanoChatConfig(**vars(base), logits_soft_cap=fields.nullable_number("final_logit_softcapping", 15.0))


def build(config: NanoChatConfig, scope: Scope) -> CausalLM:
    """Return the module; queries and keys may be normalized before they rotate, because their norms have no weights."""
    return build_decoder(
        config,
        scope,
        _build_layer,
        norm=_build_norm(config, scope),
        embed_norm=_build_norm(config, scope),
        logits_soft_cap=config.logits_soft_cap,
    )


def _build_norm(config: DecoderConfig, scope: Scope) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.norm_eps, scope=scope, has_weight=False)


def _build_layer(config: NanoChatConfig, index: int, scope: Scope) -> PreNormLayer:
    sizes = (config.hidden_size, config.ffn_size)
    return PreNormLayer(
        _build_norm(config, scope),
        build_attention(config, index, scope.at("self_attn"), qk_norm="head", has_norm_weights=False),
        _build_norm(config, scope),
        PlainMLP(*sizes, activation=config.activation, scope=scope.at("mlp"), up="fc1", down="fc2", bias=False),
    )
