"""Granite 3 and 4 dense: Llama with constants that scale embeddings, attention, residual branches and logits."""

import dataclasses
from typing import Final

from jaxserve.layers.model_config import ModelConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window
from jaxserve.models.weights import CheckpointNames

NAMES: Final = CheckpointNames()
_DEFAULTS: Final = FamilyDefaults()


def config_from_hf(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Reads a config of GraniteForCausalLM; ``attention_multiplier`` replaces 1 / sqrt(H)."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    has_bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        base,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_windows=read_one_window(fields, None, base.num_layers),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
