"""What a decoder looks like, in one vocabulary for every family; ``jaxserve.models`` reads it from ``config.json``."""

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
QkNorm = Literal["none", "head", "width"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model, in the terms of Hugging Face's ``rope_scaling``.

    Attributes:
        kind: Which scaling; fields that a kind does not use keep their defaults.
        theta: Base of the frequencies.
        rotary_dim: Leading features of a head that are rotated (even, at most the head's).
        max_positions: ``max_position_embeddings`` of the model, in tokens.
        factor: Scaling factor; in longrope only the attention factor follows from it.
        original_max_positions: Positions the model was first trained on, in tokens.
        attention_factor: Multiplies cos and sin; None derives it as the kind's paper does.
        beta_fast: Yarn: rotations above which a frequency is kept.
        beta_slow: Yarn: rotations below which a frequency is fully interpolated.
        mscale: Yarn: numerator of DeepSeek's attention factor (0: unused).
        mscale_all_dim: Yarn: denominator of DeepSeek's attention factor (0: unused).
        truncate: Yarn: round the correction range to whole features.
        low_freq_factor: Llama 3: wavelengths longer than original/low are divided by ``factor``.
        high_freq_factor: Llama 3: wavelengths shorter than original/high are kept.
        short_factor: Longrope: divisors of each frequency up to the original length.
        long_factor: Longrope: divisors beyond the original length.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int
    max_positions: int
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One dense decoder-only model.

    Attributes:
        architecture: Hugging Face's class name, such as ``LlamaForCausalLM``.
        vocab_size: V, rows of the embedding as stored.
        hidden_size: D.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H; need not be D / N.
        ffn_size: F.
        norm_eps: Added to the mean square in every RMSNorm.
        activation: Hugging Face's ``hidden_act``, one name for each function: silu, gelu, gelu_pytorch_tanh or relu.
        max_positions: Longest context in tokens, with what linear, dynamic and yarn scalings add to it.
        tie_embeddings: The head is the embedding.
        qkv_bias: Query, key and value projections have a bias.
        out_bias: The attention's output projection has a bias.
        mlp_bias: The three MLP projections have a bias.
        qk_norm: RMSNorm of queries and keys: none, over each head (Qwen3), or over all heads at once (OLMo-2).
        norm_after: Norms follow attention and MLP, inside the residual branch (OLMo-2), instead of preceding them.
        rope: Rotary embedding.
        rope_layers: For each layer, whether it rotates (SmolLM3 leaves some out).
        sliding_windows: For each layer, how many latest tokens a query sees (itself included), or None for all.
        attention_scale: Multiplies query-key products; None means 1 / sqrt(H).
        attention_soft_cap: Products become cap * tanh(product / cap); None means no cap.
        embedding_multiplier: Multiplies embeddings (Granite).
        residual_multiplier: Multiplies each branch before it is added (Granite).
        logits_divisor: Divides the logits (Granite).
        bos_token_id: First token of a text, where the model has one.
        eos_token_ids: Tokens that end a generation.
        dtype: Element type the checkpoint says it was made in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    activation: str = "silu"
    max_positions: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norm_after: bool = False
    rope: RopeConfig
    rope_layers: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
