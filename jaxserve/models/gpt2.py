"""GPT-2 and GPT-BigCode (StarCoder 1): learned positions, and layer norms with biases.

GPT-2 stores weights as ``[in, out]``; in GPT-BigCode, all query heads share one head of keys and values.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

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

_PREFIX: Final = "transformer."
_GENERAL_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_END_OF_TEXT: Final = 50256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """One model of GPT-2's form.

    Attributes:
        num_heads: N.
        num_kv_heads: K: N or 1.
        is_transposed: Whether checkpoints have weights as ``[in, out]``.
        ffn_size: F.
        norm_eps: Added to the variance in every LayerNorm.
        activation: One of ``pallas_kernels.linear.ACTIVATIONS``.
        is_scaled: Whether query-key scores are divided by the square root of the head's size.
        is_scaled_by_layer: Whether they are also divided by the layer's number, from 1 on.
    """

    num_heads: int
    num_kv_heads: int
    is_transposed: bool
    ffn_size: int
    norm_eps: float
    activation: str
    is_scaled: bool
    is_scaled_by_layer: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> GPT2Config:
    """Read a config of GPT2LMHeadModel or GPTBigCodeForCausalLM, in its own names of fields or in those of other
    families."""
    is_big_code = architecture == "GPTBigCodeForCausalLM"
    if is_big_code and not fields.flag("multi_query", True):
        fields.note("multi_query", "expected true: all query heads share one head of keys and values")
    fields = fields.with_aliases(_GENERAL_NAMES)
    hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden_size % num_heads:
        fields.note("n_head", f"expected a divisor of n_embd {hidden_size}, got {num_heads}")
    if fields.flag("add_cross_attention", False):
        fields.note("add_cross_attention", "expected false: only decoders without an encoder are supported")
    return GPT2Config(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("n_layer", maximum=MAX_LAYERS),
        max_positions=fields.integer("n_positions"),
        rope=None,
        num_heads=num_heads,
        num_kv_heads=1 if is_big_code else num_heads,
        is_transposed=not is_big_code,
        ffn_size=fields.nullable_integer("n_inner", None) or 4 * hidden_size,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(fields, "activation_function", "gelu_pytorch_tanh"),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        is_scaled=fields.flag("scale_attn_weights", True),
        is_scaled_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
        bos_token_id=fields.nullable_integer("bos_token_id", _END_OF_TEXT, minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id", (_END_OF_TEXT,)),
        dtype=read_dtype(fields),
    )


def build(config: GPT2Config, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_with(config, scope, _build_layer)


def build_with(config: GPT2Config, scope: Scope, layer: Callable[[Any, int, Scope], LayerNormLayer]) -> CausalLM:
    """Return the module with the names of GPT-2's checkpoints, whose layers ``layer`` builds."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at(_PREFIX.removesuffix("."))
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("wte")),
        position_embed=PositionEmbedding(config.max_positions, config.hidden_size, scope=inner.at("wpe")),
        layers=[layer(config, index, inner.at(f"h.{index}")) for index in range(config.num_layers)],
        norm=LayerNorm(config.hidden_size, eps=config.norm_eps, scope=inner.at("ln_f")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head")),
        ignored=(r".*\.attn\.(masked_)?bias",),
        optional_prefix=_PREFIX,
    )


def _build_layer(config: GPT2Config, index: int, scope: Scope) -> LayerNormLayer:
    size, num_heads = config.hidden_size, config.num_heads
    head_dim = size // num_heads
    scale = head_dim**-0.5 if config.is_scaled else 1.0
    norm = partial(LayerNorm, size, eps=config.norm_eps)
    return LayerNormLayer(
        norm(scope=scope.at("ln_1")),
        GroupedQueryAttention(
            size,
            num_heads,
            config.num_kv_heads,
            head_dim,
            scope=scope.at("attn"),
            qkv=("c_attn",),
            out="c_proj",
            is_transposed=config.is_transposed,
            qkv_bias=True,
            out_bias=True,
            scale=scale / (index + 1) if config.is_scaled_by_layer else scale,
            rope=None,
        ),
        norm(scope=scope.at("ln_2")),
        PlainMLP(
            size,
            config.ffn_size,
            activation=config.activation,
            scope=scope.at("mlp"),
            up="c_fc",
            down="c_proj",
            is_transposed=config.is_transposed,
        ),
    )
