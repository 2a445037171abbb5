"""Granite MoE with shared experts, and Granite 4 without Mamba layers: an MLP beside the experts, or in their place."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames, SharedExpert, SparseMLP
from jaxserve.models import granite
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_layer
from jaxserve.models.granite_moe import GraniteMoeConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import class_sizes, read_layer_list
from jaxserve.models.sparse_decoder import read_routing

_SIZES: Final = class_sizes(32000, 4096, 11008, 32, 32, 2048)
_NAMES: Final = ExpertNames(
    ("block_sparse_moe.input_linear",), "block_sparse_moe.output_linear", "block_sparse_moe.router.layer"
)


def config_from_hf(fields: ConfigFields, architecture: str) -> GraniteMoeConfig:
    """Read a config of GraniteMoeHybridForCausalLM, whose layers must be those of attention and rotate only if
    ``position_embedding_type`` says so, or of GraniteMoeSharedForCausalLM."""
    is_hybrid = architecture.startswith("GraniteMoeHybrid")
    fields = fields.with_defaults(_SIZES)
    if is_hybrid:
        fields = _with_known_layers(fields)
    base = granite.config_from_hf(fields, architecture)
    rotates = not is_hybrid or fields.raw.get("position_embedding_type") == "rope"
    count = fields.integer("num_local_experts", 8, minimum=0)
    routed = fields if count else fields.replaced({"num_local_experts": 1, "num_experts_per_tok": 1})
    config = GraniteMoeConfig(
        **vars(base),
        routing=read_routing(routed, "num_local_experts", 8, 2, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        shared_ffn_size=fields.integer("shared_intermediate_size", 1024 if is_hybrid else 0, minimum=0),
        sparse_layers=(count > 0,) * base.num_layers,
    )
    if not count and not config.shared_ffn_size:
        fields.note("shared_intermediate_size", "expected an integer above 0 for a model without experts")
    return dataclasses.replace(config, rope_layers=(rotates,) * base.num_layers)


def _with_known_layers(fields: ConfigFields) -> ConfigFields:
    """Return the fields without the types of layers, of which all must be attention."""
    field = "layer_types" if fields.is_given("layer_types") else "layers_block_type"
    if fields.is_given(field):
        read_layer_list(fields, field, fields.integer("num_hidden_layers"), ("attention", "full_attention"))
    else:
        fields.note("layer_types", "expected attention in every layer, but it is missing, which means layers of Mamba")
    return fields.replaced({"layer_types": None})


def build(config: GraniteMoeConfig, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return granite.build_with(config, scope, _build_layer)


def _build_layer(
    config: GraniteMoeConfig, index: int, scope: Scope, *, scale: float, residual_multiplier: float
) -> PreNormLayer:
    mlp, sizes = None, (config.hidden_size, config.shared_ffn_size)
    if config.shared_ffn_size:
        mlp = GatedMLP(
            *sizes,
            activation=config.activation,
            scope=scope.at("shared_mlp"),
            gate_up=("input_linear",),
            down="output_linear",
        )
    if config.sparse_layers[index]:
        shared = None if mlp is None else SharedExpert(mlp, None)
        mlp = SparseMLP(
            config.hidden_size, config.expert_ffn_size, config.routing, scope=scope, names=_NAMES, shared=shared
        )
    return build_layer(config, index, scope, mlp=mlp, scale=scale, residual_multiplier=residual_multiplier)
