"""Native CPU kernels: one order of summation, threads that do not hurt, and a library that says why it is not there."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import (
    grouped_matmul_native,
    linear,
    linear_native,
    native_library,
    paged_attention,
    paged_attention_native,
    paged_attention_xla,
    qkv_write,
    qkv_write_native,
)
from pallas_kernels.paged_attention import CASES, Case, num_pages
from tests.compiled import compiled
from tests.native_build import build_library

REPOSITORY = Path(__file__).parents[2]
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
LONG = Case(((5000, 1), (1, 1), (2049, 1), (1500, 200)), num_heads=6, num_kv_heads=2, head_dim=64, page_size=64)


@pytest.fixture
def threads():
    """Sets the number of threads, and the default again afterwards."""
    yield native_library.set_threads
    native_library.set_threads(None)


def problem(case: Case, seed: int = 0):
    """A case's inputs and what the kernels take."""
    inputs = compiled(paged_attention.make_inputs, case)(jax.random.key(seed))
    return inputs, compiled(paged_attention.prepare, paged_attention_native, case)(inputs)


def attend(case: Case, prepared) -> np.ndarray:
    return np.asarray(compiled(paged_attention.run, paged_attention_native, case)(prepared))


# ---------------------------------------------------------------- results


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"window": 1300}, {"soft_cap": 3.0, "has_sinks": True}], ids=str)
def test_long_contexts_are_right_and_do_not_depend_on_threads(threads, dtype, settings):
    """Few tiles of several chunks each are split over threads; one thread takes them one after the other."""
    case = LONG._replace(dtype=dtype, **settings)
    inputs, prepared = problem(case)
    found = {}
    for count in (1, 2, 5):
        threads(count)
        assert native_library.num_threads() == count
        found[count] = attend(case, prepared)
    expected = compiled(paged_attention.expected, case)(inputs)
    assert paged_attention.compare(case, inputs, jnp.asarray(found[1]), expected).is_right
    for other in (2, 5):
        np.testing.assert_array_equal(found[other], found[1])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_wide_heads(dtype, head_dim):
    """A decode step, and a chunk of a prompt that has more query rows than a tile holds."""
    case = Case(((300, 1), (150, 70)), num_heads=16, num_kv_heads=2, head_dim=head_dim, page_size=64, dtype=dtype)
    inputs, prepared = problem(case)
    expected = compiled(paged_attention.expected, case)(inputs)
    assert paged_attention.compare(case, inputs, jnp.asarray(attend(case, prepared)), expected).is_right


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"window": 70, "has_sinks": True}, {"soft_cap": 3.0}], ids=str)
def test_a_token_has_the_same_bits_in_a_chunk_and_alone(dtype, settings):
    chunk = Case(((1300, 150),), 6, 2, 64, 64, dtype=dtype, spare_rows=0, spare_tokens=0, **settings)
    _, (query, pools, batch) = problem(chunk)
    in_chunk = attend(chunk, paged_attention.Prepared(query, pools, batch))
    for place in (0, 1, 17, 63, 149):
        rows = 3
        alone = chunk._replace(rows=((1, 1),) * rows)
        lens = jnp.array([5, 1300 - 150 + place + 1, 1], jnp.int32)
        step = batch._replace(
            page_table=jnp.repeat(batch.page_table, rows, axis=0),
            context_lens=lens,
            query_starts=jnp.arange(rows, dtype=jnp.int32),
            query_lens=jnp.ones(rows, jnp.int32),
            num_rows=jnp.int32(rows),
        )
        queries = jnp.stack([query[3], query[place], query[9]])
        found = attend(alone, paged_attention.Prepared(queries, pools, step))
        np.testing.assert_array_equal(found[1], in_chunk[place])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_within_larger_arrays(dtype):
    """Other layers' pages lie in front and behind; none is read, none is written."""
    case = Case(((70, 1), (130, 20)), 6, 2, 64, 64, dtype=dtype, spare_rows=0, spare_tokens=0)
    _, (query, pools, batch) = problem(case)
    count = len(pools[0])

    def between_others(pool):
        return jnp.concatenate([jnp.full_like(pool, jnp.nan), pool, jnp.full_like(pool, jnp.nan)])

    wide = between_others(pools[0]), between_others(pools[1])
    within = batch._replace(first_page=jnp.int32(count))
    found = attend(case, paged_attention.Prepared(query, wide, within))
    np.testing.assert_array_equal(found, attend(case, paged_attention.Prepared(query, pools, batch)))

    generator = np.random.default_rng(0)
    key, value = jnp.asarray(generator.normal(size=(2, len(query), 2, 64)), jnp.float32)
    qkv = jnp.asarray(generator.normal(size=(len(query), 10 * 64)), jnp.float32)
    sizes = {"num_heads": 6, "num_kv_heads": 2, "page_size": 64}
    for write in (
        lambda pools, batch: paged_attention_native.write_kv(pools, key, value, batch, 64),
        lambda pools, batch: qkv_write_native.write(qkv, pools, batch, rotation=None, norms=None, **sizes)[1],
    ):
        for whole, alone in zip(jax.jit(write)(wide, within), jax.jit(write)(pools, batch), strict=True):
            assert np.asarray(whole[count:-count]).tobytes() == np.asarray(alone).tobytes()
            assert jnp.isnan(whole[:count]).all() and jnp.isnan(whole[-count:]).all()


@needs_native
def test_pools_that_begin_behind_their_arrays_are_refused():
    case = Case(((70, 1),), 6, 2, 64, 64, spare_rows=0, spare_tokens=0)
    _, (query, pools, batch) = problem(case)
    for first_page in (-1, len(pools[0])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="do not go together"):
            attend(case, paged_attention.Prepared(query, pools, batch._replace(first_page=jnp.int32(first_page))))


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [2, 3, 40])
def test_shared_pages_read_once_give_the_same_bits(threads, dtype, num_rows):
    """Sharing nothing, less than a block, whole blocks, whole chunks and a part of one; in a mixed step too."""
    lengths = (*((2200 + 3 * i, 1) for i in range(num_rows)), (300, 70))
    case = Case(lengths, 6, 2, 64, 64, dtype=dtype, spare_rows=0, spare_tokens=0)
    _, (query, pools, batch) = problem(case)
    table = batch.page_table.at[:num_rows, :34].set(batch.page_table[0, :34])
    batch = batch._replace(page_table=table)
    attended = compiled(paged_attention.run, paged_attention_native, case)

    def attend_sharing(count):
        step = batch._replace(num_shared_pages=jnp.int32(count))
        return np.asarray(attended(paged_attention.Prepared(query, pools, step)))

    apart = attend_sharing(0)
    for count in (1, 2, 15, 16, 17, 33, 34):
        np.testing.assert_array_equal(attend_sharing(count), apart)
    threads(1)
    np.testing.assert_array_equal(attend_sharing(34), apart)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_what_xla_writes(dtype):
    case = CASES["mixed"]._replace(head_dim=24, page_size=32, dtype=dtype)
    inputs, prepared = problem(case)
    shape = (case.num_tokens, case.num_kv_heads, case.head_dim)
    key, value = (jax.random.normal(jax.random.key(i), shape) for i in range(2))
    key = key.at[0, 0, 3].set(jnp.nan)
    value = value.at[1, 1, 5].set(jnp.inf).at[2, 0, 0].set(-jnp.inf).at[3, 1, 23].set(jnp.nan)
    found = []
    for module in (paged_attention_xla, paged_attention_native):
        pair = module.pool_specs(num_pages(case), 32, case.num_kv_heads, 24)
        pools = tuple(jnp.ones(spec.shape, dtype) for spec in pair)
        written = jax.jit(module.write_kv, static_argnums=4)(pools, key, value, inputs.batch, 32)
        if module is paged_attention_native:
            keys, values = qkv_write_native.from_layout(written)
            written = keys.swapaxes(2, 3), values
        pages = [np.asarray(pool, np.float32).reshape(num_pages(case) + 2, -1) for pool in written]
        found.append([each[:-1] for each in pages])  # but for that of padding
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)


def consecutive(case: qkv_write.Case, start: int) -> qkv_write.Inputs:
    """A prompt's chunk, prepared for the native kernel: its tokens follow each other from a place in the pages on."""
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(3))
    places = start + np.arange(case.num_tokens)
    pages = jnp.where(places - start < inputs.batch.query_lens[0], 1 + places // case.page_size, 0)
    offsets = jnp.asarray(places % case.page_size, jnp.int32)
    batch = inputs.batch._replace(token_pages=pages.astype(jnp.int32), token_offsets=offsets)
    return qkv_write.prepare(qkv_write_native, case, inputs._replace(batch=batch))


def written(case: qkv_write.Case, prepared: qkv_write.Inputs) -> tuple[np.ndarray, ...]:
    """Queries and pools."""
    query, pools = compiled(qkv_write.write, qkv_write_native, case)(prepared)
    return np.asarray(query), *(np.asarray(pool) for pool in pools)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [{"head_dim": 64}, {"head_dim": 80, "rotary_dim": 24}, {"head_dim": 512, "rotary_dim": 0}], ids=str
)
def test_a_token_is_written_alike_alone_and_in_a_chunk(threads, dtype, sizes):
    """Over one thread and several; alone its keys are stored number by number, in a chunk transposed by registers."""
    case = qkv_write.Case(100, 6, 2, page_size=24, is_normed=True, num_padding=10, dtype=dtype, **sizes)
    chunk = consecutive(case, start=5)
    threads(1)
    together = written(case, chunk)
    for count in (2, 5):
        threads(count)
        for found, wanted in zip(written(case, chunk), together, strict=True):
            np.testing.assert_array_equal(found, wanted)
    queries, keys, values = together
    used = case.num_tokens - case.num_padding
    assert not queries[used:].any()
    one, pools = case._replace(num_tokens=1, num_padding=0), chunk.pools
    for token in range(used):
        here = slice(token, token + 1)
        batch = chunk.batch._replace(
            token_pages=chunk.batch.token_pages[here],
            token_offsets=chunk.batch.token_offsets[here],
            query_lens=jnp.ones(1, jnp.int32),
        )
        rotation = None if chunk.rotation is None else (chunk.rotation[0][here], chunk.rotation[1][here])
        alone = written(one, chunk._replace(qkv=chunk.qkv[here], pools=pools, batch=batch, rotation=rotation))
        np.testing.assert_array_equal(alone[0][0], queries[token])
        pools = (jnp.asarray(alone[1]), jnp.asarray(alone[2]))
    np.testing.assert_array_equal(pools[0], keys)  # every other place, and the padding's page, as they were
    np.testing.assert_array_equal(pools[1], values)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_a_chunk_that_are_not_finite_move_to_their_keys(dtype):
    """A value that bfloat16 cannot hold is infinite there."""
    case = qkv_write.Case(40, head_dim=24, rotary_dim=0, page_size=32, dtype=dtype)
    chunk = consecutive(case, start=3)
    first_value, tokens = 6 * 24, np.array([0, 7, 20, 33])
    bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.4e38])
    qkv = chunk.qkv.astype(jnp.float32).at[tokens, first_value + 17].set(bad)
    _, *pools = written(case, chunk._replace(qkv=qkv))
    laid_out = qkv_write_native.from_layout((jnp.asarray(pools[0]), jnp.asarray(pools[1])))
    keys, values = (np.asarray(pool, np.float32) for pool in laid_out)
    assert np.isfinite(values).all()
    moved = np.zeros(keys.shape, bool)
    is_moved = [True, True, True, dtype == "bfloat16"]
    moved[chunk.batch.token_pages[tokens], 0, chunk.batch.token_offsets[tokens], 17] = is_moved
    np.testing.assert_array_equal(np.isnan(keys), moved)
    assert not values[moved].any()


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(576, 100), (37, 9)])
def test_a_row_is_multiplied_alike_in_any_company(threads, dtype, sizes):
    """Register tiles of 1 to 6 rows, several groups of tiles, and any number of threads."""
    num_in, num_out = sizes
    x = np.asarray(jax.random.normal(jax.random.key(0), (700, num_in)))
    weight = jax.random.normal(jax.random.key(1), (num_out, num_in)).astype(dtype)
    packed = jnp.asarray(linear_native.pack(np.asarray(weight)))

    def multiply(x, **settings):
        rows = jnp.asarray(x)  # of NumPy's array, whose parts need no program
        return np.asarray(linear_native.matmul(rows, packed, num_out, fused=linear.Fused(), **settings))

    whole = multiply(x)
    for rows in (*range(1, 18), 31, 32, 33, 48, 64, 512):
        np.testing.assert_array_equal(multiply(x[:rows]), whole[:rows])
    np.testing.assert_array_equal(multiply(x, num_rows=jnp.int32(77))[:77], whole[:77])
    threads(1)
    np.testing.assert_array_equal(multiply(x), whole)


def experts_problem(num_experts: int, num_in: int, outer: int, dtype: str, is_gated: bool):
    """Random rows, each expert's matrix, and the packed matrices."""
    x = jax.random.normal(jax.random.key(0), (300, num_in))
    matrices = np.array(jax.random.normal(jax.random.key(1), (num_experts, outer, num_in)).astype(dtype))
    return x, matrices, jnp.asarray(grouped_matmul_native.pack(matrices.copy(), is_gated))


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_in, num_out, is_gated", [(800, 100, False), (37, 9, True)])
def test_a_row_is_multiplied_alike_among_any_rows_of_any_experts(threads, dtype, num_in, num_out, is_gated):
    """As the linear kernel multiplies it: alone, with others of its expert, between others' rows, on any threads."""
    x, matrices, packed = experts_problem(5, num_in, num_out * (1 + is_gated), dtype, is_gated)

    def multiply(rows, sizes):
        found = grouped_matmul_native.grouped_matmul(rows, packed, jnp.array(sizes), num_out, is_gated=is_gated)
        return np.asarray(found)

    def of_expert(expert):
        alone = jnp.asarray(linear_native.pack(matrices[expert], is_gated))
        fused = linear.Fused(activation="silu" if is_gated else None)
        return np.asarray(linear_native.matmul(x, alone, len(matrices[expert]), fused=fused))

    wanted = [of_expert(expert) for expert in range(5)]
    for sizes in ([1, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 300, 0, 0, 0], [7, 1, 0, 100, 13], [60] * 5, [0] * 5):
        borders = np.cumsum([0, *sizes])
        expected = [wanted[e][start:end] for e, (start, end) in enumerate(zip(borders, borders[1:], strict=False))]
        zeros = np.zeros((300 - borders[-1], num_out))
        for count in (1, 2, 5):
            threads(count)
            np.testing.assert_array_equal(multiply(x, sizes), np.concatenate([*expected, zeros]))


@needs_native
def test_experts_without_rows_take_no_part():
    """Neither NaN in their matrices nor in the rows of others shows."""
    x, _, packed = experts_problem(4, 64, 48, "float32", is_gated=False)
    sizes = jnp.array([2, 0, 3, 0])
    expected = np.asarray(grouped_matmul_native.grouped_matmul(x[:6], packed, sizes, 48))
    broken = packed.at[jnp.array([1, 3])].set(jnp.nan)
    found = np.asarray(grouped_matmul_native.grouped_matmul(x[:6].at[4:].set(jnp.nan), broken, sizes, 48))
    np.testing.assert_array_equal(found[:4], expected[:4])
    assert np.isnan(found[4]).all() and not found[5].any()


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, is_gated", [((3, 64, 32), True), ((2, 64, 96), False), ((3, 10, 37), True)], ids=str)
def test_packed_experts_come_back_bit_for_bit(shape, is_gated, dtype):
    """In the memory that they came in, where their panels fill it."""
    num_experts, outer, inner = shape
    matrices = np.array(jax.random.normal(jax.random.key(2), shape).astype(dtype))
    given = matrices.copy()
    packed = grouped_matmul_native.pack(given, is_gated)
    assert packed.shape[1:] == grouped_matmul_native.packed_shape(outer, inner, dtype, is_gated)
    assert np.shares_memory(packed, given) == (inner % 32 == 0)
    for expert in range(num_experts):
        np.testing.assert_array_equal(packed[expert], linear_native.pack(matrices[expert], is_gated))
    assert grouped_matmul_native.unpack(packed, outer, inner, is_gated).tobytes() == matrices.tobytes()
    given = matrices.copy()
    given.flags.writeable = False
    np.testing.assert_array_equal(grouped_matmul_native.pack(given, is_gated), packed)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 37), (100, 64), (31, 1), (7, 129), (2, 3), (90, 64)], ids=str)
def test_packed_weights_come_back_bit_for_bit(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 1 << 16, (*shape, 4 // 2), np.uint16)  # NaNs and denormals among them
    weight = bits.view(np.float32)[..., 0] if dtype == "float32" else bits[..., 0].copy().view(ml_dtypes.bfloat16)
    packed = linear_native.pack(weight)
    assert packed.shape == linear_native.packed_shape(shape[0], shape[1], dtype) and packed.dtype == weight.dtype
    assert linear_native.unpack(packed, *shape).tobytes() == np.ascontiguousarray(weight).tobytes()
    if shape[0] % 2 == 0:
        gated = linear_native.pack(weight, is_gated=True)
        assert gated.shape == linear_native.packed_shape(shape[0], shape[1], dtype, is_gated=True)
        assert linear_native.unpack(gated, *shape, is_gated=True).tobytes() == np.ascontiguousarray(weight).tobytes()
    tokens = np.array([shape[0] - 1, 0, shape[0] // 2])
    found = np.asarray(linear_native.rows(jnp.asarray(packed), jnp.asarray(tokens), shape[1]))
    np.testing.assert_array_equal(found.astype(np.float32), weight[tokens].astype(np.float32))


@needs_native
def test_tokens_that_see_nothing_get_zeros(threads):
    """A row whose context is shorter than its tokens: no engine makes one, and no memory of other calls shows."""
    attend(LONG, problem(LONG)[1])
    case = Case(((9, 4),), 6, 2, 64, 64, spare_rows=0, spare_tokens=0)
    query, pools, batch = problem(case)[1]
    for length, unseeing in ((0, 4), (2, 2)):
        step = batch._replace(context_lens=jnp.array([length], jnp.int32))
        found = attend(case, paged_attention.Prepared(query, pools, step))
        assert np.isfinite(found).all() and not found[:unseeing].any()
        assert length == 0 or found[unseeing:].any()


@needs_native
@pytest.mark.parametrize("cap", [0.5, 30.0, 1000.0, 1e5])
def test_soft_caps_of_any_size(cap):
    case = CASES["soft_cap"]._replace(soft_cap=cap)
    inputs, prepared = problem(case)
    found = jnp.asarray(attend(case, prepared))
    assert paged_attention.compare(case, inputs, found, compiled(paged_attention.expected, case)(inputs)).is_right


@needs_native
def test_calls_that_do_not_go_together_are_errors():
    """Not the end of the process."""
    case = CASES["mixed"]
    query, pools, batch = problem(case)[1]
    settings = {"scale": 1.0, "window": None, "soft_cap": None, "decode_only": False}
    wrong: list[tuple[Any, dict[str, int]]] = [
        (pools, {"page_size": 12, "num_kv_heads": 2}),
        (pools, {"page_size": 32, "num_kv_heads": 2}),
        (pools, {"page_size": 16, "num_kv_heads": 3}),
        (pools, {"page_size": 16, "num_kv_heads": 8}),
        ((pools[0], pools[1].astype(jnp.bfloat16)), {"page_size": 16, "num_kv_heads": 2}),
        (tuple(pool.astype(jnp.float16) for pool in pools), {"page_size": 16, "num_kv_heads": 2}),
    ]
    for other, sizes in wrong:
        with pytest.raises(Exception, match="jaxserve_attend: shapes or dtypes do not go together"):
            jax.block_until_ready(paged_attention_native.attend(query, other, batch, **sizes, **settings))
    with pytest.raises(Exception, match="jaxserve_write_kv: shapes or dtypes do not go together"):
        key = jnp.zeros((case.num_tokens, 2, 8))
        jax.block_until_ready(paged_attention_native.write_kv(pools, key, key, batch, 32))
    packed = jnp.zeros(linear_native.packed_shape(40, 64, "float32"))
    for x, other, outer in (
        (jnp.ones((2, 63)), packed, 40),
        (jnp.ones((2, 64)), packed, 72),
        (jnp.ones((2, 64)), packed.astype(jnp.bfloat16), 40),
        (jnp.ones((2, 64)), packed.astype(jnp.float16), 40),
    ):
        with pytest.raises(Exception, match="jaxserve_linear: shapes or dtypes do not go together"):
            jax.block_until_ready(linear_native.matmul(x, other, outer, fused=linear.Fused()))
    for fused in (
        linear.Fused(norm=linear.Norm(jnp.ones(63), 1e-5)),
        linear.Fused(bias=jnp.ones(41)),
        linear.Fused(residual=jnp.ones((3, 40))),
        linear.Fused(activation="silu", residual=jnp.ones((2, 20))),
    ):
        with pytest.raises(Exception, match="jaxserve_linear: shapes or dtypes do not go together"):
            jax.block_until_ready(linear_native.matmul(jnp.ones((2, 64)), packed, 40, fused=fused))


@needs_native
@pytest.mark.parametrize(
    "width, num_out, sizes, message",
    [
        (63, 40, [1, 1], "shapes or dtypes do not go together"),
        (64, 72, [1, 1], "shapes or dtypes do not go together"),
        (64, 40, [-1, 1], "group_sizes must not be negative, nor exceed the rows together"),
        (64, 40, [2, 2], "group_sizes must not be negative, nor exceed the rows together"),
    ],
)
def test_operands_of_experts_that_do_not_go_together_are_errors(width, num_out, sizes, message):
    packed = jnp.zeros((2, *grouped_matmul_native.packed_shape(40, 64, "float32")))
    with pytest.raises(Exception, match=f"jaxserve_grouped_matmul: {message}"):
        found = grouped_matmul_native.grouped_matmul(jnp.ones((3, width)), packed, jnp.array(sizes), num_out)
        jax.block_until_ready(found)


@needs_native
@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {"pools": tuple(pool.astype(jnp.float16) for pool in inputs.pools)},
        lambda inputs: {"pools": (inputs.pools[0].astype(jnp.bfloat16), inputs.pools[1])},
        lambda inputs: {"weights": (inputs.weights[0], inputs.weights[1][:-1])},
        lambda inputs: {"rotation": tuple(jnp.tile(table, (1, 2)) for table in inputs.rotation)},
        lambda inputs: {"batch": inputs.batch._replace(token_pages=inputs.batch.token_pages[:-1])},
        lambda inputs: {"batch": inputs.batch._replace(token_offsets=inputs.batch.token_offsets.astype(jnp.float32))},
    ],
)
def test_operands_of_a_write_that_do_not_go_together_are_errors(change):
    case = qkv_write.CASES["float32"]
    prepared = consecutive(case, start=0)
    with pytest.raises(Exception, match="jaxserve_qkv_write: shapes or dtypes do not go together"):
        jax.block_until_ready(qkv_write.write(qkv_write_native, case, prepared._replace(**change(prepared))))


@needs_native
def test_pools_are_updated_in_place():
    specs = paged_attention_native.pool_specs(40, 64, 2, 64)
    pools = tuple(jnp.zeros(spec.shape) for spec in specs)
    batch = paged_attention.make_batch(CASES["mixed"])
    key = jnp.ones((CASES["mixed"].num_tokens, 2, 64))
    write = jax.jit(paged_attention_native.write_kv, static_argnums=4, donate_argnums=0)
    compiled = write.lower(pools, key, key, batch, 64).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == sum(pool.nbytes for pool in pools)
    assert analysis.temp_size_in_bytes < 1 << 16


@needs_native
def test_calls_at_the_same_time_are_right(threads):
    """One of them has the threads, the others run alone: as several virtual devices do."""
    threads(2)
    _, prepared = problem(LONG)
    call = compiled(paged_attention.run, paged_attention_native, LONG)
    wanted = np.asarray(call(prepared))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: np.asarray(call(prepared)), range(16)):
            np.testing.assert_array_equal(found, wanted)


@needs_native
def test_busy_cores_slow_threads_down_but_do_not_stop_them(threads):
    """A worker without a core is not waited for: with all cores busy two threads take little longer than one.

    If it were, each of these calls would take a time slice of the scheduler, some 10 ms, where one thread takes 0.2 ms.
    """
    case = Case(((300, 1),) * 8, 6, 2, 64, 64, spare_rows=0, spare_tokens=0)
    _, prepared = problem(case)
    call = compiled(paged_attention.run, paged_attention_native, case)
    wanted = np.asarray(call(prepared))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        medians = {}
        for count in (1, 2):
            threads(count)
            spent = []
            for _ in range(200):
                start = time.perf_counter()
                found = np.asarray(call(prepared))
                spent.append(time.perf_counter() - start)
                np.testing.assert_array_equal(found, wanted)
            medians[count] = float(np.median(spent))
        assert medians[2] < max(5 * medians[1], 0.005), medians
    finally:
        for process in busy:
            process.kill()
            process.wait()


@needs_native
def test_waiting_threads_take_no_time(threads):
    threads(2)
    _, prepared = problem(LONG)
    attend(LONG, prepared)
    time.sleep(0.1)  # they look for the next call for a tenth of a millisecond, then sleep
    begun, start = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    assert (time.process_time() - begun) / (time.perf_counter() - start) < 0.2


# ---------------------------------------------------------------- in a process of its own

CHILD = textwrap.dedent("""
    import functools, json, sys
    from pathlib import Path
    import jax
    from pallas_kernels import linear, linear_native, native_library, paged_attention as op, qkv_write, truncation
    from pallas_kernels import paged_attention_native as native, qkv_write_native, truncation_native
    from pallas_kernels import grouped_matmul, grouped_matmul_native, quantized_linear, quantized_linear_native
    from pallas_kernels import quantized_grouped_matmul, quantized_grouped_matmul_native
    from pallas_kernels import delta_net, delta_net_native, mamba2, mamba2_native
    from pallas_kernels import short_convolution, short_convolution_native
    wanted, *path = sys.argv[1:]
    if path:
        native_library.PATH = Path(path[0])
    assert native_library.unavailable() is None, native_library.unavailable()
    cases = {**op.CASES, "long": op.Case(((3000, 1), (2049, 1)), 6, 2, 64, 64)}
    cases |= {f"{name} bf16": case._replace(dtype="bfloat16") for name, case in cases.items()}
    worst = {}
    for name, case in cases.items():
        if wanted == "some" and name.split()[0] not in ("edges", "mixed", "head_of_80", "window", "soft_cap", "long"):
            continue
        inputs = op.make_inputs(case, jax.random.key(1))
        prepared = op.prepare(native, case, inputs)
        found = jax.jit(functools.partial(op.run, native, case))(prepared)
        worst[name] = op.compare(case, inputs, found, op.expected(case, inputs)).worst
    others = {"linear": (linear, linear_native), "qkv_write": (qkv_write, qkv_write_native)}
    others["grouped_matmul"] = grouped_matmul, grouped_matmul_native
    others["quantized_linear"] = quantized_linear, quantized_linear_native
    others["quantized_grouped_matmul"] = quantized_grouped_matmul, quantized_grouped_matmul_native
    others |= {"delta_net": (delta_net, delta_net_native), "mamba2": (mamba2, mamba2_native)}
    others["short_convolution"] = short_convolution, short_convolution_native
    for name, (other, module) in (others | {"truncation": (truncation, truncation_native)}).items():
        for case_name, case in other.CASES.items():
            if module.unsupported("cpu", "cpu", other.dtype(case), **other.sizes(case)) is not None:
                continue
            if name == "quantized_linear" and case.num_rows not in (1, 5, 33, 300):
                continue
            inputs = other.make_inputs(case, jax.random.key(1))
            found = other.run(module, case, other.prepare(module, case, inputs))
            worst[f"{name} {case_name}"] = other.compare(case, inputs, found, other.expected(case, inputs)).worst
    print(json.dumps([native_library.instructions(), worst]))
""")


def run_cases(*arguments: str, **environment: str) -> tuple[str, dict[str, float]]:
    """Instruction set and largest error of every case, computed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "runtime error" not in done.stderr, done.stderr[-3000:]
    instructions, worst = json.loads(done.stdout.splitlines()[-1])
    return instructions, worst


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["avx2", "avx512", "avx512bf16"])
def test_older_instructions_are_right_too(wanted):
    if wanted == native_library.instructions():
        pytest.skip(f"all other tests run with {wanted} here")
    instructions, worst = run_cases("some", JAXSERVE_MAX_CPU_ISA=wanted)
    assert instructions in ("avx2", "avx512", wanted) and len(worst) > 60
    assert {name: error for name, error in worst.items() if error > 1} == {}


@needs_native
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc with its sanitizers")
def test_no_undefined_behaviour(tmp_path):
    library = tmp_path / "libchecked.so"
    compiler = build_library.Compiler(("gcc",))
    flags = ("-fsanitize=undefined,bounds-strict", "-fno-sanitize-recover=all", "-O1")
    build_library.build(compiler, build_library.SOURCES, library, flags)
    _, worst = run_cases("all", str(library))
    assert {name: error for name, error in worst.items() if error > 1} == {}


# ---------------------------------------------------------------- the library


@pytest.fixture
def fresh():
    """Lets the library be looked for again, before and after."""
    native_library.unavailable.cache_clear()
    yield
    native_library.unavailable.cache_clear()
    native_library.unavailable()


def test_says_why_it_is_not_there(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "PATH", tmp_path / "absent.so")
    reason = paged_attention_native.unsupported("cpu", "cpu", "float32")
    assert reason == "the native library was not built (pip install builds it on x86-64 Linux)"
    with pytest.raises(NotImplementedError, match="was not built"):
        native_library.target("attend")


def test_says_that_it_is_no_library(fresh, monkeypatch, tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native_library, "PATH", path)
    assert str(native_library.unavailable()).startswith("the native library cannot be loaded: ")


@needs_native
def test_says_that_it_is_an_old_one(fresh, monkeypatch):
    monkeypatch.setattr(native_library, "VERSION", 1000)
    assert "this code 1000; reinstall" in str(native_library.unavailable())


@needs_native
def test_unknown_instruction_sets_are_refused(fresh, monkeypatch):
    monkeypatch.setenv("JAXSERVE_MAX_CPU_ISA", "sse")
    with pytest.raises(
        ValueError, match="JAXSERVE_MAX_CPU_ISA: expected avx2, avx512, avx512_vnni, avx512bf16 or amx, got 'sse'"
    ):
        native_library.unavailable()


@pytest.mark.parametrize(
    "dtype, sizes, reason",
    [
        ("float16", {}, "keys and values must be float32 or bfloat16, not float16"),
        ("float32", {"head_dim": 520}, "head_dim must be at most 512, not 520"),
        ("bfloat16", {"head_dim": 63}, "head_dim must be even in bfloat16, not 63"),
        ("float32", {"page_size": 12}, "page_size must be a multiple of 8, not 12"),
        ("float32", {"num_heads": 130, "num_kv_heads": 2}, "at most 64 query heads can share a key/value head, not 65"),
    ],
)
def test_says_what_it_cannot_do(dtype, sizes, reason):
    assert paged_attention_native.unsupported("cpu", "cpu", dtype, **sizes) == reason
    assert paged_attention_native.unsupported("gpu", "NVIDIA H200", dtype) == "native kernels run on CPUs"


def test_threads_follow_the_cgroup_s_quota(tmp_path):
    none = 1 << 16
    membership = tmp_path / "membership"
    assert native_library.quota_cpus(tmp_path, membership) == none
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert native_library.quota_cpus(tmp_path, membership) == none
    membership.write_text("0::/system.slice/server.service\n")
    (tmp_path / "system.slice" / "server.service").mkdir(parents=True)
    (tmp_path / "system.slice" / "cpu.max").write_text("350000 100000\n")
    assert native_library.quota_cpus(tmp_path, membership) == 4
    (tmp_path / "system.slice" / "server.service" / "cpu.max").write_text("150000 100000\n")
    assert native_library.quota_cpus(tmp_path, membership) == 2
    assert 1 <= native_library.default_threads() <= len(os.sched_getaffinity(0))


def test_quotas_of_the_first_version_of_cgroups(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/\n3:cpu,cpuacct:/\n")
    assert native_library.quota_cpus(tmp_path, membership) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert native_library.quota_cpus(tmp_path, membership) == 1 << 16
