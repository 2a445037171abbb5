"""Rotary position embedding: each pair of features (i, i + R) of a head turns by position times its own frequency.

The frequencies depend on the model alone, except under dynamic NTK and longrope, where they depend on how long the
text gets. Cached keys cannot be turned again, so those two take the request's *final* length (prompt plus
``max_tokens``), the same for each of its tokens. R below is half of ``rotary_dim``. Constants are rounded to
float32 where transformers rounds them, because at position 100,000 a frequency off by one part in 10^7 is an angle
off by 0.01.
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
    """Cosines and sines of every token's angles, times the attention factor, in float32.

    Args:
        config: The model's rotary embedding.
        positions: Place of each token in its text, from 0.
        lengths: Final length in tokens of the request that each token belongs to; read by dynamic and longrope only.
    """
    angles = positions.astype(jnp.float32)[:, None] * _frequencies(config, lengths)
    factor = np.float32(attention_factor(config))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def attention_factor(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by: as configured, else as the papers of yarn and longrope derive it."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _yarn_mscale(config.factor, config.mscale) / _yarn_mscale(config.factor, config.mscale_all_dim)
        return _yarn_mscale(config.factor, 1.0)
    if config.kind == "longrope" and config.factor > 1.0:
        return math.sqrt(1.0 + math.log(config.factor) / math.log(_original_positions(config)))
    return 1.0


def length_regime(config: RopeConfig, length: int) -> int:
    """Return a number that is the same for final lengths with the same frequencies: only their keys may be shared."""
    if config.kind == "dynamic":
        return max(length - config.max_positions, 0)
    return int(config.kind == "longrope" and length > _original_positions(config))


def _frequencies(config: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T R"] | Float[Array, "1 R"]:
    """Radians per position: one row for all tokens, or one a token where the length decides."""
    if config.kind == "dynamic":
        return _dynamic_frequencies(config, lengths)
    if config.kind == "longrope":
        short, long = (_longrope_frequencies(config, factors) for factors in (config.short_factor, config.long_factor))
        return jnp.where((lengths > _original_positions(config))[:, None], long, short)
    return jnp.asarray(_constant_frequencies(config))[None]


def _constant_frequencies(config: RopeConfig) -> np.ndarray:
    """Radians per position, float32 ``[R]``, of the kinds that ignore the length."""
    plain = 1.0 / _wavelength_powers(config)
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "llama3":
        return _llama3_frequencies(config, plain)
    if config.kind == "yarn":
        return _yarn_frequencies(config)
    return plain


def _exponents(config: RopeConfig) -> np.ndarray:
    """Feature number over rotary_dim, ``0, 2/d, 4/d, ...``, rounded to float32 as transformers does."""
    return np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)


def _wavelength_powers(config: RopeConfig) -> np.ndarray:
    """``theta ** exponent`` in float32 ``[R]``: the wavelength in positions, over 2 pi."""
    return np.power(config.theta, _exponents(config).astype(np.float64)).astype(np.float32)


def _dynamic_frequencies(config: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T R"]:
    """Dynamic NTK: a text beyond the trained length raises the base, so that its slowest feature still spans it."""
    dim = config.rotary_dim
    beyond = jnp.maximum(lengths - config.max_positions, 0).astype(jnp.float32)
    stretch = 1.0 + beyond * np.float32(config.factor / config.max_positions)
    powers = (-_exponents(config).astype(np.float64) * dim / (dim - 2)).astype(np.float32)
    return jnp.power(stretch[:, None], powers) * (1.0 / _wavelength_powers(config))


def _longrope_frequencies(config: RopeConfig, factors: tuple[float, ...]) -> jax.Array:
    """Longrope: each frequency has its own divisor."""
    return jnp.asarray(1.0 / (np.asarray(factors, np.float32) * _wavelength_powers(config)))


def _llama3_frequencies(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between are blended."""
    original = _original_positions(config)
    wavelengths = (np.float32(2 * math.pi) / plain).astype(np.float32)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - kept) * plain / np.float32(config.factor) + kept * plain
    stretched = np.where(wavelengths > original / low, plain / np.float32(config.factor), blended)
    return np.where(wavelengths < original / high, plain, stretched).astype(np.float32)


def _yarn_frequencies(config: RopeConfig) -> np.ndarray:
    """Yarn: features that turn often within the original length are kept, those that turn rarely are stretched."""
    powers = _wavelength_powers(config)
    low, high = _yarn_correction_range(config)
    ramp = (np.arange(config.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1.0) - np.clip(ramp, 0.0, 1.0)
    return 1.0 / (np.float32(config.factor) * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_correction_range(config: RopeConfig) -> tuple[float, float]:
    """First and last feature of the blend between kept and stretched ones."""
    dim = config.rotary_dim

    def feature_with(rotations: float) -> float:
        """Return the feature that turns this many times within the original length."""
        turns = _original_positions(config) / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = feature_with(config.beta_fast), feature_with(config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, float(dim - 1))
    return low, high if high != low else high + 0.001


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Return how much longer contexts sharpen attention, as yarn's paper fits it."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _original_positions(config: RopeConfig) -> int:
    """Positions the model was first trained on."""
    return config.max_positions if config.original_max_positions is None else config.original_max_positions
