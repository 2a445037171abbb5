"""DeepSeek-V3 and R1, and Kimi-K2 (arXiv:2412.19437): V2 with sigmoid routing that a bias balances."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.routing import Routing
from jaxserve.models import deepseek_v2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.deepseek_v2 import DeepseekConfig, read_deepseek, read_groups
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults
from jaxserve.models.sparse_decoder import read_routing

_DEFAULTS: Final = FamilyDefaults(head_dim=64, bos_token_id=0, eos_token_ids=(1,), attention_bias=False)
_NEUTRAL: Final = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of DeepseekV3ForCausalLM; layers for multi-token prediction are not loaded."""
    return read_deepseek(
        fields,
        architecture,
        _DEFAULTS,
        _read_routing,
        dense_layers=3,
        is_interleaved=fields.flag("rope_interleave", True),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )


def _read_routing(fields: ConfigFields) -> Routing:
    """Read the routing of V3: a sigmoid; groups are rated by their two best experts."""
    for field, expected in _NEUTRAL.items():
        if fields.text(field, expected) != expected:
            fields.note(field, f"expected {expected}, got {fields.text(field, expected)!r}")
    base = read_routing(fields, "n_routed_experts", 256, 8, is_normalized=fields.flag("norm_topk_prob", True))
    routing = dataclasses.replace(
        base,
        scoring="sigmoid",
        experts_per_group_score=2,
        scale=fields.number("routed_scaling_factor", 2.5),
        is_corrected=True,
    )
    return read_groups(fields, routing, (8, 4))


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
