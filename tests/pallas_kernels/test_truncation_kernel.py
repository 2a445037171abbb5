"""Truncation in kernels: the same floors as by sorting and by XLA, whatever stands beside a row."""

import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native_library, truncation, truncation_native, truncation_triton, truncation_xla
from pallas_kernels.registry import UnsupportedKernelError, load, select
from pallas_kernels.truncation import LOWEST, SETTINGS, Inputs

FLOORS = {
    row: jax.jit(load("truncation", row).floor)
    for row in ("xla", "native", "pallas-interpret")
    if load("truncation", row).unsupported("cpu", "cpu", "float32") is None
}


def inputs_of(scores: Any, settings: list[tuple[int, float, float]]) -> Inputs:
    """Rows of scores, each with its (top_k, top_p, min_p)."""
    top_k, top_p, min_p = (np.array(column) for column in zip(*settings, strict=True))
    return Inputs(
        jnp.asarray(scores, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
        jnp.asarray(min_p, jnp.float32),
    )


def check_floors(found: Any, inputs: Inputs) -> None:
    """Exactly the floor by sorting; where top-p's boundary is within rounding, one on either side of it."""
    found = np.asarray(found, np.float64)
    sides = (truncation.sorted_floor(inputs, scale) for scale in (1 + truncation.MARGIN, 1 - truncation.MARGIN))
    fewest, most = (np.asarray(side, np.float64) for side in sides)
    assert (found >= fewest).all() and (found <= most).all()
    is_clear = fewest == most
    np.testing.assert_array_equal(found[is_clear], fewest[is_clear])


def mixed_rows(vocab_size: int, spread: float = 2.0) -> Inputs:
    """A row for each of the settings."""
    scores = np.random.default_rng(vocab_size).normal(0.0, spread, (len(SETTINGS), vocab_size))
    return inputs_of(scores, list(SETTINGS))


@pytest.mark.parametrize("row", [row for row in FLOORS if row != "xla"])
def test_a_row_knows_nothing_of_its_neighbours(row: str) -> None:
    """Neither who they are nor how many; bit for bit."""
    inputs = mixed_rows(9001)
    floor = FLOORS[row]
    whole = np.asarray(floor(*inputs))
    order = np.random.default_rng(0).permutation(len(SETTINGS))
    np.testing.assert_array_equal(np.asarray(floor(*(array[order] for array in inputs))), whole[order])
    for i in range(len(SETTINGS)):
        alone = floor(*(array[i : i + 1] for array in inputs))
        np.testing.assert_array_equal(np.asarray(alone), whole[i : i + 1])


@pytest.mark.parametrize("row", FLOORS)
@pytest.mark.parametrize("num_ties", [1, 2, 4000])
def test_ties_at_the_boundary_are_all_kept(row: str, num_ties: int) -> None:
    """Top-k in the midst of tokens that tie; also across the chunks of a row."""
    scores = np.full(9001, -5.0, np.float32) - np.arange(9001, dtype=np.float32) * 1e-4
    scores[np.linspace(0, 9000, num_ties + 3, dtype=int)] = 1.0
    for top_k in (1, 2, num_ties + 2, num_ties + 3):
        found = FLOORS[row](*inputs_of(scores[None], [(top_k, 1.0, 0.0)]))
        assert found[0] == 1.0
    below = FLOORS[row](*inputs_of(scores[None], [(num_ties + 4, 1.0, 0.0)]))
    assert below[0] == np.sort(scores)[-(num_ties + 4)]


@pytest.mark.parametrize("row", FLOORS)
def test_rows_that_are_not_cut_keep_all(row: str) -> None:
    """However small their weights; a token that is not allowed is never kept."""
    scores = np.linspace(0, -500, 5000, dtype=np.float32)
    scores[::3] = -np.inf
    settings = [(0, 1.0, 0.0), (5000, 1.0, 0.0), (10**9, 1.0, 0.0)]
    found = np.asarray(FLOORS[row](*inputs_of(np.tile(scores, (3, 1)), settings)))
    np.testing.assert_array_equal(found, np.float32(LOWEST))


@pytest.mark.parametrize("row", FLOORS)
def test_far_below_the_best(row: str) -> None:
    """Cold temperatures spread scores out: the floor is hundreds below the best, behind all edges but the last."""
    scores = np.random.default_rng(7).normal(0.0, 4000.0, (3, 9001)).astype(np.float32)
    inputs = inputs_of(scores, [(50, 1.0, 0.0), (3000, 1.0, 0.0), (8999, 0.999, 0.0)])
    check_floors(FLOORS[row](*inputs), inputs)


@pytest.mark.parametrize("row", FLOORS)
def test_signs_and_extremes(row: str) -> None:
    """Zeros of both signs are one score; the largest and smallest of floats are scores like others."""
    scores = np.array([[0.0, -0.0, 2e-38, -2e-38, 1e30, -1e30, -np.inf, 3e38, -3e38, 1e-30]], np.float32)
    ordered = np.sort(scores[0])[::-1]
    for top_k in range(1, 10):
        found = FLOORS[row](*inputs_of(scores, [(top_k, 1.0, 0.0)]))
        assert (scores[0] >= np.asarray(found)[0]).sum() == (scores[0] >= ordered[top_k - 1]).sum()


@pytest.mark.parametrize("row", FLOORS)
@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf])
def test_rows_with_nothing_to_choose_from_do_no_harm(row: str, bad: float) -> None:
    """Their own floor is anything: the sampler takes no token of theirs."""
    inputs = mixed_rows(5003)
    whole = np.asarray(FLOORS[row](*inputs))
    scores = inputs.scores.at[7].set(bad).at[12, 100].set(bad)
    found = np.asarray(FLOORS[row](*inputs._replace(scores=scores)))
    others = np.delete(np.arange(len(SETTINGS)), [7, 12])
    np.testing.assert_array_equal(found[others], whole[others])


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan])
def test_candidates_lie_within_the_row(bad: float) -> None:
    """What stands behind the end of a row of -inf is -inf too, and no candidate."""
    vocab_size = 5003
    inputs = mixed_rows(vocab_size)
    scores = jnp.full_like(inputs.scores, -jnp.inf).at[:, 0].set(bad)
    seen = []

    def watch(kernel: Any, grid: Any, array: Any, numbers: Any, out: Any) -> Any:
        if kernel is truncation_triton._find_kernel:
            seen.append(np.asarray(numbers.num_between))
        return truncation_triton.INTERPRETED._call(kernel, grid, array, numbers, out)

    kind = type(truncation_triton.INTERPRETED)
    watching: Any = types.SimpleNamespace(_call=watch)
    watching._narrowed = functools.partial(kind._narrowed, watching)
    kind.floor(watching, *inputs._replace(scores=scores))
    assert len(seen) == 1 and (seen[0] <= vocab_size).all()


@pytest.mark.parametrize("vocab_size", [2, 4095, 4097, 12288])
def test_the_kernel_keeps_what_xla_keeps(vocab_size: int) -> None:
    """For scores of bfloat16, which tie, and of float32."""
    inputs = mixed_rows(vocab_size)
    coarse = inputs._replace(scores=inputs.scores.astype(jnp.bfloat16).astype(jnp.float32))
    for rows in (inputs, coarse):
        found = FLOORS["pallas-interpret"](*rows)
        check_floors(found, rows)
        check_floors(FLOORS["xla"](*rows), rows)


def test_selection() -> None:
    """A kernel where one can run, else XLA; interpreted only by name."""
    chosen = functools.partial(select, "truncation", dtype="float32")
    on_cpu = truncation_xla if native_library.unavailable() else truncation_native
    assert chosen(platform="cpu", device_kind="cpu") is on_cpu
    assert chosen(platform="gpu", device_kind="NVIDIA H200") is load("truncation", "triton")
    assert chosen(platform="cpu", device_kind="cpu", name="pallas-interpret").is_interpreted
    with pytest.raises(UnsupportedKernelError, match="triton: needs an NVIDIA GPU"):
        chosen(platform="cpu", device_kind="cpu", name="triton")
    with pytest.raises(UnsupportedKernelError, match=re.escape("xla: scores must be float32, not bfloat16")):
        select("truncation", platform="cpu", device_kind="cpu", dtype="bfloat16")
    with pytest.raises(UnsupportedKernelError, match="pallas-interpret: scores must be float32, not float16"):
        select("truncation", platform="cpu", device_kind="cpu", dtype="float16", name="pallas-interpret")
