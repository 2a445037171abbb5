"""Solar Open: GLM-4.5 with experts in every layer, and whole heads that rotate."""

from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models import glm4_moe
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.hf_rope import RopeDefaults

_EXPERT_FFN_SIZE: Final = 1280
_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=1_000_000.0, is_partial=True),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    sizes=class_sizes(196608, 4096, _EXPERT_FFN_SIZE, 48, 64, 131072),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> glm4_moe.Glm4MoeConfig:
    """Read a config of SolarOpenForCausalLM, which has no ``intermediate_size``."""
    return glm4_moe.read_glm4_moe(fields, architecture, _DEFAULTS, ffn_size=_EXPERT_FFN_SIZE, dense_layers=0)


def build(config: glm4_moe.Glm4MoeConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return glm4_moe.build(config, scope)
