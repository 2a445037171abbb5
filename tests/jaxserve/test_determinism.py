"""With a row tile, hidden states and logits of a token have the same bits however a schedule computes it."""

import functools
import os
from typing import Any

import numpy as np
import pytest

from tests.hooks import (
    ATTENTION_BACKEND,
    NUM_TINY_LAYERS,
    ROW_TILE,
    ClampedSwiGLU,
    DtypePolicy,
    RopeConfig,
    Routing,
    ScheduledModel,
    Shape,
    Step,
    native_threads,
    why_no_native_kernels,
)

NUM_PAGES = 120
MAX_LENGTH = 200
BFLOAT16 = DtypePolicy(weights="bfloat16")
SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 136,
    "vocab_size": 101,
    "max_positions": MAX_LENGTH,
    "rope": RopeConfig(rotary_dim=16, max_positions=MAX_LENGTH),
}
DYNAMIC = RopeConfig(kind="dynamic", rotary_dim=12, max_positions=64, factor=2.0)
ROUTING = Routing(num_experts=6, experts_per_token=2, is_normalized=True)
MIXTRAL: dict[str, Any] = {
    "architecture": "MixtralForCausalLM",
    "sparse_layers": (True, True),
    "shared_ffn_size": 0,
    "qkv_bias": False,
}
MULTIPLIED = {"embedding_multiplier": 1.7, "residual_multiplier": 0.3, "logits_divisor": 3.0}
NATIVE = DtypePolicy(linear="native", grouped="native")
NATIVE_BFLOAT16 = DtypePolicy(weights="bfloat16", kv="bfloat16", linear="native", grouped="native")
GATING = ClampedSwiGLU(alpha=1.702, limit=7.0)
LATENTS = {"rank": 24, "plain_dim": 20, "value_dim": 18, "query_rank": 36}
FAMILIES: dict[str, tuple[dict[str, Any], int, DtypePolicy]] = {
    "llama": ({}, 1, DtypePolicy()),
    "llama_split": ({}, 2, DtypePolicy()),
    "bfloat16_tied": ({"tie_embeddings": True, "qkv_bias": True}, 1, BFLOAT16),
    "bfloat16_activations": ({}, 1, DtypePolicy(weights="bfloat16", activations="bfloat16", kv="bfloat16")),
    "head_norms_and_windows": ({"qk_norm": "head", "sliding_windows": (20, None)}, 1, DtypePolicy()),
    "width_norms_behind_split": ({"qk_norm": "width", "norm_after": True}, 2, DtypePolicy()),
    "multiplied_and_capped": ({**MULTIPLIED, "attention_soft_cap": 5.0, "rope": DYNAMIC}, 1, DtypePolicy()),
    "split_in_four": ({"tie_embeddings": True, "mlp_bias": True, "out_bias": True}, 4, BFLOAT16),
    "experts": ({"routing": ROUTING}, 1, DtypePolicy()),
    "experts_split": ({"routing": ROUTING}, 2, BFLOAT16),
    "latents": (LATENTS, 1, DtypePolicy()),
    "latents_native": (LATENTS, 1, NATIVE),
    "latents_native_split": (LATENTS, 2, NATIVE_BFLOAT16),
    "sinks": ({"gating": GATING, "sliding_windows": (20, None)}, 1, DtypePolicy()),
    "sinks_native_split": ({"gating": GATING, "sliding_windows": (20, None)}, 2, NATIVE_BFLOAT16),
}
NATIVE_FAMILIES: dict[str, tuple[dict[str, Any], int, DtypePolicy]] = {
    "llama": ({}, 1, NATIVE),
    "llama_split": ({}, 2, NATIVE),
    "bfloat16_tied": ({"tie_embeddings": True, "qkv_bias": True}, 1, NATIVE_BFLOAT16),
    "head_norms_and_windows": ({"qk_norm": "head", "sliding_windows": (20, None)}, 1, NATIVE),
    "multiplied_and_capped": ({**MULTIPLIED, "attention_soft_cap": 5.0, "rope": DYNAMIC}, 1, NATIVE),
    "split_in_four": ({"tie_embeddings": True, "mlp_bias": True, "out_bias": True}, 4, NATIVE_BFLOAT16),
    "experts": ({"routing": ROUTING}, 1, NATIVE),
    "experts_split": ({"routing": ROUTING}, 2, NATIVE_BFLOAT16),
    "experts_alone": ({"routing": ROUTING, **MIXTRAL}, 1, NATIVE_BFLOAT16),
    "experts_alone_split": ({"routing": ROUTING, **MIXTRAL}, 2, NATIVE),
}
SPLIT_TOKENS: dict[str, tuple[dict[str, Any], int, DtypePolicy]] = {
    "norms_behind_on_four": ({"qk_norm": "width", "norm_after": True, "tie_embeddings": True}, 4, DtypePolicy()),
    "latents_native": (LATENTS, 2, NATIVE_BFLOAT16),
    "experts_native": ({"routing": ROUTING}, 2, NATIVE),
}
SLOW = ("llama", "experts", "latents_native")  # on one device what other rows split
same_code = pytest.mark.skipif(
    "interpret" in (ATTENTION_BACKEND or "") and "xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"],
    reason="an interpreted kernel's code, not optimized, differs from program to program; run with "
    "XLA_FLAGS=--xla_backend_optimization_level=2",
)
LENGTHS = (3, 150, 19, 64, 137, 8, 33, 1, 90, 12)
pytestmark = pytest.mark.usefixtures("switchable_family")
DECODE = Shape(ROW_TILE, ROW_TILE, 20, decode_only=True)
WIDE_DECODE = Shape(3 * ROW_TILE, 3 * ROW_TILE, 25, decode_only=True)
SMALL = Shape(ROW_TILE, 4, 20)
CHUNKS = Shape(5 * ROW_TILE, 2 * ROW_TILE, 33)
LARGE = Shape(20 * ROW_TILE, ROW_TILE, 20)


def one_by_one(sequence: int, shape: Shape = DECODE) -> list[Step]:
    return [(shape, [(sequence, position, 1)]) for position in range(LENGTHS[sequence])]


def at_once(sequence: int) -> list[Step]:
    return [(LARGE, [(sequence, 0, LENGTHS[sequence])])]


def in_chunks(sequence: int, shape: Shape, seed: int) -> list[Step]:
    """Chunks of random lengths."""
    generator, steps, start = np.random.default_rng(seed), [], 0
    while start < LENGTHS[sequence]:
        count = int(generator.integers(1, min(shape.num_tokens, LENGTHS[sequence] - start) + 1))
        steps.append((shape, [(sequence, start, count)]))
        start += count
    return steps


def together(seed: int) -> list[Step]:
    """All sequences in random order: chunks of any length and single tokens, in whatever program holds them."""
    generator = np.random.default_rng(seed)
    done = dict.fromkeys(range(len(LENGTHS)), 0)
    steps: list[Step] = []
    while left := [s for s, start in done.items() if start < LENGTHS[s]]:
        shape = [DECODE, WIDE_DECODE, SMALL, CHUNKS, CHUNKS, LARGE][generator.integers(6)]
        rows: list[tuple[int, int, int]] = []
        budget = shape.num_tokens
        for sequence in generator.permutation(left)[: shape.num_rows]:
            most = min(budget, LENGTHS[sequence] - done[sequence])
            if most == 0:
                break
            is_one = shape.decode_only or generator.random() < 0.4
            count = 1 if is_one else int(generator.integers(1, most + 1))
            rows.append((int(sequence), done[sequence], count))
            budget -= count
        rows.sort(key=lambda row: row[2] > 1)
        for sequence, _, count in rows:
            done[sequence] += count
        steps.append((shape, rows))
    return steps


Row = tuple[dict[str, Any], int, DtypePolicy]


def make_model(row: Row, row_tile: int | None = ROW_TILE, layout: str = "tensor_parallel") -> ScheduledModel:
    changes, tensor, policy = row
    fields = {**SIZES, **changes}
    return ScheduledModel(
        fields, tensor, policy, lengths=LENGTHS, num_pages=NUM_PAGES, row_tile=row_tile, layout=layout
    )


@functools.cache
def model_of(family: str) -> ScheduledModel:
    return make_model(FAMILIES[family])


@same_code
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_any_schedule_gives_the_same_bits(family: str) -> None:
    """Alone token by token, as one chunk, in chunks, and among others, in programs of all sizes."""
    if "native" in family and why_no_native_kernels() is not None:
        pytest.skip("needs native kernels")
    check_schedules(model_of(family))


@same_code
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "latents_native" else []) for name in SPLIT_TOKENS],
)
def test_devices_that_share_the_tokens_of_a_tile(family: str) -> None:
    if "native" in family and why_no_native_kernels() is not None:
        pytest.skip("needs native kernels")
    check_schedules(make_model(SPLIT_TOKENS[family], layout="sequence_parallel"))


@pytest.mark.skipif(why_no_native_kernels() is not None, reason="needs native kernels")
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_kernels_give_the_same_bits_without_tiles(family: str) -> None:
    """Also with one thread in place of all."""
    model = make_model(NATIVE_FAMILIES[family], row_tile=None)
    expected = check_schedules(model)
    with native_threads(1):
        assert model.run(together(3), 10) == expected


def check_schedules(model: ScheduledModel) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Compare the bits of every token in many schedules; returns them."""
    expected = model.run(together(0), 0)
    assert len(expected) == sum(LENGTHS)
    hidden = np.frombuffer(expected[1, 149][0], model.activations_dtype).astype(np.float32)
    assert np.isfinite(hidden).all() and np.abs(hidden).max() > 0.1
    schedules = [together(1), together(2), one_by_one(4), at_once(1), at_once(2), one_by_one(2, SMALL)]
    schedules += [in_chunks(1, CHUNKS, 3), in_chunks(8, SMALL, 4), in_chunks(3, LARGE, 5)]
    for number, steps in enumerate(schedules):
        found = model.run(steps, 1 + number)
        wrong = sorted(place for place, bits in found.items() if bits != expected[place])
        assert not wrong, f"schedule {number}: {len(wrong)} of {len(found)} tokens differ: {wrong[:9]}"
    return expected


@pytest.mark.parametrize("family", ["llama_split", "width_norms_behind_split"])
def test_tiles_add_no_collectives(family: str) -> None:
    """Each tile communicates what a step does; the loop's body counts once."""
    model = model_of(family)
    whole = model.collectives(DECODE, is_tiled=False)
    assert model.collectives(DECODE) == whole
    assert whole["all-reduce"] >= 2 * NUM_TINY_LAYERS + 1
