"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: DeepSeek-V3 whose layers attend to the tokens that an index selects."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_latent_attention import IndexConfig
from jaxserve.models import deepseek_v2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.deepseek_v2 import DeepseekConfig, read_deepseek
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_layer_list
from jaxserve.models.sparse_decoder import read_listed_sparse_layers


class _Class(NamedTuple):
    """What the classes differ in: defaults of fields, and whether features of the index rotate in pairs."""

    defaults: FamilyDefaults
    fields: Mapping[str, Any]
    groups: tuple[int, int]
    is_index_interleaved: bool


def _defaults(norm_eps: float, *sizes: int) -> FamilyDefaults:
    return FamilyDefaults(
        head_dim=64,
        norm_eps=norm_eps,
        bos_token_id=0,
        eos_token_ids=(1,),
        attention_bias=False,
        sizes=class_sizes(*sizes),
    )


_LATENTS: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "moe_intermediate_size": 2048, "n_shared_experts": 1}
_CLASSES: Final[Mapping[str, _Class]] = {
    "DeepseekV32ForCausalLM": _Class(
        _defaults(1e-6, 129280, 7168, 18432, 61, 128, 163840),
        _LATENTS | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64},
        groups=(8, 4),
        is_index_interleaved=False,
    ),
    "GlmMoeDsaForCausalLM": _Class(
        _defaults(1e-5, 154880, 6144, 12288, 78, 64, 202752),
        _LATENTS | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32},
        groups=(1, 1),
        is_index_interleaved=True,
    ),
}


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM; layers for multi-token prediction are not
    loaded."""
    own = _CLASSES[architecture]
    fields = fields.with_missing(own.fields)
    base = read_deepseek(
        fields.replaced({"layer_types": None}),
        architecture,
        own.defaults,
        partial(read_corrected_routing, experts=256, per_token=8, scale=2.5, groups=own.groups),
        dense_layers=3,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )
    read_layer_list(fields, "layer_types", base.num_layers, ("indexed_attention", "full_attention"))
    if base.query_rank is None:
        fields.note("q_lora_rank", "expected an integer: the index reads the latent of queries")
    if fields.items("mlp_layer_types") is not None:
        base = dataclasses.replace(base, sparse_layers=read_listed_sparse_layers(fields, base.num_layers))
    index = IndexConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim", 128, minimum=base.head_dim),
        num_selected=fields.integer("index_topk", 2048),
        is_interleaved=own.is_index_interleaved,
    )
    return dataclasses.replace(base, index=index, index_layers=_read_index_layers(fields, base.num_layers))


def _read_index_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the layer whose index each layer uses: its own, or that of the last one before it that has one.

    ``indexer_types`` says which have one, or a pattern of letters, or every ``index_topk_freq``-th has.
    """
    field, pattern = "indexer_types", fields.raw.get("index_topk_pattern")
    if fields.raw.get(field) is None and isinstance(pattern, str):
        field, fields = "index_topk_pattern", fields.replaced({"index_topk_pattern": [*pattern]})
    every, start = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, minimum=0)
    kinds = read_layer_list(fields, field, num_layers, ("full", "shared", "F", "S"))
    if kinds is None:
        has_index = [max(layer - start + 1, 0) % every == 0 for layer in range(num_layers)]
    else:
        has_index = [kind in ("full", "F") for kind in kinds]
    if not has_index[0]:
        fields.note(field, "expected an index in the first layer, which has no layer before it")
    return tuple(max((i for i in range(layer + 1) if has_index[i]), default=0) for layer in range(num_layers))


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
