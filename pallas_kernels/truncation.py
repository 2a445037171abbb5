"""Min-p, top-k and top-p without sorting the vocabulary: interface, cases, and a reference that sorts.

In the order vLLM applies them: min-p, then top-k, then top-p over what those two keep. Each keeps the tokens at or
above a threshold; tokens that tie with the threshold are all kept.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.operation import Comparison, Cost

LOWEST = float(np.finfo(np.float32).min)
"""The threshold of rows that keep all tokens, except those with score -inf."""

MARGIN = 1e-5
"""Relative error of float32 sums of the kept mass, within which either side of a boundary is accepted."""


@runtime_checkable
class Truncation(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; ``dtype`` is that of the scores."""
        ...

    def floor(
        self, scores: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
    ) -> Float[Array, " R"]:
        """Return the lowest score that each row keeps, which depends only on the row's own scores and settings.

        Args:
            scores: Logits over temperature; -inf for tokens that are not allowed.
            top_k: Number of tokens to keep; 0 keeps all.
            top_p: Probability mass to keep; 1 keeps all.
            min_p: Smallest probability to keep, relative to the most likely token's; 0 keeps all.
        """
        ...


@runtime_checkable
class Parts(Protocol):
    """Combines what devices found in rows of which each device has a part of the scores."""

    def width(self, part_width: int) -> int:
        """Return the number of scores of a whole row."""
        ...

    def total(self, found: Float[Array, " R"]) -> Float[Array, " R"]:
        """Return the sum over the devices."""
        ...

    def candidates(self, top: Float[Array, "R part"], count: int) -> Float[Array, "R top"]:
        """Return the largest ``count`` scores of whole rows, in order, from as many of each part."""
        ...


class WholeRows:
    """The ``Parts`` of a device that has whole rows."""

    def width(self, part_width: int) -> int:
        """Return the same number."""
        return part_width

    def total(self, found: Float[Array, " R"]) -> Float[Array, " R"]:
        """Return what the device found."""
        return found

    def candidates(self, top: Float[Array, "R part"], count: int) -> Float[Array, "R top"]:
        """Return the device's scores."""
        del count
        return top


def min_p_floor(best: Float[Array, " R"], min_p: Float[Array, " R"]) -> Float[Array, " R"]:
    """Return the lowest score that min-p keeps, where ``best`` is a row's largest."""
    return jnp.where(min_p > 0, best + jnp.log(jnp.maximum(min_p, 1e-30)), LOWEST)


def to_order(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Map floats to integers in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_order(order: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return the floats of their places in order."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


SETTINGS: tuple[tuple[int, float, float], ...] = (  # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (1025, 1.0, 0.0),
    (10**9, 1.0, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (50, 0.9, 0.0),
    (2000, 0.95, 0.0),
    (0, 0.9, 0.02),
    (40, 0.9, 0.1),
    (4000, 0.97, 0.001),
    (1, 0.3, 0.5),
)


class Case(NamedTuple):
    """Rows of random scores with different settings.

    Attributes:
        spread: Their standard deviation; 0 makes all equal.
        num_levels: Approximate number of distinct scores; None for all distinct.
        allowed: Fraction of tokens whose score is not -inf; 0 for a single one.
        settings: (top_k, top_p, min_p) of the rows in turn.
    """

    vocab_size: int
    num_rows: int = len(SETTINGS)
    spread: float = 3.0
    num_levels: int | None = None
    allowed: float = 1.0
    settings: tuple[tuple[int, float, float], ...] = SETTINGS
    dtype: str = "float32"


class Inputs(NamedTuple):
    """Arguments of ``floor``."""

    scores: Float[Array, "R V"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]


IS_IN_PLACE = False
CASES: dict[str, Case] = {
    "one_token": Case(1),
    "few_tokens": Case(10),
    "one_chunk": Case(4096),
    "odd": Case(5001),
    "ties": Case(5001, num_levels=40),
    "heavy_ties": Case(9000, num_levels=3, spread=0.5),
    "equal": Case(5001, spread=0.0),
    "flat": Case(20011, spread=0.01),
    "peaked": Case(9000, spread=30.0),
    "masked": Case(9000, allowed=0.3),
    "one_allowed": Case(4999, allowed=0.0),
    "one_row": Case(20011, 1, settings=((50, 0.9, 0.02),)),
}

DEVICE_CASES = CASES

BENCHES: dict[str, Case] = {
    f"{model}_{name}_{num_rows}": Case(vocab_size, num_rows, settings=(setting,))
    for model, vocab_size in (("qwen", 151936), ("llama", 128256))
    for name, setting in (("top_p", (0, 0.9, 0.0)), ("top_k_top_p", (50, 0.9, 0.0)))
    for num_rows in (2, 64, 256)
}


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make the scores and settings of a case."""
    noise, chosen = jax.random.split(key)
    shape = case.num_rows, case.vocab_size
    scores = case.spread * jax.random.normal(noise, shape, jnp.float32)
    if case.num_levels is not None:
        step = 6 * case.spread / case.num_levels
        scores = jnp.round(scores / step) * step
    draws = jax.random.uniform(chosen, shape)
    is_allowed = draws <= jnp.maximum(case.allowed, draws.min(1, keepdims=True))
    numbers = [case.settings[row % len(case.settings)] for row in range(case.num_rows)]
    top_k, top_p, min_p = (jnp.asarray(np.array(column)) for column in zip(*numbers, strict=True))
    return Inputs(
        jnp.where(is_allowed, scores, -jnp.inf),
        top_k.astype(jnp.int32),
        top_p.astype(jnp.float32),
        min_p.astype(jnp.float32),
    )


def prepare(implementation: Truncation, case: Case, inputs: Inputs) -> Inputs:
    """Return the inputs unchanged."""
    del implementation, case
    return inputs


def run(implementation: Truncation, case: Case, prepared: Inputs) -> Float[Array, " R"]:
    """Return each row's floor."""
    del case
    return implementation.floor(*prepared)


class FloorRange(NamedTuple):
    """Bounds of a row's threshold: tokens at or above ``most`` must be kept, tokens below ``least`` must not."""

    least: Float[Array, " R"]
    most: Float[Array, " R"]


def expected(case: Case, inputs: Inputs) -> FloorRange:
    """Return the floors by sorting; two that differ where the sum that top-p cuts at is too close to a token's to
    tell."""
    del case
    return FloorRange(least=sorted_floor(inputs, 1 + MARGIN), most=sorted_floor(inputs, 1 - MARGIN))


def compare(case: Case, inputs: Inputs, found: Float[Array, " R"], expected: FloorRange) -> Comparison:
    """Compare the sets of tokens that are kept; between the two floors, at ties of the boundary, either is accepted."""
    num_wrong = np.asarray(_num_wrong(inputs.scores, found, expected))
    if not num_wrong.any():
        return Comparison(0.0, "", case.num_rows, 0)
    row = int(num_wrong.argmax())
    return Comparison(float("inf"), f"row {row}: {num_wrong[row]} tokens wrongly kept or dropped", case.num_rows, 0)


@jax.jit
def _num_wrong(scores: Float[Array, "R V"], floor: Float[Array, " R"], expected: FloorRange) -> Int[Array, " R"]:
    """Count each row's tokens that are wrongly kept or dropped."""
    is_kept = scores >= floor[:, None]
    is_wrong = jnp.where(is_kept, scores < expected.least[:, None], scores >= expected.most[:, None])
    return is_wrong.sum(1)


def sorted_floor(inputs: Inputs, scale: float = 1.0) -> Float[Array, " R"]:
    """Return the floor by sorting, with ``top_p`` times ``scale`` where it is less than 1."""
    scores, top_k, top_p, min_p = inputs
    ordered = -jnp.sort(-scores, axis=1)
    lowest = min_p_floor(ordered[:, 0], min_p)
    num_kept = (ordered >= lowest[:, None]).sum(1)
    kth = _at(ordered, jnp.maximum(top_k, 1) - 1)
    lowest = jnp.where((top_k > 0) & (top_k < num_kept), jnp.maximum(lowest, kth), lowest)
    weights = jnp.where(ordered >= lowest[:, None], jnp.exp(ordered - ordered[:, :1]), 0.0)
    cumulative = jnp.cumsum(weights, axis=1)
    share = jnp.minimum(top_p * scale, 1.0)
    short: Bool[Array, "R V"] = cumulative < (share * cumulative[:, -1])[:, None]
    return jnp.where((top_p < 1) & (share < 1), jnp.maximum(lowest, _at(ordered, short.sum(1))), lowest)


def cost(case: Case) -> Cost:
    """Return every score is read once; an exponential and a sum of each."""
    size = case.num_rows * case.vocab_size
    return Cost(4 * size, 3 * size)


def sizes(case: Case) -> dict[str, int]:
    """Return the vocabulary size."""
    return {"vocab_size": case.vocab_size}


def dtype(case: Case) -> str:
    """Return the dtype of the scores."""
    return case.dtype


def _at(rows: Float[Array, "R V"], places: Int[Array, " R"]) -> Float[Array, " R"]:
    return jnp.take_along_axis(rows, jnp.clip(places, 0, rows.shape[1] - 1)[:, None], axis=1)[:, 0]
