"""The gated short convolution (LFM2): interface, cases and a plain reference.

From a token's projection B | C | x to the input of the output projection, in one call for a step of many rows: the
causal convolution of B * x, times C. A page holds the latest products B * x and nothing else; see ``recurrent_states``.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows, in_pieces
from pallas_kernels.recurrent_states import (
    RAGGED,
    Convolution,
    Row,
    StateRows,
    make_rows,
    num_pages_of,
    num_tokens_of,
    reference_convolution,
    stretches,
    write_stretch,
)


@runtime_checkable
class ShortConvolutionKernel(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; the dtype is that of projections and tails.

        The size is ``taps``.
        """
        ...

    def copy_states(
        self, arrays: tuple[Float[Array, "P ..."], ...], sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> tuple[Float[Array, "P ..."], ...]:
        """Return arrays with pages copied; see ``recurrent_states.copy_states``."""
        ...

    def update(
        self,
        projected: Float[Array, "T width"],
        convolution: Convolution,
        tail: Float[Array, "P history channels"],
        rows: StateRows,
    ) -> tuple[Float[Array, "T channels"], Float[Array, "P history channels"]]:
        """Compute the layer's tokens and update its tails.

        Args:
            projected: The features B | C | x of each token, in thirds.
            convolution: Of the products B * x.
            tail: The latest products of each page, in the dtype of ``projected``, to which products are rounded; donate
                it to update it in place.
            rows: Rows of the step.

        Returns:
            The gated convolution in float32, undefined but finite for padding tokens; and the tails.
        """
        ...


class Case(NamedTuple):
    """One shape; ``spare_rows`` and ``spare_tokens`` are padding."""

    rows: tuple[Row, ...]
    num_channels: int = 64
    taps: int = 3
    has_bias: bool = False
    dtype: str = "float32"
    spare_rows: int = 1
    spare_tokens: int = 3

    @property
    def num_tokens(self) -> int:
        """Tokens of the step with its padding."""
        return num_tokens_of(self.rows) + self.spare_tokens


class Inputs(NamedTuple):
    """Arguments of a call."""

    projected: Float[Array, "T width"]
    convolution: Convolution
    tail: Float[Array, "P history channels"]
    rows: StateRows


_PIECE = 64  # channels that are compared together
IS_IN_PLACE = True
CASES: Mapping[str, Case] = {
    "one_token": Case((Row(1),), spare_rows=0, spare_tokens=0),
    "decode": Case((Row(1), Row(1, is_new=True), Row(1, snapshots=(1,)), Row(1))),
    "ragged": Case(RAGGED),
    "ragged_bf16": Case(RAGGED, dtype="bfloat16"),
    "with_bias": Case(RAGGED, has_bias=True),
    "odd": Case(RAGGED, num_channels=37),
    "wide": Case((Row(1), Row(90, is_new=True, snapshots=(64,))), num_channels=600),
    "two_taps": Case(RAGGED, taps=2),
    "four_taps": Case(RAGGED, taps=4),
    "shorter_than_taps": Case(
        (Row(1), Row(2, is_new=True, snapshots=(1,)), Row(1, is_new=True), Row(1, snapshots=(1,)))
    ),
    "only_padding": Case((Row(0),)),
}
DEVICE_CASES: Mapping[str, Case] = {
    **CASES,
    "production": Case(RAGGED, num_channels=2048),
    "production_bf16": Case(RAGGED, num_channels=2048, dtype="bfloat16"),
}
_STEPS = {f"decode_{count}": (Row(1),) * count for count in (1, 8, 32)} | {"prefill_512": (Row(512, is_new=True),)}
BENCHES: Mapping[str, Case] = {
    f"lfm2_1.2b_{step}": Case(rows, num_channels=2048, spare_rows=0, spare_tokens=0) for step, rows in _STEPS.items()
}


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random projections, weights and tails in every page."""
    keys = jax.random.split(key, 5)
    convolution = Convolution(
        jax.random.normal(keys[0], (case.taps, case.num_channels)),
        jax.random.normal(keys[1], (case.num_channels,)) if case.has_bias else None,
    )
    num_pages = num_pages_of(case.rows, case.spare_rows)
    tail = jax.random.normal(keys[2], (num_pages, case.taps - 1, case.num_channels)).astype(case.dtype)
    projected = jax.random.normal(keys[3], (case.num_tokens, 3 * case.num_channels)).astype(case.dtype)
    return Inputs(projected, convolution, tail, make_rows(case.rows, case.spare_rows, keys[4]))


def prepare(implementation: ShortConvolutionKernel, case: Case, inputs: Inputs) -> Inputs:
    """Return the inputs."""
    del implementation, case
    return inputs


def run(implementation: ShortConvolutionKernel, case: Case, prepared: Inputs) -> tuple[Array, Array]:
    """Return the channels of all tokens, and all tails."""
    del case
    return implementation.update(*prepared)


def expected(case: Case, inputs: Inputs) -> tuple[Array, Array]:
    """Compute each row by itself, in float32."""
    projected, convolution, tail, batch = inputs
    outputs = [jnp.zeros((0, case.num_channels))]
    for stretch in stretches(case.rows, batch):
        b, c, x = jnp.split(projected[stretch.first : stretch.last].astype(jnp.float32), 3, axis=1)
        old = jnp.where(stretch.is_new, 0, tail[stretch.source])
        y, new = reference_convolution((b * x).astype(tail.dtype), old, convolution)
        outputs.append(c * y)
        if len(y):
            tail = write_stretch(tail, stretch, new)
    return jnp.pad(jnp.concatenate(outputs), ((0, case.spare_tokens), (0, 0))), tail


def compare(case: Case, inputs: Inputs, found: tuple[Array, Array], expected: tuple[Array, Array]) -> Comparison:
    """Compare tokens in pieces of 64 channels, and every page's tail; padding tokens are ignored."""
    del inputs
    is_used = np.arange(case.num_tokens) < num_tokens_of(case.rows)
    (y, tail), (expected_y, expected_tail) = found, expected
    return compare_rows(
        ("channels", "tail"),
        (in_pieces(y, _PIECE), tail),
        (in_pieces(expected_y, _PIECE), expected_tail),
        (is_used[:, None], np.array(True)),
        Tolerance(1e-5 if case.dtype == "float32" else 1e-2, floor=1e-2),
    )


def cost(case: Case) -> Cost:
    """Count tails once in and once out, projections and results, and the operations of a tap and of two gates."""
    num_rows, num_tokens = sum(row.length > 0 for row in case.rows), num_tokens_of(case.rows)
    width = jnp.dtype(case.dtype).itemsize
    num_bytes = num_rows * 2 * (case.taps - 1) * case.num_channels * width
    return Cost(
        num_bytes + num_tokens * case.num_channels * (3 * width + 4),
        num_tokens * case.num_channels * (2 * case.taps + 2),
    )


def sizes(case: Case) -> dict[str, int]:
    """Return the taps."""
    return {"taps": case.taps}


def dtype(case: Case) -> str:
    """Return the dtype of projections and tails."""
    return case.dtype
