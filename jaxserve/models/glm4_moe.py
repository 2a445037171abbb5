"""GLM-4.5, 4.6 and 4.7: half of each head rotates, and experts whose choice a bias balances, as in DeepSeek-V3."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder, extra_layers
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    norm_eps=1e-5,
    rope=RopeDefaults(is_partial=True, partial_factor=0.5),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    sizes=class_sizes(151552, 4096, 10944, 46, 96, 131072),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(SparseConfig):
    """A decoder of GLM-4.5's form.

    Attributes:
        has_qk_norm: Whether each query and key head is normalized.
    """

    has_qk_norm: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> Glm4MoeConfig:
    """Read a config of Glm4MoeForCausalLM: ``attention_bias`` is of queries, keys and values alone."""
    return read_glm4_moe(
        fields,
        architecture,
        _DEFAULTS,
        ffn_size=1408,
        dense_layers=fields.integer("first_k_dense_replace", 1, minimum=0),
        has_qk_norm=fields.flag("use_qk_norm", False),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )


def read_glm4_moe(
    fields: ConfigFields,
    architecture: str,
    defaults: FamilyDefaults,
    *,
    ffn_size: int,
    dense_layers: int,
    has_qk_norm: bool = False,
    num_extra_layers: int = 0,
) -> Glm4MoeConfig:
    """Read a config of GLM-4.5's form.

    Args:
        fields: Fields of config.json.
        architecture: Name in ``architectures``.
        defaults: Defaults of the family.
        ffn_size: ``moe_intermediate_size`` if that is missing.
        dense_layers: First layers without experts.
        has_qk_norm: As in ``Glm4MoeConfig``.
        num_extra_layers: As in ``SparseConfig``.
    """
    base = dataclasses.replace(read_decoder(fields, architecture, defaults), out_bias=False)
    expert_ffn_size = fields.integer("moe_intermediate_size", ffn_size)
    return Glm4MoeConfig(
        **vars(base),
        routing=read_corrected_routing(fields, experts=128, per_token=8, scale=1.0, groups=(1, 1)),
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("n_shared_experts", 1, minimum=0),
        sparse_layers=tuple(index >= dense_layers for index in range(base.num_layers)),
        num_extra_layers=num_extra_layers,
        has_qk_norm=has_qk_norm,
    )


def build(config: Glm4MoeConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    layer = partial(build_sparse_layer, shared="shared_experts", qk_norm="head" if config.has_qk_norm else "none")
    return build_decoder(config, scope, layer, ignored=extra_layers(config.num_layers, config.num_extra_layers))
