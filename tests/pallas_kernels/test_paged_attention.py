"""Every implementation of paged attention that runs on a CPU, where ``test_kernels.py`` does not look."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.buckets import Buckets
from pallas_kernels import paged_attention as op
from pallas_kernels.attention_tiles import require_indexable
from pallas_kernels.decode_attention_triton import decode_attention
from pallas_kernels.operation import prepared_shapes
from pallas_kernels.paged_attention import CASES, Case, PagedAttention
from pallas_kernels.paged_attention_cases import ENGINE_LEAST_ROWS, ENGINE_MODEL_LENS, ENGINE_ROWS
from pallas_kernels.paged_attention_pages import decode_splits
from pallas_kernels.paged_attention_triton import INTERPRET, TRITON
from pallas_kernels.prefill_attention_triton import prefill_attention
from pallas_kernels.prefill_blocks import block_map
from pallas_kernels.qkv_write_triton import INTERPRETED
from pallas_kernels.registry import OPERATIONS, load
from tests.compiled import compiled

NAMES = [
    name
    for name in OPERATIONS["paged_attention"]
    if load("paged_attention", name).unsupported("cpu", "cpu", "float32") is None
]
FAST = ["xla", "pallas-interpret"]  # others have files of their own


@pytest.fixture(params=FAST)
def module(request) -> PagedAttention:
    return load("paged_attention", request.param)


def answer(module: PagedAttention, case: Case, prepared: op.Prepared) -> np.ndarray:
    return np.asarray(compiled(op.run, module, case)(prepared), np.float32)


def assert_near(found: np.ndarray, expected, tolerance: float = 2e-5) -> None:
    """Compare what is expected with the first tokens of what was found; all of it must be finite."""
    expected = np.asarray(expected)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[: len(expected)], expected, atol=tolerance * np.abs(expected).max())


def expected_of(case: Case, inputs: op.Inputs) -> np.ndarray:
    """The reference's answer for the tokens that rows own."""
    return np.asarray(compiled(op.expected, case)(inputs))[: sum(length for _, length in case.rows)]


@pytest.mark.parametrize("name", NAMES)
def test_is_what_the_engine_calls(name):
    module = load("paged_attention", name)
    assert isinstance(module, PagedAttention)
    assert module.name == name
    hash(module)


@pytest.mark.parametrize("case_name", ["edges", "window", "head_of_80", "chunk_inside_a_page"])
def test_one_by_one_it_is_the_same(module, case_name):
    case = CASES[case_name]._replace(row_tile=8)
    inputs = compiled(op.make_inputs, case)(jax.random.key(2))
    assert_near(answer(module, case, compiled(op.prepare, module, case)(inputs)), expected_of(case, inputs))


@pytest.mark.parametrize("case_name", ["edges", "longer_decode"])
def test_decode_rows_in_a_step_for_chunks(module, case_name):
    """As many tokens as in a mixed step, and the program of one, but no chunk in it."""
    case = CASES[case_name]
    inputs = compiled(op.make_inputs, case)(jax.random.key(3))
    query, pools, batch = compiled(op.prepare, module, case)(inputs)
    query = jnp.pad(query, ((0, 5), (0, 0), (0, 0)))
    settings = {"scale": case.head_dim**-0.5, "window": None, "soft_cap": None, "decode_only": False}
    sizes = {"page_size": case.page_size, "num_kv_heads": case.num_kv_heads}
    found = np.asarray(jax.jit(functools.partial(module.attend, **sizes, **settings))(query, pools, batch))
    assert np.isfinite(found).all()
    assert_near(found, expected_of(case, inputs))


def test_writes_a_steps_tokens_where_they_belong(module):
    case = CASES["mixed"]
    inputs = compiled(op.make_inputs, case)(jax.random.key(4))
    query, pools, batch = compiled(op.prepare, module, case)(inputs)
    tokens = np.zeros((2, case.num_tokens, case.num_kv_heads, case.head_dim), np.float32)
    for row, (context, length) in enumerate(case.rows):
        first = int(batch.query_starts[row])
        for side, dense in enumerate((inputs.keys, inputs.values)):
            tokens[side, first : first + length] = np.asarray(dense)[row, context - length : context]
    emptied = module.write_kv(pools, *jnp.zeros_like(tokens), batch, case.page_size)
    written = module.write_kv(emptied, *jnp.asarray(tokens), batch, case.page_size)
    expected = expected_of(case, inputs)
    assert_near(answer(module, case, op.Prepared(query, written, batch)), expected)
    assert np.abs(answer(module, case, op.Prepared(query, emptied, batch))[: len(expected)] - expected).max() > 0.1


@pytest.mark.parametrize("num_shared", [0, 1, 7, 8, 15])
def test_pages_that_all_rows_begin_with_are_read_as_well_together(module, num_shared):
    """Twelve rows, so that they are many; with 16 tokens a page a tile has eight pages."""
    case = Case(rows=tuple((250 + 5 * i, 1) for i in range(12)), spare_rows=4)
    inputs = compiled(op.make_inputs, case)(jax.random.key(3))
    together = num_shared * case.page_size
    keys, values = (dense.at[:, :together].set(dense[:1, :together]) for dense in (inputs.keys, inputs.values))
    table = inputs.batch.page_table
    table = table.at[:12, :num_shared].set(table[0, :num_shared])
    batch = inputs.batch._replace(page_table=table, num_shared_pages=jnp.int32(num_shared))
    inputs = op.Inputs(inputs.query, keys, values, batch)
    assert_near(answer(module, case, compiled(op.prepare, module, case)(inputs)), expected_of(case, inputs))


def test_copies_pages(module):
    """A chain and a swap read what was there before; entries behind the end, and onto themselves, change nothing."""
    rng = np.random.default_rng(0)
    specs = module.pool_specs(6, 4, 2, 3)
    pools = tuple(rng.standard_normal(spec.shape, dtype=np.float32) for spec in specs)
    sources, targets = [0, 1, 4, 5, 0, 7, 7, 6], [1, 2, 5, 4, 3, 8, 8, 6]
    copy = jax.jit(module.copy_pages, donate_argnums=0)
    given = tuple(jnp.asarray(pool) for pool in pools)
    compiled = copy.lower(given, jnp.asarray(sources), jnp.asarray(targets)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == sum(pool.nbytes for pool in pools)
    found = compiled(given, jnp.asarray(sources), jnp.asarray(targets))
    for before, after in zip(pools, found, strict=True):
        expected = before.copy()
        expected[[1, 2, 5, 4, 3]] = before[[0, 1, 4, 5, 0]]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("row_tile", [None, 8])
@pytest.mark.parametrize("rows", [((20, 1),), ((20, 3),)])
def test_what_is_no_number_stays_with_its_text(module, row_tile, rows):
    """Left behind in a page that has a new owner it changes nothing; in a text's own past it is not lost."""
    case = Case(rows=rows, row_tile=row_tile, spare_rows=0, spare_tokens=0)
    query, clean, batch = compiled(op.prepare, module, case)(compiled(op.make_inputs, case)(jax.random.key(1)))
    page, bad = int(batch.page_table[0, 1]), jnp.full((1, case.num_kv_heads, case.head_dim), jnp.nan)

    def attended(offset):
        if offset is None:
            return answer(module, case, op.Prepared(query, clean, batch))
        place = batch._replace(token_pages=jnp.array([page]), token_offsets=jnp.array([offset]))
        return answer(module, case, op.Prepared(query, module.write_kv(clean, bad, bad, place, case.page_size), batch))

    np.testing.assert_array_equal(attended(9), attended(None))
    assert np.isnan(attended(0)).all()


def test_one_by_one_has_the_same_bits_in_every_step(module):
    """A token alone in a decode step, among other rows, and inside a chunk, with tables of several widths."""
    chunk = Case(rows=((150, 20),), row_tile=8, spare_rows=0, spare_tokens=4)
    inputs = compiled(op.make_inputs, chunk)(jax.random.key(5))
    query, pools, batch = compiled(op.prepare, module, chunk)(inputs)
    in_chunk = answer(module, chunk, op.Prepared(query, pools, batch))
    for place, num_rows, extra_pages in ((19, 8, 0), (0, 8, 5), (7, 24, 3)):
        case = Case(rows=tuple([(1, 1)] * num_rows), row_tile=8, spare_rows=0)
        table = jnp.pad(batch.page_table, ((0, num_rows - 1), (0, extra_pages)), mode="edge")
        lens = jnp.full((num_rows,), 3).at[num_rows // 2].set(131 + place).astype(jnp.int32)
        ones, row = jnp.ones(num_rows, jnp.int32), jnp.arange(num_rows, dtype=jnp.int32)
        step = batch._replace(
            page_table=table,
            context_lens=lens,
            query_starts=row,
            query_lens=ones,
            num_rows=num_rows,
        )
        step = jax.tree.map(lambda a: jnp.asarray(a, jnp.int32), step)
        queries = jnp.broadcast_to(query[:1], (num_rows, *query.shape[1:])).at[num_rows // 2].set(query[place])
        found = answer(module, case, op.Prepared(queries, pools, step))
        np.testing.assert_array_equal(found[num_rows // 2], in_chunk[place])


@pytest.mark.parametrize("num_splits", [1, 3, 4, 16])
def test_splits_of_contexts_shorter_than_they_are(num_splits):
    """More splits than tiles and than pages, a context of no tokens, and rows of the table in another order."""
    case = CASES["edges"]
    inputs = compiled(op.make_inputs, case)(jax.random.key(6))
    query, pools, batch = compiled(op.prepare, INTERPRET, case)(inputs)
    order = jnp.asarray([7, 0, 9, 3, 3], jnp.int32)
    attend = functools.partial(
        decode_attention, scale=case.head_dim**-0.5, window=None, soft_cap=None, num_splits=num_splits, interpret=True
    )
    found = jax.jit(attend)(query[order], *pools, batch.page_table, order, batch.context_lens[order])
    expected = np.asarray(compiled(op.expected, case)(inputs))[np.asarray(order)]
    assert_near(np.asarray(found), expected)
    np.testing.assert_array_equal(found[2], 0)  # an empty row


def test_splits_fill_the_processors_but_are_not_short():
    assert decode_splits(256, 8, 1 << 15) == decode_splits(64, 8, 1 << 15) == 1
    assert decode_splits(8, 8, 1 << 15) == 8
    assert decode_splits(1, 8, 1 << 15) == 64
    assert decode_splits(1, 8, 1 << 10) == 4
    assert decode_splits(1, 1, 1 << 20) == 128
    assert decode_splits(1, 8, 16) == 1


@pytest.mark.parametrize("case_name", ["mixed", "mixed_full", "chunk_inside_a_page", "many_rows", "prefill"])
@pytest.mark.parametrize("block_tokens", [1, 8, 64])
def test_blocks_have_every_token_once(case_name, block_tokens):
    case = CASES[case_name]
    batch = op.make_batch(case)
    blocks = jax.tree.map(np.asarray, block_map(batch, case.num_tokens, block_tokens))
    tokens = [np.arange(first, first + count) for first, count in zip(blocks.tokens, blocks.counts, strict=True)]
    np.testing.assert_array_equal(np.sort(np.concatenate(tokens)), np.arange(case.num_tokens))
    starts, row = np.asarray(batch.query_starts), blocks.rows
    for row, first, count, position, visible in zip(*blocks, strict=True):
        if visible:
            context, length = case.rows[row]
            assert row >= case.num_single and starts[row] <= first < starts[row] + length
            assert position == context - length + first - starts[row] and visible == position + count <= context


def test_cost_of_a_window():
    case = Case(rows=((100, 1), (50, 10)), num_heads=4, num_kv_heads=2, head_dim=8, window=24, dtype="bfloat16")
    assert op.cost(case).num_bytes == 2 * (2 * (24 + 33) * 2 * 8 + 2 * 11 * 4 * 8)
    assert op.cost(case).flops == 4 * 4 * 8 * (24 + 10 * 24)


@pytest.mark.parametrize(
    "where, sizes, reason",
    [
        (("cpu", "cpu", "bfloat16"), {}, "needs an NVIDIA GPU"),
        (("gpu", "AMD Instinct MI300X", "bfloat16"), {}, "needs an NVIDIA GPU"),
        (("gpu", "Tesla V100-SXM2-16GB", "bfloat16"), {}, "needs an NVIDIA GPU"),
        (("gpu", "NVIDIA TITAN V", "bfloat16"), {}, "needs compute capability 8.0 .* NVIDIA TITAN V does not have"),
        (("gpu", "NVIDIA GeForce RTX 2080 Ti", "bfloat16"), {}, "needs compute capability 8.0"),
        (("gpu", "NVIDIA H200", "int8"), {}, "must be bfloat16, float16 or float32, not int8"),
        (("gpu", "NVIDIA H200", "bfloat16"), {"head_dim": 512, "page_size": 64}, "heads of 512 are wider than 256"),
    ],
)
def test_triton_says_why_not(where, sizes, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(TRITON.unsupported(*where, **sizes))


@pytest.mark.parametrize(
    "kind", ["H200", "H100 80GB HBM3", "A100-SXM4-80GB", "GeForce RTX 3090", "RTX A6000", "B200", "L4"]
)
def test_triton_runs_on_newer_gpus(kind):
    assert TRITON.unsupported("gpu", f"NVIDIA {kind}", "bfloat16", head_dim=128, page_size=16) is None


@pytest.mark.parametrize("num_pages, is_refused", [(1 << 15, False), ((1 << 15) + 1, True), ((1 << 16) + 1, False)])
def test_pools_whose_offsets_would_wrap_around_are_refused(num_pages, is_refused):
    """Up to 2**31 elements fit into 32-bit offsets; beyond 2**32 bytes JAX takes 64 bits."""
    pool = jax.ShapeDtypeStruct((num_pages, 8, 64, 128), jnp.float8_e4m3fn)
    if is_refused:
        with pytest.raises(NotImplementedError, match="at most 2147483648 of them; use fewer pages"):
            require_indexable(pool)
    else:
        require_indexable(pool)
    require_indexable(jax.ShapeDtypeStruct(pool.shape, jnp.bfloat16))


@pytest.mark.parametrize("kind", ["decode", "prefill", "write"])
def test_kernels_refuse_such_pools(kind):
    case = CASES["mixed"]._replace(head_dim=128, num_kv_heads=8, num_heads=8, page_size=64)
    query, _, batch = prepared_shapes(op, INTERPRET, case)
    pool = jax.ShapeDtypeStruct(((1 << 15) + 1, 8, 64, 128), jnp.float8_e4m3fn)
    pools = pool, pool
    settings: dict[str, Any] = {"scale": 1.0, "window": None, "soft_cap": None, "interpret": True}

    def call(query, pools, batch):
        keys, values = pools
        if kind == "prefill":
            return prefill_attention(query, keys, values, batch, **settings)
        if kind == "decode":
            rows = batch.query_lens
            return decode_attention(query[:7], keys, values, batch.page_table, rows, rows, num_splits=1, **settings)
        qkv = jnp.zeros((query.shape[0], 24 * 128), jnp.bfloat16)
        options: dict[str, Any] = {"rotation": None, "norms": None, "num_heads": 8, "num_kv_heads": 8, "page_size": 64}
        return INTERPRETED.write(qkv, pools, batch, **options)

    with pytest.raises(NotImplementedError, match="elements of one byte"):
        jax.eval_shape(call, query, pools, batch)


def test_benches_are_what_the_engine_runs():
    """Rows, tokens and page tables of the shapes that an engine of 256 sequences compiles for Llama-3.1-8B."""
    for case in op.BENCHES.values():
        model_len = next(n for n in ENGINE_MODEL_LENS if n >= max(context for context, _ in case.rows))
        pages = -(-model_len // case.page_size)
        buckets = Buckets.make(ENGINE_ROWS, 8192, pages, multiple=ENGINE_LEAST_ROWS)
        shape = buckets.shape_for(sum(query for _, query in case.rows), case.is_decode_only)
        batch = op.make_batch(case)
        assert (case.num_tokens, case.num_rows, pages) == (shape.num_tokens, shape.num_rows, shape.table_pages)
        assert batch.page_table.shape == (shape.num_rows, shape.table_pages)


def test_interpreted_kernels_do_not_copy_pools():
    """Whatever the pools' size, a step takes no more memory."""
    case = CASES["prefill"]

    def temporary_bytes(num_pages: int) -> int:
        prepared = prepared_shapes(op, INTERPRET, case)
        shape = INTERPRET.pool_specs(num_pages, case.page_size, case.num_kv_heads, case.head_dim)[0].shape
        pools = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(2))
        compiled = jax.jit(functools.partial(op.run, INTERPRET, case)).lower(prepared._replace(pools=pools)).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = 100, 10_000
    pool_bytes = 2 * (large - small) * case.page_size * case.num_kv_heads * case.head_dim * 4
    assert temporary_bytes(large) - temporary_bytes(small) < pool_bytes / 10
