"""SmolLM3: Llama with some layers without RoPE, which may have a sliding window."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_layer_list, read_windows
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=4,
    rope=RopeDefaults(theta=2_000_000.0),
    tie_embeddings=True,
    bos_token_id=128000,
    eos_token_ids=(128001,),
    attention_bias=False,
    mlp_bias=False,
    windows=lambda _, num_layers: (None,) * num_layers,  # replaced: they depend on the layers without RoPE
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of SmolLM3ForCausalLM; in ``no_rope_layers`` a 1 is a layer *with* a rotary embedding."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    rope_layers = read_rope_layers(fields, base.num_layers)
    window = fields.nullable_integer("sliding_window", None) if fields.flag("use_sliding_window", False) else None
    sliding = [not rotates for rotates in rope_layers]
    return dataclasses.replace(base, rope_layers=rope_layers, sliding_windows=read_windows(fields, window, sliding))


def read_rope_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it applies RoPE: as listed, or all but every ``no_rope_layer_interval``-th."""
    flags = read_layer_list(fields, "no_rope_layers", num_layers, (0, 1))
    if flags is not None:
        return tuple(flag == 1 for flag in flags)
    interval = fields.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
