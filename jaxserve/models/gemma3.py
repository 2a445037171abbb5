"""Gemma 3, text only (arXiv:2503.19786): Gemma 2 with query and key norms, and a rotary embedding for windows."""

import dataclasses
from typing import Final

from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models import gemma, gemma2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import Windows, read_repeated_windows
from jaxserve.models.hf_rope import RopeDefaults, read_rope


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    return read_repeated_windows(fields, num_layers, fields.integer("sliding_window_pattern", 6))


_DEFAULTS: Final = dataclasses.replace(
    gemma.DEFAULTS,
    num_kv_heads=4,
    activation_field="hidden_activation",
    rope=RopeDefaults(theta=1_000_000.0, layer_type="full_attention"),
    windows=_read_windows,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(gemma2.Gemma2Config):
    """A decoder of Gemma 3's form.

    Attributes:
        local_rope: Rotary embedding of the layers with a window.
    """

    local_rope: RopeConfig


def config_from_hf(fields: ConfigFields, architecture: str) -> Gemma3Config:
    """Read a config of Gemma3ForCausalLM: without ``layer_types`` every layer slides but each
    ``sliding_window_pattern``-th."""
    base = gemma2.read_gemma2(fields, architecture, _DEFAULTS, soft_caps=(None, None))
    if fields.flag("use_bidirectional_attention", False):
        fields.note("use_bidirectional_attention", "expected false: tokens attend to earlier ones only")
    return Gemma3Config(**vars(base), local_rope=_read_local_rope(fields, base))


def _read_local_rope(fields: ConfigFields, base: gemma2.Gemma2Config) -> RopeConfig:
    """Read ``rope_parameters.sliding_attention`` (transformers 5), or ``rope_local_base_freq`` (before)."""
    if fields.nested("rope_parameters").is_given("sliding_attention"):
        return read_rope(fields, base.head_dim, RopeDefaults(layer_type="sliding_attention"))
    theta = fields.number("rope_local_base_freq", 10000.0)
    return RopeConfig(theta=theta, rotary_dim=base.head_dim, max_positions=base.rope.max_positions)


def build(config: Gemma3Config, scope: Scope) -> CausalLM:
    """Return the module: full layers have the first rotary embedding, layers with a window the second."""
    layer_ropes = tuple(int(window is not None) for window in config.sliding_windows)
    ropes = (config.rope, config.local_rope)
    return gemma2.build_with(config, scope, qk_norm="head", layer_ropes=layer_ropes, ropes=ropes)
