"""Rotary embeddings: plain formulas, the final length of a request, rotation itself. See also test_rope_oracle.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.model_config import RopeConfig, RopeKind
from jaxserve.layers.rope import rope_cos_sin
from pallas_kernels.qkv_write import apply_rope

FACTORS = tuple(1.0 + 0.7 * i for i in range(32))
LONGROPE: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "longrope": {"short_factor": (1.0,) * 32, "long_factor": FACTORS, "original_max_positions": 512},
}


def compute(config: RopeConfig, positions: list[int], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of a jitted call."""
    call = jax.jit(lambda p, n: rope_cos_sin(config, p, n))
    cos, sin = call(jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    return np.asarray(cos), np.asarray(sin)


@pytest.mark.parametrize(
    ("theta", "kind", "factor"), [(1e4, "default", 1.0), (1e6, "default", 1.0), (5e5, "linear", 8.0)]
)
def test_plain_frequencies(theta: float, kind: RopeKind, factor: float) -> None:
    config = RopeConfig(kind=kind, theta=theta, rotary_dim=64, max_positions=4096, factor=factor)
    positions = np.array([0, 1, 30, 4095])
    angles = positions[:, None] * theta ** (-np.arange(0, 64, 2) / 64) / factor
    cos, sin = compute(config, positions.tolist(), [1] * 4)
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=5e-4)


def test_dynamic_raises_the_base_beyond_the_trained_length_only() -> None:
    config = RopeConfig(kind="dynamic", rotary_dim=64, max_positions=512, factor=4.0)
    for length, base in ((1, 1e4), (512, 1e4), (1024, 1e4 * (4.0 * 1024 / 512 - 3.0) ** (64 / 62))):
        angles = np.arctan2(*(table[0] for table in reversed(compute(config, [1], [length]))))
        np.testing.assert_allclose(angles, base ** (-np.arange(0, 64, 2) / 64), rtol=2e-6, atol=1e-7)


def test_features_beyond_the_rotary_ones_pass_through() -> None:
    config = RopeConfig(rotary_dim=4, max_positions=64)
    cos, sin = map(jnp.asarray, compute(config, [3], [1]))
    x = np.arange(1.0, 9.0, dtype=np.float32).reshape(1, 1, 8)
    turned = np.asarray(apply_rope(jnp.asarray(x), cos, sin))[0, 0]
    np.testing.assert_array_equal(turned[4:], x[0, 0, 4:])
    complex_pairs = (x[0, 0, :2] + 1j * x[0, 0, 2:4]) * np.exp(1j * 3 * np.array([1.0, 0.01]))
    np.testing.assert_allclose(turned[:4], [*complex_pairs.real, *complex_pairs.imag], rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_each_row_follows_its_own_request(kind: RopeKind) -> None:
    config = RopeConfig(kind=kind, rotary_dim=64, max_positions=512, factor=4.0, **LONGROPE[kind])
    positions, lengths = [5, 5, 300, 300], [512, 2000, 512, 1000]
    together = compute(config, positions, lengths)
    for row, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        alone = compute(config, [position], [length])
        for batched, single in zip(together, alone, strict=True):
            np.testing.assert_allclose(batched[row], single[0], atol=1e-6)
    assert np.abs(together[0][0] - together[0][1]).max() > 0.01


def test_rotation_keeps_the_dtype_and_rounds_once() -> None:
    config = RopeConfig(rotary_dim=16, max_positions=64)
    cos, sin = map(jnp.asarray, compute(config, [3, 50], [1, 1]))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 4, 16)), jnp.bfloat16)
    turned = apply_rope(x, cos, sin)
    assert turned.dtype == jnp.bfloat16
    exact = apply_rope(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(exact.astype(jnp.bfloat16)))


def test_products_depend_on_distance_only() -> None:
    config = RopeConfig(rotary_dim=32, max_positions=4096)
    q, k = np.random.default_rng(3).standard_normal((2, 1, 1, 32)).astype(np.float32)

    def product(query_position: int, key_position: int) -> float:
        turned = [
            np.asarray(apply_rope(jnp.asarray(x), *map(jnp.asarray, compute(config, [position], [1]))))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(17, 5) == pytest.approx(product(1017, 1005), abs=1e-3)
    assert abs(product(17, 5) - product(17, 9)) > 0.1
