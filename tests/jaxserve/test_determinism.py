"""With a row tile, hidden states and logits of a token have the same bits however a schedule computes it."""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve.device.steps import ModelProgram
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.layers.routing import Routing
from jaxserve.layers.rows import ROW_TILE, map_rows
from jaxserve.layers.sparse_mlp import ClampedSwiGLU
from pallas_kernels import AttentionBatch, native_library
from sharding.plan import count_collectives
from tests.tiny_programs import (
    BACKEND,
    NUM_LAYERS,
    gpt_oss_config,
    latent_config,
    make_program,
    random_params,
    sparse_config,
    tiny_config,
)

PAGE_SIZE, NUM_PAGES = 8, 120
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
    "interpret" in (BACKEND or "") and "xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"],
    reason="an interpreted kernel's code, not optimized, differs from program to program; run with "
    "XLA_FLAGS=--xla_backend_optimization_level=2",
)
LENGTHS = (3, 150, 19, 64, 137, 8, 33, 1, 90, 12)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A program: query tokens, rows, pages of a table."""

    num_tokens: int
    num_rows: int
    table_pages: int
    decode_only: bool = False


pytestmark = pytest.mark.usefixtures("switchable_family")
DECODE = Shape(ROW_TILE, ROW_TILE, 20, decode_only=True)
WIDE_DECODE = Shape(3 * ROW_TILE, 3 * ROW_TILE, 25, decode_only=True)
SMALL = Shape(ROW_TILE, 4, 20)
CHUNKS = Shape(5 * ROW_TILE, 2 * ROW_TILE, 33)
LARGE = Shape(20 * ROW_TILE, ROW_TILE, 20)


Step = tuple[Shape, list[tuple[int, int, int]]]
"""A program, and the sequence, first position and number of tokens of each row."""


class Model:
    """A model with random parameters, and its programs."""

    def __init__(
        self,
        config: ModelConfig,
        tensor: int,
        policy: DtypePolicy,
        row_tile: int | None = ROW_TILE,
        layout: str = "tensor_parallel",
    ):
        self.program = make_program(config, tensor=tensor, policy=policy, num_pages=NUM_PAGES, layout=layout)
        self.params = random_params(self.program)
        self.row_tile = row_tile
        generator = np.random.default_rng(5)
        self.texts = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]
        self._compiled: dict[Shape, jax.stages.Compiled] = {}

    def empty_pools(self) -> list:
        """Pages with anything in them: nothing may be read before it is written."""
        generator = np.random.default_rng(7)
        return jax.tree.map(
            lambda struct: jax.device_put(generator.normal(size=struct.shape).astype(struct.dtype), struct.sharding),
            abstract_pools(self.program),
        )

    def traced(self, shape: Shape) -> jax.stages.Traced:
        """Hidden states of a step's tokens, and their logits in any order."""
        return trace(self.program, shape, self.row_tile)

    def compiled(self, shape: Shape) -> jax.stages.Compiled:
        if shape not in self._compiled:
            self._compiled[shape] = self.traced(shape).lower().compile()
        return self._compiled[shape]


def abstract_pools(program: ModelProgram) -> list[Any]:
    """Pools for each layer, so that all layers share one page table, whatever they see."""
    return [program.abstract_pools(spec.pool) for spec in program.abstract_model.kv_specs]


def trace(program: ModelProgram, shape: Shape, row_tile: int | None) -> jax.stages.Traced:
    abstract = program.abstract_model
    settings = AttentionSettings(program.kernel, PAGE_SIZE, shape.decode_only, row_tile)

    def body(arrays, pools, tokens, positions, order, batch):  # noqa: ANN001, ANN202 - as traced below
        model = abstract.merge(arrays)
        lengths = jnp.full_like(positions, MAX_LENGTH)
        hidden, pools, _ = model.hidden(tokens, positions, lengths, pools, [batch], settings)
        logits = model.logits(hidden[order], batch.query_lens.sum(), row_tile)
        return pools, hidden, logits

    pools = abstract_pools(program)
    numbers = [jax.ShapeDtypeStruct((shape.num_tokens,), jnp.int32)] * 3
    arguments = (tuple(abstract.params.values()), pools, *numbers, abstract_batch(shape))
    specs = jax.tree.map(lambda struct: P() if struct.sharding is None else struct.sharding.spec, arguments)
    sharded = jax.shard_map(body, mesh=program.mesh, in_specs=specs, out_specs=(specs[1], P(), P()), check_vma=False)
    return jax.jit(sharded, donate_argnums=1).trace(*arguments)


def batch_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of what attention reads."""
    rows, tokens = (shape.num_rows,), (shape.num_tokens,)
    shapes = {
        "page_table": (*rows, shape.table_pages),
        **dict.fromkeys(("num_rows", "num_shared_pages", "first_page"), ()),
    }
    shapes |= dict.fromkeys(("context_lens", "query_starts", "query_lens"), rows)
    return shapes | dict.fromkeys(("token_pages", "token_offsets"), tokens)


def abstract_batch(shape: Shape) -> AttentionBatch:
    fields: dict[str, Any] = {name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in batch_shapes(shape).items()}
    return AttentionBatch(**fields)


def run(model: Model, steps: list[Step], seed: int) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Bits of the hidden state and of the logits of every (sequence, position) that a schedule computes."""
    generator = np.random.default_rng(seed)
    free = list(generator.permutation(NUM_PAGES))
    sequences = sorted({row[0] for _, rows in steps for row in rows})
    pages = {s: np.array([free.pop() for _ in range(-(-LENGTHS[s] // PAGE_SIZE))]) for s in sequences}
    pools = model.empty_pools()
    found = {}
    for shape, rows in steps:
        arrays: dict[str, Any] = {name: np.zeros(size, np.int32) for name, size in batch_shapes(shape).items()}
        arrays["page_table"][...], arrays["token_pages"][...] = NUM_PAGES, NUM_PAGES + 1
        tokens, positions, owners = np.zeros((3, shape.num_tokens), np.int32)
        start = 0
        for i, (sequence, first, count) in enumerate(rows):
            span, places = slice(start, start + count), np.arange(first, first + count)
            tokens[span], positions[span], owners[span] = model.texts[sequence][places], places, sequence
            arrays["page_table"][i, : len(pages[sequence])] = pages[sequence]
            arrays["token_pages"][span] = pages[sequence][places // PAGE_SIZE]
            arrays["token_offsets"][span] = places % PAGE_SIZE
            arrays["context_lens"][i], arrays["query_starts"][i] = first + count, start
            arrays["query_lens"][i] = count
            start += count
        arrays["num_rows"][...] = len(rows)
        order = np.concatenate([generator.permutation(start), np.arange(start, shape.num_tokens)]).astype(np.int32)
        batch = AttentionBatch(**arrays)
        pools, hidden, logits = model.compiled(shape)(model.params, pools, tokens, positions, order, batch)
        hidden, logits = np.asarray(hidden), np.asarray(logits)[np.argsort(order)]
        for j in range(start):
            found[int(owners[j]), int(positions[j])] = hidden[j].tobytes(), logits[j].tobytes()
    return found


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


@functools.cache
def model_of(family: str) -> Model:
    return Model(*config_of(FAMILIES[family]))


def config_of(row: tuple[dict[str, Any], int, DtypePolicy]) -> tuple[ModelConfig, int, DtypePolicy]:
    changes, tensor, policy = row
    makers = {"routing": sparse_config, "rank": latent_config, "gating": gpt_oss_config}
    make = next((maker for field, maker in makers.items() if field in changes), tiny_config)
    return make(**{**SIZES, **changes}), tensor, policy


@same_code
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_any_schedule_gives_the_same_bits(family: str) -> None:
    """Alone token by token, as one chunk, in chunks, and among others, in programs of all sizes."""
    if "native" in family and native_library.unavailable() is not None:
        pytest.skip("needs native kernels")
    check_schedules(model_of(family))


@same_code
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "latents_native" else []) for name in SPLIT_TOKENS],
)
def test_devices_that_share_the_tokens_of_a_tile(family: str) -> None:
    if "native" in family and native_library.unavailable() is not None:
        pytest.skip("needs native kernels")
    check_schedules(Model(*config_of(SPLIT_TOKENS[family]), layout="sequence_parallel"))


@pytest.mark.skipif(native_library.unavailable() is not None, reason="needs native kernels")
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_kernels_give_the_same_bits_without_tiles(family: str) -> None:
    """Also with one thread in place of all."""
    model = Model(*config_of(NATIVE_FAMILIES[family]), row_tile=None)
    expected = check_schedules(model)
    native_library.set_threads(1)
    try:
        assert run(model, together(3), 10) == expected
    finally:
        native_library.set_threads(None)


def check_schedules(model: Model) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Compare the bits of every token in many schedules; returns them."""
    expected = run(model, together(0), 0)
    assert len(expected) == sum(LENGTHS)
    hidden = np.frombuffer(expected[1, 149][0], model.program.policy.activations_dtype).astype(np.float32)
    assert np.isfinite(hidden).all() and np.abs(hidden).max() > 0.1
    schedules = [together(1), together(2), one_by_one(4), at_once(1), at_once(2), one_by_one(2, SMALL)]
    schedules += [in_chunks(1, CHUNKS, 3), in_chunks(8, SMALL, 4), in_chunks(3, LARGE, 5)]
    for number, steps in enumerate(schedules):
        found = run(model, steps, 1 + number)
        wrong = sorted(place for place, bits in found.items() if bits != expected[place])
        assert not wrong, f"schedule {number}: {len(wrong)} of {len(found)} tokens differ: {wrong[:9]}"
    return expected


@pytest.mark.parametrize("family", ["llama_split", "width_norms_behind_split"])
def test_tiles_add_no_collectives(family: str) -> None:
    """Each tile communicates what a step does; the loop's body counts once."""
    model = model_of(family)
    whole = trace(model.program, DECODE, None)
    assert count_collectives(model.traced(DECODE)) == count_collectives(whole)
    assert count_collectives(whole)["all-reduce"] >= 2 * NUM_LAYERS + 1


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_map_rows(num_rows: int, size: int) -> None:
    """Whole tiles that hold rows in use are computed, no others."""
    x, y = np.arange(size * 3, dtype=np.float32).reshape(size, 3), np.arange(size)

    def function(a: jax.Array, b: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert a.shape == (4, 3)
        return a.sum(1) + 1, {"index": b[:, None] * 2}

    sums, found = jax.jit(lambda n: map_rows(function, (jnp.asarray(x), jnp.asarray(y)), n, 4))(num_rows)
    used = np.arange(size) < -(-num_rows // 4) * 4
    np.testing.assert_array_equal(sums, np.where(used, x.sum(1) + 1, 0))
    np.testing.assert_array_equal(found["index"], np.where(used, 2 * y, 0)[:, None])


@pytest.mark.parametrize("size", [4, 12])
def test_map_rows_of_which_a_device_has_some(size: int) -> None:
    """Two arrays and results have half the rows of each tile."""
    x, halves = jnp.arange(size), jnp.arange(size // 2)

    def function(x: jax.Array, halves: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert (len(x), len(halves)) == (4, 2)
        return x[:2] + halves, x + x.sum()

    for arrays, of in (((x, halves), None), ((halves, x), size)):
        swapped = function if of is None else lambda a, b: function(b, a)
        own, whole = map_rows(swapped, arrays, size, 4, of)
        np.testing.assert_array_equal(own, x.reshape(-1, 4)[:, :2].ravel() + halves)
        np.testing.assert_array_equal(whole, x + np.repeat(x.reshape(-1, 4).sum(1), 4))


def test_map_rows_without_a_tile_is_a_call() -> None:
    x = jnp.arange(5.0)
    traced = jax.make_jaxpr(lambda a: map_rows(lambda b: b * 2, (a,), 1, None))(x)
    assert [equation.primitive.name for equation in traced.eqns] == ["mul"]
