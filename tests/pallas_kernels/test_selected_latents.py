"""Attention to the latents that an index selects, on the pages of every kernel, against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention as op
from pallas_kernels import latent_attention_native, latent_attention_xla, native_library
from pallas_kernels.latent_attention_mosaic import INTERPRET
from pallas_kernels.paged_attention_cases import Case
from pallas_kernels.selected_latents import IndexQuery, Settings, attend_selected
from tests.compiled import compiled

KEY_DIM, VALUE_DIM, INDEX_DIM, INDEX_HEADS, SELECTED = 24, 16, 16, 32, 20
CASE = Case(
    rows=((150, 1), (5, 1), (20, 1), (21, 1), (64, 64), (90, 20), (40, 2), (7, 7)),
    num_heads=4,
    num_kv_heads=1,
    head_dim=KEY_DIM + INDEX_DIM,
    value_dim=KEY_DIM,
    page_size=16,
)
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
KERNELS = [
    pytest.param(latent_attention_xla, id="xla"),
    pytest.param(latent_attention_native, id="native", marks=needs_native),
]


def problem(kernel: Any, case: Case) -> tuple[op.Inputs, op.Prepared, IndexQuery]:
    inputs = compiled(op.make_inputs, case)(jax.random.key(0))
    prepared = compiled(op.prepare, kernel, case)(inputs)
    rng = np.random.default_rng(1)
    heads = jnp.asarray(rng.standard_normal((case.num_tokens, INDEX_HEADS, INDEX_DIM)), jnp.float32)
    return inputs, prepared, IndexQuery(heads, jnp.asarray(rng.standard_normal(heads.shape[:2]), jnp.float32))


def expected(case: Case, inputs: op.Inputs, index: IndexQuery) -> tuple[np.ndarray, list[set[int]]]:
    """Attention of each token in use, in float64, and the positions it sees."""
    out, chosen, token = [], [], 0
    latents, query = np.asarray(inputs.latents, np.float64)[:, :, 0], np.asarray(inputs.query, np.float64)
    for row, (context, length) in enumerate(case.rows):
        for visible in range(context - length + 1, context + 1):
            keys = latents[row, :visible]
            products = np.einsum("ni,ti->nt", np.asarray(index.heads[token], np.float64), keys[:, KEY_DIM:])
            scores = np.asarray(index.weights[token], np.float64) @ np.maximum(products * INDEX_DIM**-0.5, 0)
            best = np.argsort(-scores, kind="stable")[:SELECTED]
            logits = query[token, :, :KEY_DIM] @ keys[best, :KEY_DIM].T * 0.25
            weights = np.exp(logits - logits.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ keys[best, :VALUE_DIM])
            chosen.append({*best.tolist()})
            token += 1
    return np.stack(out), chosen


def attend(kernel: Any, case: Case, prepared: op.Prepared, index: Any, row_tile: int | None = None) -> Any:
    settings = Settings(case.page_size, KEY_DIM, VALUE_DIM, 0.25, SELECTED)
    query, pools, batch = prepared

    @jax.jit
    def run(query, pools, batch, index):
        return attend_selected(
            kernel,
            query[..., :KEY_DIM],
            pools,
            batch,
            index,
            settings,
            decode_only=case.is_decode_only,
            row_tile=row_tile,
        )

    return run(query, pools, batch, index)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("row_tile", [None, 8])
def test_each_token_attends_to_the_best_of_its_context(kernel: Any, row_tile: int | None) -> None:
    inputs, prepared, index = problem(kernel, CASE)
    wanted, positions = expected(CASE, inputs, index)
    found = attend(kernel, CASE, prepared, index, row_tile)
    np.testing.assert_allclose(found.attended[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    long = [token for token, seen in enumerate(positions) if len(seen) == SELECTED and max(seen) >= SELECTED]
    assert len(long) > 40
    assert all({*found.positions[token].tolist()} == positions[token] for token in long)
    again = attend(kernel, CASE, prepared, found.positions, row_tile)
    np.testing.assert_array_equal(again.attended, found.attended)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_s_result_does_not_depend_on_its_batch(kernel: Any) -> None:
    _, prepared, index = problem(kernel, CASE)
    together = attend(kernel, CASE, prepared, index, row_tile=8).attended
    query, pools, batch = prepared
    for row in (0, 1):  # decode rows, one that selects and one that does not
        alone = batch._replace(
            query_lens=batch.query_lens.at[row + 1 :].set(0),
            context_lens=batch.context_lens.at[row + 1 :].set(0),
            num_rows=jnp.int32(row + 1),
        )
        found = attend(kernel, CASE, op.Prepared(query, pools, alone), index, row_tile=8).attended
        np.testing.assert_array_equal(found[row], together[row])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", [*KERNELS, pytest.param(INTERPRET, id="mosaic")])
def test_pages_and_tokens_are_read_as_they_were_written(kernel: Any, dtype: str) -> None:
    case = CASE._replace(dtype=dtype)
    inputs, prepared, _ = problem(kernel, case)
    row, context = 5, case.rows[5][0]
    pages = prepared.batch.page_table[row, : -(-context // case.page_size)]
    whole = kernel.read_pages(prepared.pools, pages, case.page_size).reshape(-1, case.head_dim)
    np.testing.assert_array_equal(whole[:context], inputs.latents[row, :context, 0])
    position = jnp.array([[0, 17, 89], [33, 16, 5]])
    tokens = kernel.read_tokens(
        prepared.pools, pages[position // case.page_size], position % case.page_size, case.page_size
    )
    np.testing.assert_array_equal(tokens, inputs.latents[row, position, 0])


def test_a_table_that_holds_no_more_than_the_selection_needs_no_index() -> None:
    case = CASE._replace(rows=((16, 1), (9, 4)), spare_rows=0, spare_tokens=0, table_pages=1)
    inputs, prepared, index = problem(latent_attention_xla, case)
    wanted, _ = expected(case, inputs, index)
    nothing = IndexQuery(index.heads * jnp.nan, index.weights)
    found = attend(latent_attention_xla, case, prepared, nothing)
    np.testing.assert_allclose(found.attended, wanted, rtol=1e-4, atol=1e-5)
