"""Mistral Small 4: DeepSeek's latents, a softmax router, and queries that grow with the log of their position."""

import dataclasses
from typing import Any, Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.routing import Routing
from jaxserve.models import deepseek_v2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.deepseek_v2 import DeepseekConfig, read_deepseek, read_groups
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.ministral3 import read_position_scale
from jaxserve.models.sparse_decoder import read_routing

_DEFAULTS: Final = FamilyDefaults(
    head_dim=64,
    rope=RopeDefaults(is_partial=True),
    attention_bias=False,
    sizes=class_sizes(131072, 4096, 12288, 36, 32, 1048576),
)
_LATENTS: Final = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of Mistral4ForCausalLM: ``qk_rope_head_dim`` is the rotated part of a head, whatever
    ``partial_rotary_factor`` says."""
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    scaling = {**(fields.nested(name).raw or _YARN), "partial_rotary_factor": 1.0}
    fields = fields.replaced({name: scaling, "partial_rotary_factor": None})
    base = read_deepseek(
        fields.with_missing(_LATENTS),
        architecture,
        _DEFAULTS,
        _read_routing,
        dense_layers=0,
        is_interleaved=fields.flag("rope_interleave", True),
    )
    return dataclasses.replace(base, position_scale=read_position_scale(fields, base))


def _read_routing(fields: ConfigFields) -> Routing:
    """Read the routing: a softmax; groups are rated by their two best experts."""
    base = read_routing(fields, "n_routed_experts", 128, 4, is_normalized=fields.flag("norm_topk_prob", True))
    scale = fields.number("routed_scaling_factor", 1.0)
    return read_groups(fields, dataclasses.replace(base, experts_per_group_score=2, scale=scale), (1, 1))


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
