"""Youtu-LLM: DeepSeek-V3's latent attention in a model without experts."""

from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.routing import Routing
from jaxserve.models import deepseek_v2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.deepseek_v2 import DeepseekConfig, read_deepseek
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import MAX_LAYERS, FamilyDefaults, class_sizes

_DEFAULTS: Final = FamilyDefaults(
    head_dim=64,
    tie_embeddings=True,
    bos_token_id=128000,
    eos_token_ids=(128001,),
    attention_bias=False,
    sizes=class_sizes(128256, 2048, 6144, 32, 16, 131072),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of YoutuForCausalLM."""
    return read_deepseek(
        fields.replaced({"first_k_dense_replace": MAX_LAYERS}),
        architecture,
        _DEFAULTS,
        lambda fields: Routing(num_experts=1, experts_per_token=1, is_normalized=False),
        dense_layers=MAX_LAYERS,
        is_interleaved=fields.flag("rope_interleave", True),
    )


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
