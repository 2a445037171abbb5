"""StableLM (3B, 2, Zephyr): Llama with layer norms, of which a quarter of each head rotates."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer_norm, build_layer_norm_layer, build_mlp
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=32,
    norm_eps=1e-5,
    rope=RopeDefaults(is_partial=True, partial_factor=0.25),
    bos_token_id=0,
    eos_token_ids=(0,),
    sizes=class_sizes(50304, 2560, 6912, 32, 32, 4096),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """A decoder of StableLM's form.

    Attributes:
        is_parallel: Whether attention and MLP read the same norm.
    """

    is_parallel: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> StableLmConfig:
    """Read a config of StableLmForCausalLM."""
    if fields.flag("qk_layernorm", False):
        fields.note("qk_layernorm", "expected false: queries and keys are not normalized (StableLM 2 12B does so)")
    base = read_decoder(fields.with_aliases({"layer_norm_eps": "rms_norm_eps"}), architecture, _DEFAULTS)
    base = dataclasses.replace(base, qkv_bias=fields.flag("use_qkv_bias", False))
    return StableLmConfig(**vars(base), is_parallel=fields.flag("use_parallel_residual", False))


def build(config: StableLmConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer, norm=build_layer_norm(config, scope.at("model.norm")))


def _build_layer(config: StableLmConfig, index: int, scope: Scope) -> LayerNormLayer:
    mlp = build_mlp(config, scope.at("mlp"))
    return build_layer_norm_layer(config, index, scope, mlp, is_parallel=config.is_parallel)
