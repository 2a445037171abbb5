"""Hunyuan with experts: a shared expert of the same size beside them in every layer."""

from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models import hunyuan
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_NAMES: Final = ExpertNames(router="gate.wg")


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of HunYuanMoEV1ForCausalLM: ``num_experts`` and ``moe_topk`` may be lists of one number for each
    layer, which must be equal."""
    base = hunyuan.config_from_hf(fields, architecture)
    for field in ("num_experts", "moe_topk"):
        values = fields.raw.get(field)
        if isinstance(values, list) and values:
            if any(value != values[0] for value in values):
                fields.note(field, f"expected the same number for every layer, got {', '.join(map(str, values))}")
            if len(values) != base.num_layers:
                fields.note(field, f"expected {base.num_layers} entries, one per layer, got {len(values)}")
            fields = fields.replaced({field: values[0]})
    fields = fields.with_aliases({"moe_topk": "num_experts_per_tok"})
    return SparseConfig(
        **vars(base),
        routing=read_routing(fields, "num_experts", 1, 1, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        shared_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: SparseConfig, index: int, scope: Scope) -> PreNormLayer:
    attention = hunyuan.build_hunyuan_attention(config, index, scope.at("self_attn"))
    return build_sparse_layer(config, index, scope, names=_NAMES, shared="shared_mlp", attention=attention)
