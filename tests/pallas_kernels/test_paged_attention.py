"""Every implementation of paged attention against the reference, over all cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import OPERATIONS, AttentionBatch, UnsupportedKernelError, select
from pallas_kernels.paged_attention import CASES, Case, reference


def make_step(case: Case, seed: int, spare_rows: int = 2, spare_tokens: int = 3):
    """Random keys, values and queries of a case, its pages shuffled, with empty rows and padding tokens behind."""
    rng = np.random.default_rng(seed)
    num_rows = len(case.rows) + spare_rows
    contexts = np.array([context for context, _ in case.rows] + [0] * spare_rows, np.int32)
    queries = np.array([query for _, query in case.rows] + [0] * spare_rows, np.int32)
    num_decode = sum(query == 1 for query in queries[: len(case.rows)])
    longest = int(contexts.max())
    width = -(-longest // case.page_size) + 2
    needed = sum(-(-int(c) // case.page_size) for c in contexts)
    num_pages = needed + 3
    order = list(rng.permutation(num_pages))
    table = np.full((num_rows, width), num_pages, np.int32)
    for row, context in enumerate(contexts):
        count = -(-int(context) // case.page_size)
        table[row, :count] = [order.pop() for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum(queries)[:-1]]).astype(np.int32)
    num_tokens = max(int(queries.sum()) + spare_tokens, num_rows)
    pages = np.full(num_tokens, num_pages + 1, np.int32)
    offsets = np.zeros(num_tokens, np.int32)
    for row in range(len(case.rows)):
        for j in range(queries[row]):
            position = contexts[row] - queries[row] + j
            pages[starts[row] + j] = table[row, position // case.page_size]
            offsets[starts[row] + j] = position % case.page_size
    fields = (table, contexts, starts, queries, num_decode, len(case.rows), pages, offsets, 0)
    batch = AttentionBatch(*(jnp.asarray(field, jnp.int32) for field in fields))
    shape = (num_rows, max(longest, 1), case.num_kv_heads, case.head_dim)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    query = rng.standard_normal((num_tokens, case.num_heads, case.head_dim), dtype=np.float32)
    return batch, query, keys, values, num_pages


def fill_pools(module, case: Case, batch: AttentionBatch, keys, values, num_pages: int, poison: float):
    """Pools with every token before this step's written, and pages nobody owns poisoned."""
    specs = module.pool_specs(num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    pools = tuple(jnp.zeros(spec.shape, jnp.float32).at[:num_pages].set(poison) for spec in specs)
    table, contexts, lens = (np.asarray(a) for a in (batch.page_table, batch.context_lens, batch.query_lens))
    owners = [(r, s) for r in range(len(contexts)) for s in range(contexts[r] - lens[r])]
    owned = np.unique(table[table < num_pages])
    pools = tuple(pool.at[owned].set(0.0) for pool in pools)
    if owners:
        rows, positions = (np.array(a) for a in zip(*owners, strict=True))
        pages = table[rows, positions // case.page_size]
        before = batch._replace(token_pages=jnp.asarray(pages), token_offsets=jnp.asarray(positions % case.page_size))
        pools = module.write_kv(
            pools, jnp.asarray(keys[rows, positions]), jnp.asarray(values[rows, positions]), before, case.page_size
        )
    return pools


@pytest.mark.parametrize("name", OPERATIONS["paged_attention"])
@pytest.mark.parametrize("case_name", CASES)
def test_matches_reference(name, case_name):
    case = CASES[case_name]
    module = select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name=name)
    batch, query, keys, values, num_pages = make_step(case, seed=len(case_name))
    pools = fill_pools(module, case, batch, keys, values, num_pages, poison=float("nan"))
    starts, lens, contexts = (np.asarray(a) for a in (batch.query_starts, batch.query_lens, batch.context_lens))
    new = np.zeros((query.shape[0], 2, case.num_kv_heads, case.head_dim), np.float32)
    for row in range(len(case.rows)):
        span = slice(contexts[row] - lens[row], contexts[row])
        new[starts[row] : starts[row] + lens[row]] = np.stack([keys[row, span], values[row, span]], 1)
    settings = {"scale": 0.3, "window": case.window, "soft_cap": case.soft_cap}
    modes = [(False, None), (False, 8)] + ([(True, None)] if all(q == 1 for _, q in case.rows) else [])
    expected = reference(jnp.asarray(query), jnp.asarray(keys), jnp.asarray(values), batch, **settings)
    for decode_only, row_tile in modes:
        tokens = batch.context_lens.shape[0] if decode_only else query.shape[0]
        trimmed = batch._replace(token_pages=batch.token_pages[:tokens], token_offsets=batch.token_offsets[:tokens])

        @jax.jit
        def step(pools, query, new, batch, decode_only=decode_only, row_tile=row_tile):
            pools = module.write_kv(pools, new[:, 0], new[:, 1], batch, case.page_size)
            out = module.attend(
                query,
                pools,
                batch,
                page_size=case.page_size,
                num_kv_heads=case.num_kv_heads,
                decode_only=decode_only,
                row_tile=row_tile,
                **settings,
            )
            return pools, out

        _, out = step(pools, jnp.asarray(query[:tokens]), jnp.asarray(new[:tokens]), trimmed)
        used = sum(q for _, q in case.rows)
        np.testing.assert_allclose(np.asarray(out)[:used], np.asarray(expected)[:used], atol=2e-5)
        assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("name", OPERATIONS["paged_attention"])
@pytest.mark.parametrize("num_shared", [0, 1, 7, 8, 15])
def test_pages_that_all_rows_begin_with_are_read_as_well_together(name, num_shared):
    """Twelve rows, so that they are many; with 16 tokens a page a tile has eight pages."""
    module = select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name=name)
    case = Case(rows=tuple((250 + 5 * i, 1) for i in range(12)))
    batch, query, keys, values, num_pages = make_step(case, seed=3, spare_rows=4, spare_tokens=4)
    table = np.array(batch.page_table)
    table[:12, :num_shared] = table[0, :num_shared]
    keys[:, : num_shared * 16], values[:, : num_shared * 16] = (
        keys[:1, : num_shared * 16],
        values[:1, : num_shared * 16],
    )
    batch = batch._replace(page_table=jnp.asarray(table), query_lens=jnp.zeros_like(batch.query_lens))
    pools = fill_pools(module, case, batch, keys, values, num_pages, poison=float("nan"))
    batch = batch._replace(query_lens=jnp.asarray([1] * 12 + [0] * 4, jnp.int32))
    settings = {"scale": 0.3, "window": None, "soft_cap": None}
    expected = reference(jnp.asarray(query), jnp.asarray(keys), jnp.asarray(values), batch, **settings)
    shared = batch._replace(num_shared_pages=jnp.int32(num_shared))
    out = module.attend(
        jnp.asarray(query), pools, shared, page_size=16, num_kv_heads=case.num_kv_heads, decode_only=True, **settings
    )
    np.testing.assert_allclose(np.asarray(out)[:12], np.asarray(expected)[:12], atol=2e-5)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("name", OPERATIONS["paged_attention"])
def test_copies_pages(name):
    """A chain and a swap read what was there before; entries behind the end, and onto themselves, change nothing."""
    module = select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name=name)
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


@pytest.mark.parametrize("name", OPERATIONS["paged_attention"])
@pytest.mark.parametrize("row_tile", [None, 8])
def test_what_is_no_number_stays_with_its_text(name, row_tile):
    """Left behind in a page that has a new owner it changes nothing; in a text's own past it is not lost."""
    module = select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name=name)
    case = Case(rows=((20, 1),))
    batch, query, keys, values, num_pages = make_step(case, seed=1, spare_rows=0, spare_tokens=0)
    clean = fill_pools(module, case, batch, keys, values, num_pages, poison=0.0)
    page, bad = int(batch.page_table[0, 1]), jnp.full((1, case.num_kv_heads, case.head_dim), jnp.nan)

    def attended(pools):
        return np.asarray(
            module.attend(
                jnp.asarray(query),
                pools,
                batch,
                page_size=case.page_size,
                num_kv_heads=case.num_kv_heads,
                scale=0.3,
                window=None,
                soft_cap=None,
                decode_only=False,
                row_tile=row_tile,
            )
        )

    def with_bad(offset):
        place = batch._replace(token_pages=jnp.array([page]), token_offsets=jnp.array([offset]))
        return module.write_kv(clean, bad, bad, place, case.page_size)

    np.testing.assert_array_equal(attended(with_bad(9)), attended(clean))
    assert np.isnan(attended(with_bad(2))).all()


def test_select_refuses_unknown_names():
    with pytest.raises(ValueError, match="unknown operation 'convolution'; operations: paged_attention"):
        select("convolution", platform="cpu", device_kind="cpu", dtype="float32")
    with pytest.raises(ValueError, match="unknown implementation 'fast' of paged_attention; implementations: xla"):
        select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name="fast")


def test_select_gives_all_reasons(monkeypatch):
    module = select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32")
    monkeypatch.setattr(module, "unsupported", lambda platform, device_kind, dtype: f"no {platform} today")
    message = r"no paged_attention for float32 on H200 \(gpu\): xla: no gpu today"
    with pytest.raises(UnsupportedKernelError, match=message):
        select("paged_attention", platform="gpu", device_kind="H200", dtype="float32")
