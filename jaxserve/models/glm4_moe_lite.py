"""GLM-4.7-Flash: DeepSeek-V3 in all but its defaults."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models import deepseek_v2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.deepseek_v2 import DeepseekConfig, read_deepseek
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.sparse_decoder import read_listed_sparse_layers

_DEFAULTS: Final = FamilyDefaults(
    head_dim=64,
    norm_eps=1e-5,
    bos_token_id=0,
    eos_token_ids=(1,),
    attention_bias=False,
    sizes=class_sizes(154880, 2048, 10240, 47, 20, 202752),
)
_LATENTS: Final = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
}


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of Glm4MoeLiteForCausalLM: ``mlp_layer_types`` says which layers are dense, by default the
    first."""
    base = read_deepseek(
        fields.with_missing(_LATENTS),
        architecture,
        _DEFAULTS,
        partial(read_corrected_routing, experts=64, per_token=4, scale=1.8, groups=(1, 1)),
        dense_layers=0,
        is_interleaved=fields.flag("rope_interleave", True),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )
    return dataclasses.replace(base, sparse_layers=read_listed_sparse_layers(fields, base.num_layers))


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return deepseek_v2.build(config, scope)
