"""Argmax of each row, for greedy sampling: interface, cases and a plain reference."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.operation import Comparison, Cost


@runtime_checkable
class ArgmaxKernel(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None."""
        ...

    def argmax(self, scores: Float[Array, "R V"], num_rows: Int[Array, ""] | None = None) -> Int[Array, " R"]:
        """Return the first index of each row's maximum; -1 for a row with NaN, or with nothing above -inf.

        Args:
            scores: In float32.
            num_rows: Rows in use, the first of the R; the results of other rows are undefined. None: all.
        """
        ...


class Case(NamedTuple):
    """Rows of ``width`` numbers; the last ``num_padding`` rows are not in use."""

    num_rows: int
    width: int
    num_padding: int = 0
    has_ties: bool = False
    is_broken: bool = False


IS_IN_PLACE = False
CASES: Mapping[str, Case] = {
    "one": Case(1, 1),
    "one_row": Case(1, 50),
    "odd": Case(5, 259),
    "wide": Case(3, 49152),
    "wide_and_odd": Case(2, 32769, has_ties=True),
    "many_rows": Case(64, 300, num_padding=41),
    "ties": Case(20, 1000, has_ties=True),
    "broken": Case(9, 300, is_broken=True),
    "broken_and_wide": Case(8, 40000, is_broken=True),
}
DEVICE_CASES = CASES
BENCHES: Mapping[str, Case] = {
    f"{name}_{rows}": Case(rows, width) for name, width in (("smollm", 49152), ("llama3", 128256)) for rows in (1, 64)
}


class Inputs(NamedTuple):
    """Arguments of a call."""

    scores: Float[Array, "R V"]
    num_rows: Int[Array, ""]


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random numbers; with ties every row has its largest several times, and broken rows are of several kinds."""
    scores = jax.random.normal(key, (case.num_rows, case.width))
    if case.has_ties:
        scores = jnp.round(2 * scores)
    if case.is_broken:
        last, nan, inf = case.width - 1, jnp.nan, jnp.inf
        scores = scores.at[0, last].set(nan).at[1, 0].set(-nan).at[2].set(-inf).at[3].set(-inf).at[3, 7].set(-1e30)
        scores = scores.at[4, 5].set(inf).at[5, 100].set(-inf).at[6].set(nan).at[7].set(-inf).at[7, 9].set(nan)
    return Inputs(scores, jnp.int32(case.num_rows - case.num_padding))


def prepare(implementation: Any, case: Case, inputs: Inputs) -> Inputs:
    """Return the inputs."""
    del implementation, case
    return inputs


def run(implementation: ArgmaxKernel, case: Case, prepared: Inputs) -> Int[Array, " R"]:
    """Compute the indices."""
    del case
    return implementation.argmax(*prepared)


def expected(case: Case, inputs: Inputs) -> Int[Array, " R"]:
    """Compute the indices by comparing every number with the maximum."""
    del case
    scores = inputs.scores
    largest = jnp.max(scores, axis=1, keepdims=True)
    first = jnp.argmax(scores == largest, axis=1)
    is_broken = jnp.isnan(scores).any(1) | (scores == -jnp.inf).all(1)
    return jnp.where(is_broken, -1, first).astype(jnp.int32)


def compare(case: Case, inputs: Inputs, found: Int[Array, " R"], expected: Int[Array, " R"]) -> Comparison:
    """Compare indices exactly."""
    del inputs
    num_rows = case.num_rows - case.num_padding
    wrong = np.flatnonzero(np.asarray(found != expected)[:num_rows])
    worst, place = (float("inf"), f"places[{wrong[0]}]") if wrong.size else (0.0, "")
    return Comparison(worst, place, num_rows, case.num_padding)


def cost(case: Case) -> Cost:
    """Count the numbers once, and a comparison of each."""
    return Cost(4 * case.num_rows * case.width, case.num_rows * case.width)


def sizes(case: Case) -> dict[str, int]:
    """Return no sizes: implementations accept all."""
    del case
    return {}


def dtype(case: Case) -> str:
    """Return float32, the only dtype."""
    del case
    return "float32"
