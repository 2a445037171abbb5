"""EXAONE 4: norms after each branch and of each query and key head; with windows, full layers do not rotate."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import (
    FamilyDefaults,
    Windows,
    class_sizes,
    read_decoder,
    read_windows,
    rotate_within_windows,
)
from jaxserve.models.olmo2 import build_post_norm_layer


def read_exaone_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read the windows: ``sliding_window_pattern`` is a number, as in Gemma 3, or letters such as LLLG."""
    window = fields.nullable_integer("sliding_window", 4096)
    pattern = fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and not {*pattern} - {"L", "G"}:
        sliding = [pattern[index % len(pattern)] == "L" for index in range(num_layers)]
    else:
        every = fields.integer("sliding_window_pattern", 4) if window is not None else 1
        sliding = [(index + 1) % every != 0 for index in range(num_layers)]
    return read_windows(fields, window, sliding)


_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=32,
    norm_eps=1e-5,
    bos_token_id=0,
    windows=read_exaone_windows,
    sizes=class_sizes(102400, 4096, 16384, 32, 32, 2048),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Exaone4ForCausalLM."""
    return read_exaone(fields, architecture, _DEFAULTS)


def read_exaone(fields: ConfigFields, architecture: str, defaults: FamilyDefaults) -> DecoderConfig:
    """Read the fields that EXAONE 4 and K-EXAONE share; ``sliding_window`` null means that all layers are full and
    rotate."""
    base = read_decoder(fields, architecture, defaults)
    if fields.nullable_integer("sliding_window", 4096) is None:
        return base
    return rotate_within_windows(base)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, partial(build_post_norm_layer, qk_norm="head"), ignored=(r"mtp\..*",))
