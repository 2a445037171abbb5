"""Model configuration for the engine and the rotary embedding; ``jaxserve.models`` reads it from ``config.json``."""

import dataclasses
from abc import ABC
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model, in the terms of Hugging Face's ``rope_scaling``.

    Attributes:
        kind: Kind of scaling; fields that it does not use keep their defaults.
        theta: Base of the frequencies.
        rotary_dim: Number of leading features of a head that are rotated (even, at most the head's).
        max_positions: ``max_position_embeddings`` of the model, in tokens.
        factor: Scaling factor; longrope uses it for the attention factor only.
        original_max_positions: Positions the model was first trained on, in tokens.
        attention_factor: Factor of cos and sin; None uses the formula of the kind's paper.
        beta_fast: Yarn: rotations above which a frequency is kept.
        beta_slow: Yarn: rotations below which a frequency is fully interpolated.
        mscale: Yarn: numerator of DeepSeek's attention factor (0: unused).
        mscale_all_dim: Yarn: denominator of DeepSeek's attention factor (0: unused).
        truncate: Yarn: round the correction range to whole features.
        low_freq_factor: Llama 3: wavelengths longer than original/low are divided by ``factor``.
        high_freq_factor: Llama 3: wavelengths shorter than original/high are kept.
        short_factor: Longrope: divisors of each frequency up to the original length.
        long_factor: Longrope: divisors beyond the original length.
        short_mscale: Longrope: factor of cos and sin up to the original length, in place of ``attention_factor``.
        long_mscale: Longrope: the same beyond the original length.
        rotated_share: Proportional: share of the features that rotate; the frequencies of the others are zero.
        is_reversed: Whether features rotate the other way (nanochat).
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
    short_mscale: float | None = None
    long_mscale: float | None = None
    rotated_share: float = 1.0
    is_reversed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The properties of a model that the engine needs; families add what their layers need.

    Attributes:
        architecture: Hugging Face's class name, such as ``LlamaForCausalLM``.
        vocab_size: V, rows of the embedding as stored.
        hidden_size: D.
        num_layers: L.
        max_positions: Longest context in tokens, including the extension by linear, dynamic and yarn scaling.
        rope: Rotary embedding; None for a model without one.
        bos_token_id: First token of a text, if the model has one.
        eos_token_ids: Tokens that end a generation.
        has_default_eos: Whether these are the family's default, because the config does not have the field.
        tie_embeddings: Whether the head is the embedding.
        has_head: Whether the model computes logits; without a head it only embeds, and its head is the embedding.
        dtype: Element type that the checkpoint declares.
        multimodal: Class of the multimodal checkpoint that this is the language model of; None for a language model.
        may_share_head: Whether a checkpoint without a tensor of the head shares that of the embedding, although
            ``tie_embeddings`` is false, because its config does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    rope: RopeConfig | None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_default_eos: bool = False
    tie_embeddings: bool = False
    has_head: bool = True
    dtype: str = "float32"
    multimodal: str | None = None
    may_share_head: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return False
