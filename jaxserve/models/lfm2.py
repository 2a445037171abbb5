"""LFM2 and LFM2-MoE: gated short convolutions in most layers, attention in the others, and experts in the latter."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.layers.short_convolution import ShortConvolution
from jaxserve.layers.sparse_mlp import ExpertNames, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_layer, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_layer_indices
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.hybrid import NO_ROUTING, HybridConfig, no_windows, read_recurrent_layers
from jaxserve.models.sparse_decoder import build_sparse_mlp, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=1e6),
    tie_embeddings=True,
    windows=no_windows,
    sizes=class_sizes(65536, 2560, 12288, 32, 32, 128_000),
)
_ALIASES: Final = {"norm_eps": "rms_norm_eps", "block_norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_NAMES: Final = ExpertNames(("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2", correction="expert_bias")
_KINDS: Final = {"conv": True, "full_attention": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(HybridConfig):
    """LFM2.

    Attributes:
        taps: Tokens that a convolution spans.
        conv_bias: Whether convolutions and their projections have biases.
    """

    taps: int
    conv_bias: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> Lfm2Config:
    """Read a config of Lfm2ForCausalLM or of Lfm2MoeForCausalLM, whose ``intermediate_size`` is taken as it is."""
    is_sparse = architecture.startswith("Lfm2Moe")
    if is_sparse:
        fields = fields.with_defaults({"hidden_size": 2048, "intermediate_size": 7168})
    if fields.is_given("block_ff_dim"):
        fields = fields.replaced({"intermediate_size": fields.raw["block_ff_dim"]})
    for other, own in _ALIASES.items():
        if fields.is_given(other):
            fields = fields.replaced({own: fields.raw[other]})
    base = read_decoder(fields, architecture, _DEFAULTS)
    routing = NO_ROUTING
    if is_sparse:
        corrected = fields.flag("use_expert_bias", True)
        normalized = fields.flag("norm_topk_prob", True)
        routing = read_routing(fields, "num_experts", 32, 4, is_normalized=normalized, scoring="sigmoid")
        scale = fields.number("routed_scaling_factor", 1.0)
        routing = dataclasses.replace(routing, is_corrected=corrected, scale=scale, sum_eps=1e-6)
    dense = fields.integer("num_dense_layers", 2, minimum=0) if is_sparse else base.num_layers
    base = dataclasses.replace(base, ffn_size=base.ffn_size if is_sparse else _ffn_size(fields, base.ffn_size))
    recurrent = read_recurrent_layers(fields, base.num_layers, _KINDS)
    if recurrent is None:
        attends = read_layer_indices(fields, "full_attn_idxs", base.num_layers) or (True,) * base.num_layers
        recurrent = tuple(not each for each in attends)
    return Lfm2Config(
        **vars(base),
        routing=routing,
        expert_ffn_size=fields.integer("moe_intermediate_size", 1792) if is_sparse else 0,
        sparse_layers=tuple(index >= dense for index in range(base.num_layers)),
        recurrent_layers=recurrent,
        taps=fields.integer("conv_L_cache", 3, minimum=2),
        conv_bias=fields.flag("conv_bias", False),
    )


def _ffn_size(fields: ConfigFields, stated: int) -> int:
    """Return F of a dense model, which ``intermediate_size`` does not say by itself."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    size = int(2 * stated / 3)
    factor = fields.nullable_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = fields.integer("block_multiple_of", 256)
    return multiple * -(-int(factor * size) // multiple)


def build(config: Lfm2Config, scope: Scope) -> CausalLM:
    """Return the module, whose last norm checkpoints call that of the embedding."""
    norm = build_norm(config, scope.at("model.embedding_norm"))
    return build_decoder(config, scope, _build_layer, norm=norm)


def _build_layer(config: Lfm2Config, index: int, scope: Scope) -> Layer:
    mlp = _build_mlp(config, index, scope.at("feed_forward"))
    norm = partial(build_norm, config)
    if config.recurrent_layers[index]:
        mixer = ShortConvolution(config.hidden_size, config.taps, has_bias=config.conv_bias, scope=scope.at("conv"))
        return RecurrentLayer(norm(scope.at("operator_norm")), mixer, norm(scope.at("ffn_norm")), mlp)
    attention = build_attention(
        config,
        index,
        scope.at("self_attn"),
        out="out_proj",
        qk_norm="head",
        norm_names=("q_layernorm", "k_layernorm"),
    )
    return build_layer(config, index, scope, mlp=mlp, attention=attention, norms=("operator_norm", "ffn_norm"))


def _build_mlp(config: Lfm2Config, index: int, scope: Scope) -> GatedMLP | SparseMLP:
    if config.sparse_layers[index]:
        return build_sparse_mlp(config, scope, names=_NAMES)
    sizes = config.hidden_size, config.ffn_size
    return GatedMLP(*sizes, activation=config.activation, scope=scope, gate_up=("w1", "w3"), down="w2")
