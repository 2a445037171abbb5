"""Sums of hidden states against numpy, whatever rows and chunks they come in; in the order of the tokens with tiles."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.row_sums import add_tokens

WIDTH = 5
Span = tuple[int, int]


def doubled(hidden: jax.Array) -> jax.Array:
    return hidden * 2


@functools.cache
def compiled(row_tile: int | None) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(add_tokens, states=doubled, row_tile=row_tile))


def added(sums: np.ndarray, hidden: np.ndarray, spans: list[Span], row_tile: int | None) -> np.ndarray:
    first, end = (np.array(places, np.int32) for places in zip(*spans, strict=True))
    return np.asarray(compiled(row_tile)(sums, hidden, first, end))


def expected(sums: np.ndarray, hidden: np.ndarray, spans: list[Span]) -> np.ndarray:
    """One addition in float32 after the other."""
    found = sums.copy()
    for row, (first, end) in enumerate(spans):
        for token in range(first, end):
            found[row] += hidden[token] * 2
    return found


@pytest.mark.parametrize("row_tile", [None, 8])
@pytest.mark.parametrize("num_tokens", [8, 24, 136])
def test_sums_are_those_of_numpy(num_tokens: int, row_tile: int | None) -> None:
    """Rows with all their tokens, with the last alone, with none, and padding; with tiles to the last bit."""
    random = np.random.default_rng(num_tokens)
    hidden = random.normal(size=(num_tokens, WIDTH)).astype(np.float32)
    for _ in range(8):
        cuts = np.sort(random.integers(0, num_tokens + 1, 4)).tolist()
        spans = [(0, cuts[0]), (max(cuts[0], cuts[1] - 1), cuts[1]), (cuts[1], cuts[1]), (cuts[2], cuts[3])]
        spans += [(num_tokens, 0), (num_tokens, num_tokens)]
        sums = random.normal(size=(len(spans), WIDTH)).astype(np.float32)
        found, wanted = added(sums, hidden, spans, row_tile), expected(sums, hidden, spans)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if row_tile else 1e-4)


def test_chunks_make_no_difference() -> None:
    """A prompt in one step, or in three at other places beside another row: the same bits."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(64, WIDTH)).astype(np.float32)
    whole = added(np.zeros((1, WIDTH), np.float32), hidden, [(0, 64)], 8)[0]
    total = np.zeros(WIDTH, np.float32)
    for start, end in ((0, 7), (7, 40), (40, 64)):
        step = random.normal(size=(64, WIDTH)).astype(np.float32)
        step[64 - (end - start) :] = hidden[start:end]
        total = added(np.array([total, total]), step, [(0, 3), (64 - (end - start), 64)], 8)[1]
    assert np.array_equal(total, whole)


@pytest.mark.parametrize("row_tile", [None, 8])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_rows_do_not_see_each_others_numbers(what: float, row_tile: int | None) -> None:
    """What is no number stays in its row, and shows there."""
    hidden = np.ones((16, WIDTH), np.float32)
    hidden[3:5, 2] = what
    found = added(np.zeros((4, WIDTH), np.float32), hidden, [(0, 3), (3, 5), (5, 16), (16, 16)], row_tile)
    assert found[[0, 2, 3]].tolist() == [[6.0] * WIDTH, [22.0] * WIDTH, [0.0] * WIDTH]
    assert not np.isfinite(found[1]).all()


@pytest.mark.parametrize("row_tile", [None, 8])
def test_sums_are_float32_whatever_the_states_are(row_tile: int | None) -> None:
    hidden = jnp.full((64, WIDTH), 1.0078125, jnp.bfloat16)  # needs all bits of a bfloat16
    begin, end = jnp.zeros(1, jnp.int32), jnp.full(1, 64)
    found = add_tokens(jnp.zeros((1, WIDTH)), hidden, begin, end, lambda state: state, row_tile)
    assert found.dtype == jnp.float32 and np.asarray(found)[0, 0] == 64.5
