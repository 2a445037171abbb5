"""OPT (arXiv:2205.01068): learned positions, layer norms with biases, and ReLU."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.embedding import PositionEmbedding, VocabEmbedding
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import MAX_LAYERS, read_activation, read_dtype

_NORM_EPS: Final = 1e-5
_EXPECTED: Final = {
    "do_layer_norm_before": (True, "norms precede each branch (OPT-350M has them after it)"),
    "_remove_final_layer_norm": (False, "a norm precedes the head"),
    "layer_norm_elementwise_affine": (True, "norms have weights (those of Galactica 30B and 120B have none)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """One model of OPT's form.

    Attributes:
        num_heads: N; every head has its own keys and values.
        ffn_size: F.
        activation: One of ``pallas_kernels.linear.ACTIVATIONS``.
        has_bias: Whether the projections have biases.
    """

    num_heads: int
    ffn_size: int
    activation: str
    has_bias: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> OPTConfig:
    """Read a config of OPTForCausalLM."""
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        fields.note("num_attention_heads", f"expected a divisor of hidden_size {hidden_size}, got {num_heads}")
    for field, (expected, why) in _EXPECTED.items():
        if fields.flag(field, expected) != expected:
            fields.note(field, f"expected {str(expected).lower()}: {why}")
    if fields.integer("word_embed_proj_dim", hidden_size) != hidden_size:
        fields.note(
            "word_embed_proj_dim", f"expected hidden_size {hidden_size}, got {fields.raw['word_embed_proj_dim']}"
        )
    return OPTConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 50272),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 12, maximum=MAX_LAYERS),
        max_positions=fields.integer("max_position_embeddings", 2048),
        rope=None,
        num_heads=num_heads,
        ffn_size=fields.integer("ffn_dim", 3072),
        activation=read_activation(fields, "activation_function", "relu"),
        has_bias=fields.flag("enable_bias", True),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        bos_token_id=fields.nullable_integer("bos_token_id", 2, minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id", (2,)),
        dtype=read_dtype(fields),
    )


def build(config: OPTConfig, scope: Scope) -> CausalLM:
    """Return the module, with the names of its own checkpoints; the first two rows of its positions are unused."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at("model.decoder")
    positions = PositionEmbedding(config.max_positions, sizes[1], scope=inner.at("embed_positions"), offset=2)
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embed_tokens")),
        position_embed=positions,
        layers=[_build_layer(config, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=LayerNorm(config.hidden_size, eps=_NORM_EPS, scope=inner.at("final_layer_norm")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head")),
    )


def _build_layer(config: OPTConfig, scope: Scope) -> LayerNormLayer:
    size, norm = config.hidden_size, partial(LayerNorm, config.hidden_size, eps=_NORM_EPS)
    attention = GroupedQueryAttention(
        size,
        config.num_heads,
        config.num_heads,
        size // config.num_heads,
        scope=scope.at("self_attn"),
        out="out_proj",
        qkv_bias=config.has_bias,
        out_bias=config.has_bias,
        rope=None,
    )
    mlp = PlainMLP(
        size, config.ffn_size, activation=config.activation, scope=scope, up="fc1", down="fc2", bias=config.has_bias
    )
    norms = (norm(scope=scope.at("self_attn_layer_norm")), norm(scope=scope.at("final_layer_norm")))
    return LayerNormLayer(norms[0], attention, norms[1], mlp)
