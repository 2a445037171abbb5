"""Baichuan-7B: Llama with query, key and value in one matrix, ``W_pack``.

Baichuan-13B (ALiBi instead of RoPE) and Baichuan 2 (a head that normalizes its rows) use the same names in their
configs; they are rejected by their other fields.
"""

from functools import partial
from typing import Final

from jaxserve.api.errors import UnsupportedModelError
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults()
_ROTARY_HIDDEN_SIZE: Final = 4096
_SECOND_GENERATION_VOCABULARY: Final = 125696


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of BaiChuanForCausalLM (first release) or BaichuanForCausalLM (later ones, of both sizes).

    Raises:
        UnsupportedModelError: The model is Baichuan-13B or Baichuan 2.
    """
    hidden_size = fields.raw.get("hidden_size")
    if architecture == "BaichuanForCausalLM" and hidden_size is not None and hidden_size != _ROTARY_HIDDEN_SIZE:
        raise UnsupportedModelError(
            f"{fields.path}: {architecture} with hidden_size {hidden_size} has ALiBi positions (Baichuan-13B), which "
            f"are not supported; expected Baichuan-7B, with hidden_size {_ROTARY_HIDDEN_SIZE}"
        )
    if fields.raw.get("vocab_size") == _SECOND_GENERATION_VOCABULARY or "z_loss_weight" in fields.raw:
        raise UnsupportedModelError(
            f"{fields.path}: this is a Baichuan 2, whose output head normalizes its rows (NormHead), which is not "
            f"supported; expected Baichuan-7B of the first generation"
        )
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module: query, key and value projections are one tensor in checkpoints."""
    return build_decoder(config, scope, partial(build_layer, qkv=("W_pack",)))
