"""Granite MoE with shared experts, and Granite 4: an MLP beside the experts, or in their place, after Mamba-2 or
attention."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.mamba2 import Mamba2, Mamba2Options
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.layers.sparse_mlp import ExpertNames, SharedExpert, SparseMLP
from jaxserve.models import granite
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_layer, build_norm
from jaxserve.models.granite_moe import GraniteMoeConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import class_sizes
from jaxserve.models.hybrid import read_mamba, read_recurrent_layers
from jaxserve.models.sparse_decoder import read_routing
from pallas_kernels.mamba2 import Mamba2Sizes

_SIZES: Final = class_sizes(32000, 4096, 11008, 32, 32, 2048)
_NAMES: Final = ExpertNames(
    ("block_sparse_moe.input_linear",), "block_sparse_moe.output_linear", "block_sparse_moe.router.layer"
)


_KINDS: Final = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteSharedConfig(GraniteMoeConfig):
    """Granite with an MLP for all tokens.

    Attributes:
        recurrent_layers: For each layer, whether it is recurrent.
        mamba: Heads of the recurrent layers, and their options; None if there are none.
    """

    recurrent_layers: tuple[bool, ...]
    mamba: tuple[Mamba2Sizes, Mamba2Options] | None


def config_from_hf(fields: ConfigFields, architecture: str) -> GraniteSharedConfig:
    """Read a config of GraniteMoeHybridForCausalLM, whose attention rotates only if ``position_embedding_type`` says
    so, or of GraniteMoeSharedForCausalLM."""
    is_hybrid = architecture.startswith("GraniteMoeHybrid")
    fields = fields.with_defaults(_SIZES)
    num_layers = fields.integer("num_hidden_layers")
    recurrent = (is_hybrid,) * num_layers
    if is_hybrid:
        names = ("layer_types", "layers_block_type")
        recurrent = read_recurrent_layers(fields, num_layers, _KINDS, names) or recurrent
        fields = fields.replaced({"layer_types": None})
    base = granite.config_from_hf(fields, architecture)
    rotates = not is_hybrid or fields.raw.get("position_embedding_type") == "rope"
    count = fields.integer("num_local_experts", 8, minimum=0)
    routed = fields if count else fields.replaced({"num_local_experts": 1, "num_experts_per_tok": 1})
    config = GraniteSharedConfig(
        **vars(base),
        routing=read_routing(routed, "num_local_experts", 8, 2, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        shared_ffn_size=fields.integer("shared_intermediate_size", 1024 if is_hybrid else 0, minimum=0),
        sparse_layers=(count > 0,) * base.num_layers,
        recurrent_layers=recurrent,
        mamba=read_mamba(fields, base, 128) if any(recurrent) else None,
    )
    if not count and not config.shared_ffn_size:
        fields.note("shared_intermediate_size", "expected an integer above 0 for a model without experts")
    return dataclasses.replace(config, rope_layers=(rotates,) * base.num_layers)


def build(config: GraniteSharedConfig, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return granite.build_with(config, scope, _build_layer)


def _build_layer(
    config: GraniteSharedConfig, index: int, scope: Scope, *, scale: float, residual_multiplier: float
) -> Layer:
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
    if config.recurrent_layers[index]:
        assert mlp is not None and config.mamba is not None
        mixer = Mamba2(config.hidden_size, *config.mamba, scope=scope.at("mamba"))
        norms = [build_norm(config, scope.at(name)) for name in ("input_layernorm", "post_attention_layernorm")]
        return RecurrentLayer(norms[0], mixer, norms[1], mlp, residual_multiplier=residual_multiplier)
    return build_layer(config, index, scope, mlp=mlp, scale=scale, residual_multiplier=residual_multiplier)
