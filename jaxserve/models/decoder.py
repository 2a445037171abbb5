"""The dense decoder of most families; a family's own file has its differences."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.layers.attention import Attention
from jaxserve.layers.decoder import Layer, LayerNormLayer, PreNormLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention, QkNorm
from jaxserve.layers.mlp import GatedMLP, PlainMLP
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import SparseMLP
from jaxserve.models.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """One dense decoder-only model.

    Attributes:
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H; need not be D / N.
        rope: Rotary embedding.
        ffn_size: F.
        norm_eps: Added to the mean square in every RMSNorm, or to the variance in every LayerNorm.
        norm_offset: Added to the weight of every norm.
        activation: Hugging Face's ``hidden_act``: silu, gelu, gelu_pytorch_tanh, relu or, without gates, relu2.
        qkv_bias: Whether query, key and value projections have a bias.
        out_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the MLP's projections have a bias.
        rope_layers: For each layer, whether it applies RoPE (SmolLM3 skips some).
        sliding_windows: For each layer, the number of latest tokens that a query sees, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    ffn_size: int
    norm_eps: float
    norm_offset: float = 0.0
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_layers: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]


LayerBuilder = Callable[[Any, int, Scope], Layer]
"""Builds a layer from the family's config, its index and its scope."""


def build_decoder(
    config: DecoderConfig,
    scope: Scope,
    layer: LayerBuilder | None = None,
    *,
    norm: RMSNorm | LayerNorm | None = None,
    head_bias: bool = False,
    ignored: tuple[str, ...] = (),
    **options: Any,
) -> CausalLM:
    """Build embedding, layers, norm and head with the names of Llama's checkpoints.

    Args:
        config: The model.
        scope: Scope of the model.
        layer: Builds each layer; None: ``build_layer``.
        norm: Norm before the head; None: ``build_norm``.
        head_bias: Whether logits have a bias.
        ignored: Regular expressions of further tensors to ignore; see ``CausalLM``.
        options: Options of ``CausalLM``.
    """
    layer, sizes = layer or build_layer, (config.vocab_size, config.hidden_size)
    inner = scope.at("model")
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embed_tokens")),
        layers=[layer(config, index, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=build_norm(config, inner.at("norm")) if norm is None else norm,
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head"), has_bias=head_bias),
        ignored=(r"(.*\.)?rotary_emb\.inv_freq", *ignored),
        **options,
    )


def build_layer(
    config: DecoderConfig,
    index: int,
    scope: Scope,
    *,
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    gate_up: Sequence[str] = ("gate_proj", "up_proj"),
    qk_norm: QkNorm = "none",
    scale: float | None = None,
    residual_multiplier: float = 1.0,
    mlp: GatedMLP | PlainMLP | SparseMLP | None = None,
    attention: Attention | None = None,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    layer: type[PreNormLayer] = PreNormLayer,
) -> PreNormLayer:
    """Build a Llama layer; the options are those of ``GroupedQueryAttention``, ``GatedMLP`` and ``PreNormLayer``.

    ``mlp`` replaces the dense MLP, ``attention`` the grouped-query attention, ``norms`` the modules of both norms,
    ``layer`` the class.
    """
    if attention is None:
        attention = build_attention(config, index, scope.at("self_attn"), qkv=qkv, qk_norm=qk_norm, scale=scale)
    return layer(
        build_norm(config, scope.at(norms[0])),
        attention,
        build_norm(config, scope.at(norms[1])),
        build_mlp(config, scope.at("mlp"), gate_up) if mlp is None else mlp,
        residual_multiplier=residual_multiplier,
    )


def build_layer_norm_layer(
    config: DecoderConfig,
    index: int,
    scope: Scope,
    mlp: GatedMLP | PlainMLP,
    *,
    is_parallel: bool = False,
    **options: Any,
) -> LayerNormLayer:
    """Build a layer with layer norms; if it is parallel, one norm is that of both branches.

    ``options`` are those of ``GroupedQueryAttention``.
    """
    return LayerNormLayer(
        build_layer_norm(config, scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn"), **options),
        None if is_parallel else build_layer_norm(config, scope.at("post_attention_layernorm")),
        mlp,
        is_parallel=is_parallel,
    )


def build_attention(config: DecoderConfig, index: int, scope: Scope, **options: Any) -> GroupedQueryAttention:
    """Build the attention of a layer; ``options`` are further options of ``GroupedQueryAttention``."""
    return GroupedQueryAttention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scope=scope,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        **{
            "norm_eps": config.norm_eps,
            "norm_offset": config.norm_offset,
            "window": config.sliding_windows[index],
            "rope": 0 if config.rope_layers[index] else None,
            **options,
        },
    )


def build_mlp(config: DecoderConfig, scope: Scope, gate_up: Sequence[str] = ("gate_proj", "up_proj")) -> GatedMLP:
    """Build the MLP of a layer."""
    sizes = (config.hidden_size, config.ffn_size)
    return GatedMLP(*sizes, activation=config.activation, bias=config.mlp_bias, scope=scope, gate_up=gate_up)


def build_plain_mlp(config: DecoderConfig, scope: Scope, up: str = "up_proj", down: str = "down_proj") -> PlainMLP:
    """Build the MLP of a layer without gates."""
    sizes = (config.hidden_size, config.ffn_size)
    return PlainMLP(*sizes, activation=config.activation, bias=config.mlp_bias, scope=scope, up=up, down=down)


def extra_layers(first: int, count: int) -> tuple[str, ...]:
    """Return regular expressions of the tensors of layers for multi-token prediction, which are not loaded."""
    numbers = "|".join(map(str, range(first, first + count)))
    return (rf"(model\.)?layers\.({numbers})\..*",) if count else ()


def build_norm(config: DecoderConfig, scope: Scope) -> RMSNorm:
    """Build a norm over the hidden size."""
    return RMSNorm(config.hidden_size, eps=config.norm_eps, offset=config.norm_offset, scope=scope)


def build_layer_norm(config: DecoderConfig, scope: Scope, *, has_bias: bool = True) -> LayerNorm:
    """Build a layer norm over the hidden size."""
    eps, offset = config.norm_eps, config.norm_offset
    return LayerNorm(config.hidden_size, eps=eps, offset=offset, scope=scope, has_bias=has_bias)
