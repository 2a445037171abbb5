"""Rotary position embedding: rotates each pair of features (i, i + R) of a head by position times a frequency.

The frequencies depend on the model alone, except for dynamic NTK and longrope, where they depend on the length of the
context. Cached keys cannot be rotated again, so those two use the request's *final* length (prompt plus
``max_tokens``) for each of its tokens. R below is half of ``rotary_dim``. Constants are rounded to float32 where
transformers rounds them, because at position 100,000 a relative frequency error of 10^-7 is an angle error of 0.01.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.model_config import RopeConfig


def rope_cos_sin(
    config: RopeConfig, positions: Int[Array, " T"], lengths: Int[Array, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """Return cosines and sines of every token's angles, times the attention factor, in float32.

    Args:
        config: The model's rotary embedding.
        positions: Position of each token in its sequence, from 0.
        lengths: Final length in tokens of the request that each token belongs to; read by dynamic and longrope only.
    """
    angles = positions.astype(jnp.float32)[:, None] * _frequencies(config, lengths)
    factor = np.float32(attention_factor(config))
    if config.short_mscale is not None and config.long_mscale is not None:
        is_long = (lengths > _original_positions(config))[:, None]
        factor = jnp.where(is_long, np.float32(config.long_mscale), np.float32(config.short_mscale))
    return jnp.cos(angles) * factor, jnp.sin(-angles if config.is_reversed else angles) * factor


def attention_factor(config: RopeConfig) -> float:
    """Return the factor of cosines and sines: as configured, or as derived in the papers of yarn and longrope."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
        return yarn_mscale(config.factor, 1.0)
    if config.kind == "longrope" and config.factor > 1.0:
        return math.sqrt(1.0 + math.log(config.factor) / math.log(_original_positions(config)))
    return 1.0


def has_length_regimes(config: RopeConfig | None) -> bool:
    """Whether a model has RoPE whose frequencies depend on the final length of a context."""
    return config is not None and config.kind in ("dynamic", "longrope")


def length_regime(config: RopeConfig, length: int) -> int:
    """Return an id of the frequencies for a final length; contexts may share cached keys only if their ids are
    equal."""
    if config.kind == "dynamic":
        return max(length - config.max_positions, 0)
    return int(config.kind == "longrope" and length > _original_positions(config))


def _frequencies(config: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T R"] | Float[Array, "1 R"]:
    """Return radians per position: one row for all tokens, or one per token if the length matters."""
    if config.kind == "dynamic":
        return _dynamic_frequencies(config, lengths)
    if config.kind == "longrope":
        short, long = (_longrope_frequencies(config, factors) for factors in (config.short_factor, config.long_factor))
        return jnp.where((lengths > _original_positions(config))[:, None], long, short)
    return jnp.asarray(_constant_frequencies(config))[None]


def _constant_frequencies(config: RopeConfig) -> np.ndarray:
    """Return radians per position, float32 ``[R]``, of the kinds that ignore the length."""
    plain = 1.0 / _wavelength_powers(config)
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "proportional":
        num_rotated = int(config.rotated_share * config.rotary_dim // 2)
        return np.where(np.arange(len(plain)) < num_rotated, plain / np.float32(config.factor), np.float32(0.0))
    if config.kind == "llama3":
        return _llama3_frequencies(config, plain)
    if config.kind == "yarn":
        return _yarn_frequencies(config)
    return plain


def _exponents(config: RopeConfig) -> np.ndarray:
    """Return feature index / rotary_dim, ``0, 2/d, 4/d, ...``, rounded to float32 as in transformers."""
    return np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)


def _wavelength_powers(config: RopeConfig) -> np.ndarray:
    """Return ``theta ** exponent`` in float32 ``[R]``: the wavelength in positions, divided by 2 pi."""
    return np.power(config.theta, _exponents(config).astype(np.float64)).astype(np.float32)


def _dynamic_frequencies(config: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T R"]:
    """Scale by dynamic NTK: a context beyond the trained length raises the base, so that the slowest feature spans
    it."""
    dim = config.rotary_dim
    beyond = jnp.maximum(lengths - config.max_positions, 0).astype(jnp.float32)
    stretch = 1.0 + beyond * np.float32(config.factor / config.max_positions)
    powers = (-_exponents(config).astype(np.float64) * dim / (dim - 2)).astype(np.float32)
    return jnp.power(stretch[:, None], powers) * (1.0 / _wavelength_powers(config))


def _longrope_frequencies(config: RopeConfig, factors: tuple[float, ...]) -> jax.Array:
    """Scale by longrope: each frequency has its own divisor."""
    return jnp.asarray(1.0 / (np.asarray(factors, np.float32) * _wavelength_powers(config)))


def _llama3_frequencies(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Scale as Llama 3.1: long wavelengths are multiplied by ``factor``, short ones kept, those between blended."""
    original = _original_positions(config)
    wavelengths = (np.float32(2 * math.pi) / plain).astype(np.float32)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - kept) * plain / np.float32(config.factor) + kept * plain
    stretched = np.where(wavelengths > original / low, plain / np.float32(config.factor), blended)
    return np.where(wavelengths < original / high, plain, stretched).astype(np.float32)


def _yarn_frequencies(config: RopeConfig) -> np.ndarray:
    """Scale by yarn: features with many rotations within the original length are kept, those with few interpolated."""
    powers = _wavelength_powers(config)
    low, high = _yarn_correction_range(config)
    ramp = (np.arange(config.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1.0) - np.clip(ramp, 0.0, 1.0)
    return 1.0 / (np.float32(config.factor) * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_correction_range(config: RopeConfig) -> tuple[float, float]:
    """Return the first and last feature of yarn's blend between kept and interpolated ones."""
    dim = config.rotary_dim

    def feature_with(rotations: float) -> float:
        """Return the feature with this many rotations within the original length."""
        turns = _original_positions(config) / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = feature_with(config.beta_fast), feature_with(config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, float(dim - 1))
    return low, high if high != low else high + 0.001


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return yarn's attention factor for longer contexts, as fitted in its paper."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _original_positions(config: RopeConfig) -> int:
    """Return the number of positions that the model was first trained on."""
    return config.max_positions if config.original_max_positions is None else config.original_max_positions
