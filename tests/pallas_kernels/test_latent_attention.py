"""Attention over latents: what cases do not cover, on every implementation that runs here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention as op
from pallas_kernels import latent_attention_native, latent_attention_xla, native_library
from pallas_kernels.paged_attention_cases import Case
from tests.compiled import compiled

SMALL = op.CASES["mixed"]
LONG = Case(
    ((3000, 1), (1, 1), (2049, 1), (1500, 200)),
    num_heads=20,
    num_kv_heads=1,
    head_dim=72,
    value_dim=56,
    page_size=64,
)
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
MODULES = [pytest.param(latent_attention_xla, id="xla"), pytest.param(latent_attention_native, marks=needs_native)]


@pytest.fixture
def threads():
    """Sets the number of threads, and the default again afterwards."""
    yield native_library.set_threads
    native_library.set_threads(None)


def problem(module, case: Case, seed: int = 0) -> tuple[op.Inputs, op.Prepared]:
    inputs = compiled(op.make_inputs, case)(jax.random.key(seed))
    return inputs, compiled(op.prepare, module, case)(inputs)


def attend(module, case: Case, prepared: op.Prepared) -> np.ndarray:
    return np.asarray(compiled(op.run, module, case)(prepared))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("row_tile", [None, 8])
@pytest.mark.parametrize("bad", ["latent", "key"])
def test_numbers_that_are_not_finite_stay_with_their_sequence(module, row_tile, bad):
    """After the end of a context they change nothing, although the page may belong to another sequence next."""
    case = SMALL._replace(rows=((20, 1),), row_tile=row_tile, spare_rows=0, spare_tokens=0)
    _, (query, clean, batch) = problem(module, case)
    page, value_dim = batch.page_table[0, 1], case.value_width
    value, key = jnp.ones((1, 1, value_dim)), jnp.ones((1, 1, case.head_dim - value_dim))
    value, key = (value.at[0, 0, 3].set(jnp.inf), key) if bad == "latent" else (value, key.at[0, 0, 1].set(jnp.nan))

    def attended(offset: int) -> np.ndarray:
        place = batch._replace(token_pages=page[None], token_offsets=jnp.array([offset]))
        return attend(module, case, op.Prepared(query, module.write_kv(clean, key, value, place, 16), batch))

    np.testing.assert_array_equal(attended(9), attend(module, case, op.Prepared(query, clean, batch)))
    assert np.isnan(attended(0)).all()


@pytest.mark.parametrize("module", MODULES)
def test_copies_pages_in_place(module):
    (spec,) = module.pool_specs(6, 8, 1, 10)
    pool = np.random.default_rng(0).standard_normal(spec.shape, dtype=np.float32)
    sources, targets = jnp.asarray([0, 1, 4, 5, 7]), jnp.asarray([1, 2, 5, 4, 8])
    given = (jnp.asarray(pool),)
    compiled = jax.jit(module.copy_pages, donate_argnums=0).lower(given, sources, targets).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == pool.nbytes
    expected = pool.copy()
    expected[[1, 2, 5, 4]] = pool[[0, 1, 4, 5]]
    np.testing.assert_array_equal(compiled(given, sources, targets)[0], expected)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts_are_right_and_do_not_depend_on_threads(threads, dtype):
    case = LONG._replace(dtype=dtype)
    inputs, prepared = problem(latent_attention_native, case)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(attend(latent_attention_native, case, prepared))
    assert op.compare(case, inputs, jnp.asarray(found[0]), compiled(op.expected, case)(inputs)).is_right
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_in_a_chunk_and_alone(dtype):
    chunk = LONG._replace(rows=((1300, 150),), dtype=dtype, spare_rows=0, spare_tokens=0)
    _, (query, pools, batch) = problem(latent_attention_native, chunk)
    in_chunk = attend(latent_attention_native, chunk, op.Prepared(query, pools, batch))
    alone = chunk._replace(rows=((1, 1),) * 2)
    for place in (0, 17, 149):
        step = batch._replace(
            page_table=jnp.repeat(batch.page_table, 2, axis=0),
            context_lens=jnp.array([5, 1300 - 150 + place + 1], jnp.int32),
            query_starts=jnp.arange(2, dtype=jnp.int32),
            query_lens=jnp.ones(2, jnp.int32),
            num_rows=jnp.int32(2),
        )
        queries = jnp.stack([query[3], query[place]])
        found = attend(latent_attention_native, alone, op.Prepared(queries, pools, step))
        np.testing.assert_array_equal(found[1], in_chunk[place])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_pages_read_once_give_the_same_bits(dtype):
    case = LONG._replace(rows=((2200, 1), (2203, 1), (2206, 1), (300, 70)), dtype=dtype, spare_rows=0, spare_tokens=0)
    _, (query, pools, batch) = problem(latent_attention_native, case)
    batch = batch._replace(page_table=batch.page_table.at[:3, :34].set(batch.page_table[0, :34]))
    found = [
        attend(latent_attention_native, case, op.Prepared(query, pools, batch._replace(num_shared_pages=jnp.int32(n))))
        for n in (0, 2, 16, 17, 34)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_within_larger_arrays(dtype):
    """Other layers' pages lie in front and behind; none is read, none is written."""
    case = LONG._replace(rows=((70, 1), (130, 20)), dtype=dtype, spare_rows=0, spare_tokens=0)
    _, (query, (pool,), batch) = problem(latent_attention_native, case)
    wide = (jnp.concatenate([jnp.full_like(pool, jnp.nan), pool, jnp.full_like(pool, jnp.nan)]),)
    within = batch._replace(first_page=jnp.int32(len(pool)))
    found = attend(latent_attention_native, case, op.Prepared(query, wide, within))
    np.testing.assert_array_equal(found, attend(latent_attention_native, case, op.Prepared(query, (pool,), batch)))
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(len(query), 1, 72)), jnp.float32)
    write = jax.jit(functools.partial(latent_attention_native.write_kv, page_size=64))
    (whole,) = write(wide, latents[..., 56:], latents[..., :56], within)
    (alone,) = write((pool,), latents[..., 56:], latents[..., :56], batch)
    assert np.asarray(whole[len(pool) : -len(pool)]).tobytes() == np.asarray(alone).tobytes()
    assert jnp.isnan(whole[: len(pool)]).all() and jnp.isnan(whole[-len(pool) :]).all()


@needs_native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 1026}, "at most 1024 features, not 1026"),
        ({"head_dim": 575}, "even number of features in bfloat16, not 575"),
        ({"page_size": 12}, "page_size must be a multiple of 8, not 12"),
    ],
)
def test_what_the_native_kernel_cannot_do_has_a_reason(change, message):
    sizes = op.sizes(op.CASES["bfloat16_wide"]) | change
    assert message in (latent_attention_native.unsupported("cpu", "cpu", "bfloat16", **sizes) or "")


@needs_native
@pytest.mark.parametrize("name", ["attend", "write", "first_page"])
def test_operands_that_do_not_go_together_are_errors(name):
    _, (query, (pool,), batch) = problem(latent_attention_native, SMALL)
    if name == "attend":
        prepared, call = op.Prepared(query[..., 1:], (pool,), batch), "attend_latents"
    elif name == "first_page":
        prepared, call = op.Prepared(query, (pool,), batch._replace(first_page=jnp.int32(len(pool)))), "attend_latents"
    else:
        prepared, call = None, "write_latents"
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxserve_{call}: shapes or dtypes do not go together"):
        if prepared is not None:
            attend(latent_attention_native, SMALL, prepared)
        else:
            key, value = jnp.ones((len(query), 1, 7)), jnp.ones((len(query), 1, 16))
            jax.block_until_ready(latent_attention_native.write_kv((pool,), key, value, batch, 16))
