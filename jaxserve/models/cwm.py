"""Code World Model (Meta): Llama 3 with windows in three of four layers."""

from functools import partial
from typing import Any, Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_repeated_windows
from jaxserve.models.hf_rope import RopeDefaults, with_default_rope

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=1_000_000.0),
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
    mlp_bias=False,
    windows=partial(read_repeated_windows, pattern=4, absent=8192, first_full=0),
    sizes=class_sizes(128256, 6144, 21504, 64, 48, 131072),
)
_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of CwmForCausalLM."""
    return read_decoder(with_default_rope(fields, _ROPE), architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
