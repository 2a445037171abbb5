"""Matmul of each row with its expert's quantized matrix (mixture of experts): interface, cases and a plain reference.

Matrices come as rows of records (``pallas_kernels.quantized``), those of each expert in one array. An implementation
owns how it stores them, like one of ``quantized_linear``.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import quantized_linear
from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows, in_pieces
from pallas_kernels.quantized import Form, decode, random_records
from pallas_kernels.quantized_linear import FORMS, rounded


@runtime_checkable
class QuantizedGroupedMatmul(Protocol):
    """The functions of an implementation module."""

    def unsupported(
        self, platform: str, device_kind: str, dtype: str, *, form: Form | None = None, num_experts: int = 1
    ) -> str | None:
        """Return why it cannot run on such a device, or with a form, or None; the dtype is that of codes."""
        ...

    def packed_shape(self, outer: int, inner: int, form: Form, is_gated: bool = False) -> tuple[int, ...]:
        """Return the shape of one expert's packed matrix; its first axis holds outputs, its second features."""
        ...

    def pack(
        self, records: UInt8[np.ndarray, "E outer bytes"], form: Form, is_gated: bool = False
    ) -> UInt8[np.ndarray, "E ..."]:
        """Pack a matrix per expert: F rows; gated, F rows of the gate, then F rows of the up projection."""
        ...

    def unpack(
        self, packed: UInt8[np.ndarray, "E ..."], outer: int, inner: int, form: Form, is_gated: bool = False
    ) -> UInt8[np.ndarray, "E outer bytes"]:
        """Unpack to rows of records, bit for bit."""
        ...

    def grouped_matmul(
        self,
        lhs: Float[Array, "T D"],
        rhs: UInt8[Array, "E ..."],
        group_sizes: Int[Array, " E"],
        num_out: int,
        form: Form,
        *,
        is_gated: bool = False,
    ) -> Float[Array, "T F"]:
        """Compute ``lhs[t] @ matrix of t's expert.T`` in lhs's dtype, accumulated in float32.

        Args:
            lhs: Rows in the order of their experts.
            rhs: The packed matrices.
            group_sizes: Rows of each expert. Their sum may be less than T: the results of later rows are undefined but
                finite.
            num_out: F, columns of the result.
            form: The form of the matrices; it says how activations are rounded.
            is_gated: Whether each matrix holds two projections, and the result is ``silu(gate) * up``.
        """
        ...


class Case(NamedTuple):
    """Sizes of a call, and how many rows each expert has."""

    group_sizes: tuple[int, ...]
    form: Form
    num_in: int = 256
    num_out: int = 48
    is_gated: bool = False
    num_padding: int = 0

    @property
    def experts(self) -> int:
        """Number of matrices in rhs."""
        return len(self.group_sizes)

    @property
    def num_rows(self) -> int:
        """Number of rows of lhs."""
        return sum(self.group_sizes) + self.num_padding


IS_IN_PLACE = False
_PIECE = 128  # columns of a result that are compared together
_FORMS = ("w8a8", "int8_channel", "q8_0", "awq", "q4_k", "q4_k_int8", "mxfp4", "fp8_block")
CASES: Mapping[str, Case] = {
    **{f"{name}_empty_experts": Case((0, 5, 0, 0, 17, 15, 0), FORMS[name]) for name in _FORMS},
    **{f"{name}_gated": Case((7, 0, 38), FORMS[name], is_gated=True, num_padding=3) for name in _FORMS},
    **{
        f"{name}_many_rows": Case((100, 1, 70), FORMS[name], num_in=512, num_out=72)
        for name in ("w8a8", "awq", "q4_k_int8")
    },
    "one_row": Case((0, 1, 0), FORMS["w8a8"]),
    "no_rows": Case((0, 0), FORMS["awq"], num_padding=6),
    "one_expert": Case((19,), FORMS["nvfp4"]),
    "many_experts": Case(tuple(int(i % 7 == 3) * 4 for i in range(50)), FORMS["awq_int8"]),
}
DEVICE_CASES = CASES
BENCHES: Mapping[str, Case] = {
    f"qwen3_30b_a3b_{name}_{num_rows}": Case(
        tuple([num_rows // 8] * 8 + [0] * 8), FORMS[name], 2048, 768, is_gated=True
    )
    for name in ("w8a8", "awq", "mxfp4")
    for num_rows in (8, 512)
}


class Inputs(NamedTuple):
    """Arguments of a call; ``rhs`` has rows of records, and is packed once they are prepared."""

    lhs: Float[Array, "T D"]
    rhs: UInt8[Array, "E ..."]
    group_sizes: Int[Array, " E"]


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random rows and matrices."""
    first, second = jax.random.split(key)
    outer = case.num_out * (1 + case.is_gated)
    records = random_records(case.form, case.experts * outer, case.num_in, second)
    return Inputs(
        jax.random.normal(first, (case.num_rows, case.num_in)),
        records.reshape(case.experts, outer, -1),
        jnp.asarray(case.group_sizes, jnp.int32),
    )


def prepare(implementation: QuantizedGroupedMatmul, case: Case, inputs: Inputs) -> Inputs:
    """Pack the matrices; for shapes, return the packed shape."""
    shape = implementation.packed_shape(case.num_out * (1 + case.is_gated), case.num_in, case.form, case.is_gated)
    struct = jax.ShapeDtypeStruct((case.experts, *shape), np.uint8)
    packed = jax.pure_callback(
        lambda records: implementation.pack(np.asarray(records), case.form, case.is_gated), struct, inputs.rhs
    )
    return inputs._replace(rhs=packed)


def run(implementation: QuantizedGroupedMatmul, case: Case, prepared: Inputs) -> Float[Array, "T F"]:
    """Return the product."""
    return implementation.grouped_matmul(*prepared, case.num_out, case.form, is_gated=case.is_gated)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T F"]:
    """Multiply all rows by each expert's decoded matrix and select its own; zeros after the last expert's rows."""
    ends = jnp.cumsum(inputs.group_sizes)
    row = jnp.arange(case.num_rows)
    lhs = rounded(inputs.lhs, case.form)

    def add_expert(out: Float[Array, "T F"], expert: tuple[Array, Array, Array]) -> tuple[Float[Array, "T F"], None]:
        records, size, end = expert
        product = jnp.dot(lhs, decode(records, case.form).T, precision=lax.Precision.HIGHEST)
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
    """Allow for the order of sums."""
    return Tolerance(2e-5, floor=0.1 * min(_PIECE, case.num_out) ** 0.5)


def cost(case: Case) -> Cost:
    """Count rows in and out, and each used expert's matrix once as ``quantized_linear`` counts it."""
    used = [size for size in case.group_sizes if size]
    matmul = quantized_linear.Case(1, case.form, case.num_in, case.num_out * (1 + case.is_gated))
    weight = quantized_linear.cost(matmul)
    weight_bytes = weight.num_bytes - 4 * (matmul.num_in + matmul.num_out)
    rows = sum(used)
    return Cost(len(used) * weight_bytes + 4 * rows * (case.num_in + case.num_out), rows * weight.flops)


def sizes(case: Case) -> dict[str, Form | int]:
    """Return the form and the number of experts."""
    return {"form": case.form, "num_experts": case.experts}


def dtype(case: Case) -> str:
    """Return the type of codes."""
    return case.form.values
