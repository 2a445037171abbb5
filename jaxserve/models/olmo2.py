"""OLMo-2: norms after each branch, and queries and keys normalised over all their heads at once."""

import dataclasses
from typing import Final

from jaxserve.layers.model_config import ModelConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window
from jaxserve.models.weights import CheckpointNames

NAMES: Final = CheckpointNames(
    attention_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
)
_DEFAULTS: Final = FamilyDefaults(norm_eps=1e-5, bos_token_id=None, eos_token_ids=(50279,))


def config_from_hf(fields: ConfigFields, architecture: str) -> ModelConfig:
    """Reads a config of Olmo2ForCausalLM: ``attention_bias`` is for all four projections."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    has_bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        base,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm="width",
        norm_after=True,
        sliding_windows=read_one_window(fields, None, base.num_layers),
    )
