"""Matmul of each row with its expert's matrix (mixture of experts): interface, cases and a plain reference.

An implementation owns how it stores the matrices, like one of ``linear``: ``packed_shape``, ``pack`` and its inverse
``unpack`` on the host.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.operation import Comparison, Cost, Tolerance, add_twins, compare_rows, in_pieces


@runtime_checkable
class GroupedMatmul(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, *, num_experts: int = 1) -> str | None:
        """Return why it cannot run on such a device, or None."""
        ...

    def packed_shape(self, outer: int, inner: int, dtype: str, is_gated: bool = False) -> tuple[int, ...]:
        """Return the shape of one expert's packed matrix; its first axis holds outputs, its second features."""
        ...

    def pack(self, matrices: Float[np.ndarray, "E outer inner"], is_gated: bool = False) -> Float[np.ndarray, "E ..."]:
        """Pack a matrix [out, in] per expert: F rows; gated, F rows of the gate, then F rows of the up projection.

        May overwrite the argument and return its memory, so that the matrices are not in memory twice.
        """
        ...

    def unpack(
        self, packed: Float[np.ndarray, "E ..."], outer: int, inner: int, is_gated: bool = False
    ) -> Float[np.ndarray, "E outer inner"]:
        """Unpack the matrices, bit for bit."""
        ...

    def grouped_matmul(
        self,
        lhs: Float[Array, "T D"],
        rhs: Float[Array, "E ..."],
        group_sizes: Int[Array, " E"],
        num_out: int,
        *,
        is_gated: bool = False,
    ) -> Float[Array, "T F"]:
        """Compute ``lhs[t] @ matrix of t's expert.T`` in lhs's dtype, accumulated in float32.

        Args:
            lhs: Rows in the order of their experts; rounded to rhs's dtype where the device multiplies in that.
            rhs: The packed matrices.
            group_sizes: Rows of each expert. Their sum may be less than T: the results of later rows are undefined but
                finite.
            num_out: F, columns of the result.
            is_gated: Whether each matrix holds two projections, and the result is ``silu(gate) * up``.
        """
        ...


class Case(NamedTuple):
    """Sizes of a call; how many rows each expert has, or None for a random choice of experts for each token."""

    num_tokens: int
    group_sizes: tuple[int, ...] | None
    num_in: int = 64
    num_out: int = 48
    is_gated: bool = False
    dtype: str = "bfloat16"
    num_experts: int = 0
    experts_per_token: int = 1

    @property
    def experts(self) -> int:
        """Number of matrices in rhs."""
        return self.num_experts if self.group_sizes is None else len(self.group_sizes)

    @property
    def num_rows(self) -> int:
        """Number of rows of lhs."""
        return self.num_tokens * self.experts_per_token


IS_IN_PLACE = False
_PIECE = 128  # columns of a result that are compared together
CASES: Mapping[str, Case] = {
    "one_row": Case(1, (0, 1, 0)),
    "even": Case(32, (16, 16)),
    "empty_experts": Case(37, (0, 5, 0, 0, 17, 15, 0)),
    "one_takes_all": Case(40, (0, 0, 40, 0)),
    "one_expert": Case(19, (19,)),
    "rows_behind": Case(50, (3, 0, 20, 1)),
    "no_rows": Case(6, (0, 0)),
    "tile_borders": Case(96, (15, 16, 17, 32, 16)),
    "many_rows": Case(700, (300, 1, 250, 100), num_in=96),
    "many_experts": Case(60, tuple(int(i % 7 == 3) * 4 for i in range(90)), num_in=32),
    "gated": Case(45, (7, 0, 38), is_gated=True),
    "gated_rows_behind": Case(70, (0, 33, 20), num_in=200, num_out=72, is_gated=True, dtype="float16"),
    "odd_widths": Case(33, (30, 3), num_in=72, num_out=40),
    "single": Case(21, (4, 0, 17), dtype="float32"),
    "gated_single": Case(140, (100, 39), num_in=80, dtype="float32", is_gated=True),
    "random": Case(20, None, num_experts=16, experts_per_token=4),
}

DEVICE_CASES: Mapping[str, Case] = {
    **add_twins(CASES, {"bf16": {"dtype": "bfloat16"}}),
    # Widths of real layers, at each size of row tile.
    **{
        f"wide_{sum(sizes)}{'_gated' * is_gated}": Case(sum(sizes) + 3, sizes, 1024, 768, is_gated)
        for sizes in ((3, 0, 5, 1), (30, 0, 21, 9), (60, 1, 0, 70), (150, 0, 200, 1))
        for is_gated in (False, True)
    },
}


def _layers(name: str, num_tokens: int, num_experts: int, top: int, width: int, inner: int) -> dict[str, Case]:
    """Return both matmuls of a layer of experts."""
    gate_up = Case(num_tokens, None, width, inner, is_gated=True, num_experts=num_experts, experts_per_token=top)
    down = gate_up._replace(num_in=inner, num_out=width, is_gated=False)
    return {f"{name}_gate_up_{num_tokens}": gate_up, f"{name}_down_{num_tokens}": down}


BENCHES: Mapping[str, Case] = {
    **_layers("qwen3_30b_a3b", 2, 128, 8, 2048, 768),
    **_layers("qwen3_30b_a3b", 64, 128, 8, 2048, 768),
    **_layers("qwen3_30b_a3b", 8192, 128, 8, 2048, 768),
    **_layers("mixtral_8x7b", 64, 8, 2, 4096, 14336),
    **_layers("mixtral_8x7b", 8192, 8, 2, 4096, 14336),
}


class Inputs(NamedTuple):
    """Arguments of a call; ``rhs`` is packed once they are prepared."""

    lhs: Float[Array, "T D"]
    rhs: Float[Array, "E ..."]
    group_sizes: Int[Array, " E"]


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random rows and matrices; each token takes different experts where they are chosen at random."""
    keys = jax.random.split(key, 3)
    shape = (case.experts, case.num_out * (1 + case.is_gated), case.num_in)
    rhs = jax.random.normal(keys[1], shape, case.dtype) * jnp.asarray(case.num_in**-0.5, case.dtype)
    if case.group_sizes is None:
        scores = jax.random.uniform(keys[2], (case.num_tokens, case.num_experts))
        chosen = lax.top_k(scores, case.experts_per_token)[1].reshape(-1)
        sizes = jnp.zeros(case.experts, jnp.int32).at[chosen].add(1)
    else:
        sizes = jnp.asarray(case.group_sizes, jnp.int32)
    return Inputs(jax.random.normal(keys[0], (case.num_rows, case.num_in), case.dtype), rhs, sizes)


def prepare(implementation: GroupedMatmul, case: Case, inputs: Inputs) -> Inputs:
    """Pack the matrices; for shapes, return the packed shape."""
    _, outer, inner = inputs.rhs.shape
    shape = implementation.packed_shape(outer, inner, case.dtype, case.is_gated)
    if shape == (outer, inner):
        return inputs
    struct = jax.ShapeDtypeStruct((case.experts, *shape), case.dtype)
    packed = jax.pure_callback(lambda rhs: implementation.pack(np.array(rhs), case.is_gated), struct, inputs.rhs)
    return inputs._replace(rhs=packed)


def run(implementation: GroupedMatmul, case: Case, prepared: Inputs) -> Float[Array, "T F"]:
    """Return the product."""
    return implementation.grouped_matmul(*prepared, case.num_out, is_gated=case.is_gated)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T F"]:
    """Multiply all rows by each expert and select its own; zeros after the last expert's rows."""
    ends = jnp.cumsum(inputs.group_sizes)
    row = jnp.arange(case.num_rows)
    lhs = inputs.lhs.astype(jnp.float32)

    def add_expert(out: Float[Array, "T F"], expert: tuple[Array, Array, Array]) -> tuple[Float[Array, "T F"], None]:
        weight, size, end = expert
        product = jnp.dot(lhs, weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
        if case.is_gated:
            product = jax.nn.silu(product[:, : case.num_out]) * product[:, case.num_out :]
        is_own = (row >= end - size) & (row < end)
        return jnp.where(is_own[:, None], product, out), None

    begun = jnp.zeros((case.num_rows, case.num_out), jnp.float32)
    return lax.scan(add_expert, begun, (inputs.rhs, inputs.group_sizes, ends))[0]


def compare(case: Case, inputs: Inputs, found: Float[Array, "T F"], expected: Float[Array, "T F"]) -> Comparison:
    """Compare each row of the result in pieces of 128 columns; rows after those of the last expert are padding."""
    is_real = np.arange(case.num_rows)[:, None] < int(inputs.group_sizes.sum())
    pieces = in_pieces(found, _PIECE), in_pieces(expected, _PIECE)
    return compare_rows(("product",), *pieces, is_real, tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for rounding of the result, and of gate and up where an implementation rounds them."""
    return Tolerance(
        {"float32": 1e-5, "float16": 3e-3, "bfloat16": 1e-2}[case.dtype], floor=1e-3 * min(_PIECE, case.num_out) ** 0.5
    )


def cost(case: Case) -> Cost:
    """Count rows in and out, and each used expert's matrix once (the expected number for random choices)."""
    if case.group_sizes is None:
        missed = (1 - case.experts_per_token / case.experts) ** case.num_tokens
        touched, used = round(case.experts * (1 - missed)), case.num_rows
    else:
        touched, used = int(np.count_nonzero(case.group_sizes)), sum(case.group_sizes)
    rows = case.num_out * (1 + case.is_gated)
    numbers = touched * rows * case.num_in + used * (case.num_in + case.num_out)
    return Cost(numbers * jnp.dtype(case.dtype).itemsize, 2 * used * rows * case.num_in)


def sizes(case: Case) -> dict[str, int]:
    """Return the number of experts."""
    return {"num_experts": case.experts}


def dtype(case: Case) -> str:
    """Return the dtype of all operands."""
    return case.dtype
