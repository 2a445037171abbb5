"""Phi-3, Phi-3.5 and Phi-4 dense: fused projections, longrope, and optionally a partial rotary embedding."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    rope=RopeDefaults(original_positions=4096, names={"yarn": "longrope"}, is_partial=True),
    eos_token_ids=(32000,),
    windows=read_one_window,
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Phi3ForCausalLM: ``original_max_position_embeddings`` is next to ``rope_scaling``, not in it."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module: query, key and value projections are one tensor in checkpoints, gate and up another."""
    return build_decoder(config, scope, partial(build_layer, qkv=("qkv_proj",), gate_up=("gate_up_proj",)))
