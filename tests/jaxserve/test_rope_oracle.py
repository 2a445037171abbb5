"""Rotary embeddings against transformers' own, for every scaling."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="transformers' rotary embeddings need torch")

from transformers import LlamaConfig, Phi3Config  # noqa: E402  (these need torch)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_apply  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding  # noqa: E402
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_apply  # noqa: E402

from jaxserve.layers.model_config import ModelConfig, RopeConfig  # noqa: E402
from jaxserve.layers.rope import attention_factor, rope_cos_sin  # noqa: E402
from jaxserve.models.registry import config_from_hf  # noqa: E402
from pallas_kernels.qkv_write import apply_rope  # noqa: E402

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 96,
}
LONG_FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.5 + 0.7 * i for i in range(32)],
}
CONSTANT_KINDS: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 500000.0},
    {"rope_theta": 1e8, "head_dim": 80},
    {"rope_theta": 10000.0, "head_dim": 8},
    {"rope_scaling": {"type": "linear", "factor": 2.5}},
    {"rope_scaling": {"rope_type": "linear", "factor": 8}, "rope_theta": 1e6},
    {
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    {
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 1024,
        },
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.3}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "truncate": False}, "rope_theta": 150000.0},
    {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 48, "beta_slow": 2.5}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}, "rope_theta": 50000.0},
    {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
        }
    },
]


def read(raw: dict[str, Any], architecture: str = "LlamaForCausalLM") -> ModelConfig:
    return config_from_hf({"architectures": [architecture], **SIZES, **raw}, "config.json")


def rope_of(config: ModelConfig) -> RopeConfig:
    assert config.rope is not None
    return config.rope


def oracle(raw: dict[str, Any], seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor of transformers, from the function that it looks up by kind."""
    config = LlamaConfig(**SIZES, **{"max_position_embeddings": 2048, **raw})
    kind = cast(dict[str, Any], config.rope_parameters)["rope_type"]
    if kind == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies.numpy(), float(factor)


def compute(config: RopeConfig, positions: list[int], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of a jitted call."""
    call = jax.jit(lambda p, n: rope_cos_sin(config, p, n))
    cos, sin = call(jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    return np.asarray(cos), np.asarray(sin)


def frequencies_of(config: RopeConfig, length: int = 1) -> np.ndarray:
    """Angles at position 1, from cosine and sine."""
    cos, sin = compute(config, [1], [length])
    return np.arctan2(sin[0], cos[0])


def assert_angles(config: RopeConfig, expected: np.ndarray, factor: float, length: int, ulp: float = 1.3e-7) -> None:
    """Cosines and sines over a range of positions, within a relative error ``ulp`` of the angle."""
    positions = np.array([0, 1, 2, 63, 511, 2047, 60000])
    cos, sin = compute(config, positions.tolist(), [length] * len(positions))
    angles = (positions.astype(np.float32)[:, None] * expected.astype(np.float32)).astype(np.float64)
    tolerance = 1e-6 + ulp * angles
    assert (np.abs(cos - np.cos(angles) * factor) <= tolerance * factor).all()
    assert (np.abs(sin - np.sin(angles) * factor) <= tolerance * factor).all()


@pytest.mark.parametrize("raw", CONSTANT_KINDS, ids=str)
def test_matches_transformers(raw: dict[str, Any]) -> None:
    config = rope_of(read({"max_position_embeddings": 2048, **raw}))
    expected, factor = oracle(raw)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)
    np.testing.assert_allclose(frequencies_of(config), expected, rtol=1e-6, atol=1e-7)
    assert_angles(config, expected, factor, length=1)


@pytest.mark.parametrize("factor", [2.0, 4, 1.7])
@pytest.mark.parametrize("length", [1, 2048, 2049, 5000, 30000])
def test_dynamic_uses_the_final_length(factor: float, length: int) -> None:
    raw = {"rope_scaling": {"type": "dynamic", "factor": factor}, "rope_theta": 10000.0}
    config = rope_of(read({"max_position_embeddings": 2048, **raw}))
    expected, attention = oracle(raw, seq_len=length)
    assert_angles(config, expected, attention, length, ulp=4e-7)
    np.testing.assert_allclose(frequencies_of(config, length), expected, rtol=1e-6, atol=1e-7)
    if length <= 2048:
        plain = RopeConfig(rotary_dim=64, max_positions=2048)
        np.testing.assert_array_equal(frequencies_of(config, length), frequencies_of(plain))


@pytest.mark.parametrize("extra", [{}, {"factor": 16.0}, {"attention_factor": 1.25}, {"factor": 0.5}], ids=str)
@pytest.mark.parametrize("length", [1, 512, 513, 4000])
def test_longrope_uses_the_final_length(extra: dict[str, Any], length: int) -> None:
    scaling = {"rope_type": "longrope", **LONG_FACTORS, **extra}
    raw = {"rope_scaling": scaling, "original_max_position_embeddings": 512}
    config = rope_of(read({"max_position_embeddings": 2048, **raw}))
    expected, factor = oracle(raw, seq_len=length)
    assert_angles(config, expected, factor, length)


@pytest.mark.parametrize("raw", [CONSTANT_KINDS[0], CONSTANT_KINDS[6], CONSTANT_KINDS[8]], ids=str)
def test_rotation_matches_llama(raw: dict[str, Any]) -> None:
    raw = {"max_position_embeddings": 2048, **raw}
    x = np.random.default_rng(0).standard_normal((7, 3, 64)).astype(np.float32)
    positions = torch.arange(100, 107)[None]
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **raw))(torch.zeros(1), positions)
    expected, _ = llama_apply(torch.tensor(x)[None], torch.tensor(x)[None], cos, sin, unsqueeze_dim=2)
    ours = apply_rope(jnp.asarray(x), *map(jnp.asarray, compute(rope_of(read(raw)), list(range(100, 107)), [1] * 7)))
    np.testing.assert_allclose(ours, expected[0].numpy(), atol=3e-5)


@pytest.mark.parametrize("last_position", [40, 1000])
def test_partial_rotation_with_longrope_matches_phi3(last_position: int) -> None:
    half = 24
    factors = {key: value[:half] for key, value in LONG_FACTORS.items()}
    raw: dict[str, Any] = {
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "su", **factors},
    }
    config = read(raw, "Phi3ForCausalLM")
    assert rope_of(config).rotary_dim == 2 * half
    x = np.random.default_rng(1).standard_normal((5, 2, 64)).astype(np.float32)
    positions = np.linspace(0, last_position, 5).astype(np.int64)
    hf_config = Phi3Config(
        **SIZES, **{**raw, "rope_scaling": {**raw["rope_scaling"], "original_max_position_embeddings": 512}}
    )
    cos, sin = Phi3RotaryEmbedding(hf_config)(torch.zeros(1), torch.tensor(positions)[None])
    expected, _ = phi3_apply(torch.tensor(x)[None], torch.tensor(x)[None], cos, sin, unsqueeze_dim=2)
    tables = compute(rope_of(config), positions.tolist(), [last_position + 1] * 5)
    ours = np.asarray(apply_rope(jnp.asarray(x), *map(jnp.asarray, tables)))
    np.testing.assert_allclose(ours, expected[0].numpy(), atol=2e-4)
    np.testing.assert_array_equal(ours[..., 2 * half :], x[..., 2 * half :])
