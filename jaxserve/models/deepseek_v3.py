"""DeepSeek-V3 and R1, and Kimi-K2 (arXiv:2412.19437): V2 with sigmoid routing that a bias balances."""

import dataclasses
from functools import partial
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


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of DeepseekV3ForCausalLM; layers for multi-token prediction are not loaded."""
    return read_deepseek(
        fields,
        architecture,
        _DEFAULTS,
        partial(read_corrected_routing, experts=256, per_token=8, scale=2.5, groups=(8, 4)),
        dense_layers=3,
        is_interleaved=fields.flag("rope_interleave", True),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )


def read_corrected_routing(
    fields: ConfigFields, *, experts: int, per_token: int, scale: float, groups: tuple[int, int]
) -> Routing:
    """Read the routing of V3: a sigmoid, which a bias corrects; groups are rated by their two best experts.

    Args:
        fields: Fields of config.json.
        experts: ``n_routed_experts`` if that is missing.
        per_token: ``num_experts_per_tok``.
        scale: ``routed_scaling_factor``.
        groups: ``n_group`` and ``topk_group``.
    """
    method = fields.text("topk_method", "noaux_tc")
    if method != "noaux_tc":
        fields.note("topk_method", f"expected noaux_tc, got {method!r}")
    normalized = fields.flag("norm_topk_prob", True)
    base = read_routing(fields, "n_routed_experts", experts, per_token, is_normalized=normalized, scoring="sigmoid")
    routing = dataclasses.replace(
        base,
        experts_per_group_score=2,
        scale=fields.number("routed_scaling_factor", scale),
        is_corrected=True,
    )
    return read_groups(fields, routing, groups)


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
