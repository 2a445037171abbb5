"""Matrix multiplication of activations by a quantized weight, fused with neighbouring operations: interface, cases,
reference.

Weights come as rows of records (``pallas_kernels.quantized``). An implementation owns how it stores them:
``packed_shape``, ``pack`` and its inverse ``unpack`` on the host, ``rows`` and ``matmul`` inside programs.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.linear import ACTIVATIONS, Fused, Norm
from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows, in_pieces
from pallas_kernels.quantized import ROUNDED, Form, decode, random_records, rounded_rows


@runtime_checkable
class QuantizedLinear(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, *, form: Form | None = None) -> str | None:
        """Return why it cannot run on such a device, or with weights of a form, or None; the dtype is that of codes."""
        ...

    def packed_shape(self, outer: int, inner: int, form: Form, is_gated: bool = False) -> tuple[int, ...]:
        """Return the shape of a packed weight, an array of uint8; its first axis holds outputs, its second features.

        A gated one is multiplied with an activation.
        """
        ...

    def pack(
        self, records: UInt8[np.ndarray, "outer bytes"], form: Form, is_gated: bool = False
    ) -> UInt8[np.ndarray, "..."]:
        """Pack rows of records; may return the same array."""
        ...

    def unpack(
        self, packed: UInt8[np.ndarray, "..."], outer: int, inner: int, form: Form, is_gated: bool = False
    ) -> UInt8[np.ndarray, "outer bytes"]:
        """Unpack to rows of records, bit for bit."""
        ...

    def rows(
        self, packed: UInt8[Array, "..."], indices: Int[Array, " T"], inner: int, form: Form
    ) -> Float[Array, "T inner"]:
        """Return rows of the weight in float32; indices are in range."""
        ...

    def matmul(
        self,
        x: Float[Array, "T features"],
        packed: UInt8[Array, "..."],
        outer: int,
        form: Form,
        *,
        fused: Fused,
        num_rows: Int[Array, ""] | None = None,
        order: Int[Array, " inner"] | None = None,
    ) -> Float[Array, "T results"]:
        """Compute ``x @ weight.T`` and what is fused with it, with activations as the form says.

        Args:
            x: Activations, ``inner`` features unless there is an order.
            packed: The weight.
            outer: Number of its outputs; with an activation the result has half as many.
            form: Its form.
            fused: The fused operations.
            num_rows: Rows in use, the first of the T; the results of other rows are undefined. None: all.
            order: The feature of a row that each of the weight's is; those of the weight that are filled up have an
                index that no feature has, and count as zero. None: they are the same.

        Returns:
            The result, accumulated in float32: float32, or the residual's dtype if there is one.
        """
        ...


INT8_CHANNEL = Form("int8", 32)
W8A8 = INT8_CHANNEL._replace(activations="row")
Q8_0 = Form("int8", 32, 32, "float16")
GPTQ_8 = Form("uint8", 32, 128, "float16", zeros="uint8")
Q6_K = Form("int6", 16, 16, "int8", factors="float16", factor_group=256)
Q5_K = Form("int6", 32, 32, "uint8", biases="uint8", factors="float16", factor_group=256)
AWQ = Form("uint4", 32, 128, "float16", zeros="uint8")
Q4_0 = Form("uint4", 32, 32, "float16", zero=8)
MLX_4 = Form("uint4", 32, 64, "bfloat16", biases="bfloat16")
Q4_K = Form("uint4", 32, 32, "uint8", biases="uint8", factors="float16", factor_group=256)
INT4_CHANNEL = Form("uint4", 16, 0, "bfloat16", zero=8)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NF4 = tuple(float(np.float32(each)) for each in np.tanh(np.linspace(-1.2, 1.2, 16)) / np.tanh(1.2))
MXFP4 = Form("uint4", 32, 32, "float8_e8m0fnu", table=_FP4)
NVFP4 = Form("uint4", 16, 16, "float8_e4m3fn", factors="float32", table=_FP4)
NF4 = Form("uint4", 32, 64, "float32", table=_NF4)
FP8_BLOCK = Form("float8_e4m3fn", 32, 128)
FP8_E5M2 = Form("float8_e5m2", 16, 0)
FORMS: Mapping[str, Form] = {
    "int8_channel": INT8_CHANNEL,
    "w8a8": W8A8,
    "q8_0": Q8_0,
    "q8_0_int8": Q8_0._replace(activations="group"),
    "gptq_8": GPTQ_8,
    "q6_k": Q6_K,
    "q6_k_int8": Q6_K._replace(activations="group"),
    "q5_k": Q5_K,
    "awq": AWQ,
    "awq_int8": AWQ._replace(activations="group"),
    "q4_0": Q4_0,
    "mlx_4": MLX_4,
    "q4_k": Q4_K,
    "q4_k_int8": Q4_K._replace(activations="group"),
    "int4_channel": INT4_CHANNEL,
    "mxfp4": MXFP4,
    "mxfp4_int8": MXFP4._replace(activations="group"),
    "nvfp4": NVFP4,
    "nf4": NF4,
    "fp8_block": FP8_BLOCK,
    "fp8_e5m2": FP8_E5M2,
}
"""Forms of real checkpoints, by what writes them."""


class Case(NamedTuple):
    """A matmul of [num_rows, num_in] with a weight [num_out, num_in]; the last ``num_padding`` rows are not in use.

    With ``num_filled`` the weight has its features in another order than rows, and that many in addition.
    """

    num_rows: int
    form: Form
    num_in: int = 256
    num_out: int = 96
    has_norm: bool = False
    activation: str | None = None
    has_bias: bool = False
    scale: float = 1.0
    has_residual: bool = False
    num_padding: int = 0
    num_filled: int | None = None

    @property
    def num_packed(self) -> int:
        """Features of the weight."""
        return self.num_in + (self.num_filled or 0)


_PIECE = 128  # columns of a result that are compared together
_EPS = 1e-5
IS_IN_PLACE = False
CASES: dict[str, Case] = {
    **{f"{name}_rows_5": Case(5, form) for name, form in FORMS.items()},
    **{f"{name}_row": Case(1, form, num_in=512, num_out=33) for name, form in FORMS.items()},
    **{
        f"{name}_rows_{num_rows}": Case(num_rows, FORMS[name])
        for name in ("w8a8", "awq", "q4_k_int8")
        for num_rows in (2, 4, 8, 16, 17, 33, 100)
    },
    "w8a8_wide": Case(2, W8A8, num_in=1536, num_out=200),
    "w8a8_gated": Case(40, W8A8, num_in=160, num_out=2 * 70, activation="silu", has_norm=True),
    "awq_gated": Case(7, AWQ, num_in=384, num_out=2 * 136, activation="gelu", has_norm=True, has_bias=True),
    "awq_int8_gated_row": Case(1, FORMS["awq_int8"], num_in=384, num_out=2 * 33, activation="silu"),
    "q4_k_odd_out": Case(4, Q4_K, num_out=2),
    "w8a8_odd_in": Case(4, W8A8._replace(span=8), num_in=40),
    "cut_group": Case(3, AWQ._replace(span=8), num_in=8 * 9),
    "q8_0_residual": Case(7, Q8_0, has_residual=True, scale=0.22, has_bias=True),
    "awq_scale": Case(3, AWQ, scale=2.5),
    "w8a8_padded": Case(64, W8A8, num_padding=50, has_norm=True),
    "awq_many_rows": Case(300, AWQ, num_in=640, num_out=200),
    "w8a8_many_rows": Case(300, W8A8, num_in=576, num_out=200),
    "awq_order": Case(5, AWQ, has_norm=True, num_filled=0),
    "awq_order_filled": Case(1, AWQ._replace(group=32), num_in=230, has_norm=True, num_filled=90),
    "awq_order_gated": Case(40, AWQ, num_in=250, num_out=2 * 70, activation="silu", has_norm=True, num_filled=6),
    "awq_int8_order": Case(7, FORMS["awq_int8"], num_in=250, num_filled=6),
    "w8a8_order": Case(20, W8A8, num_in=250, has_norm=True, num_filled=6),
}
CASES |= {
    f"{name}_bf16": case._replace(form=case.form._replace(activations="bfloat16"))
    for name, case in CASES.items()
    if name.endswith(("_rows_5", "_row", "_rows_33")) or name.startswith(("awq_", "cut_group", "q8_0_res"))
    if case.form.activations is None
}
DEVICE_CASES = CASES
_LAYERS = {"smollm_qkv": (576, 960), "smollm_gate_up": (576, 3072), "smollm_down": (1536, 576), "wide": (2048, 8192)}
BENCHES: Mapping[str, Case] = {
    f"{layer}_{num_rows}_{name}": Case(num_rows, form, num_in, num_out)
    for layer, (num_in, num_out) in _LAYERS.items()
    for name, form in (
        ("w8a8", W8A8),
        ("q8_0", Q8_0),
        ("int4", INT4_CHANNEL._replace(span=32, group=32)),
        ("int4_int8", INT4_CHANNEL._replace(span=32, group=32, activations="group")),
    )
    for num_rows in (1, 8, 32, 512)
}


class Inputs(NamedTuple):
    """Arguments of a call; ``weight`` has rows of records, and is packed once they are prepared."""

    x: Float[Array, "T inner"]
    weight: UInt8[Array, "..."]
    norm_weight: Float[Array, " inner"] | None
    bias: Float[Array, " outer"] | None
    residual: Float[Array, "T outer"] | None
    order: Int[Array, " packed"] | None = None

    def fused(self, case: Case) -> Fused:
        """Return the fused operations of the case."""
        norm = None if self.norm_weight is None else Norm(self.norm_weight, _EPS)
        return Fused(norm, self.bias, case.activation, case.scale, self.residual)


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random activations in float32 and random parameters."""
    keys = jax.random.split(key, 5)
    gain = jax.random.uniform(keys[2], (case.num_in,), minval=0.5, maxval=1.5)
    return Inputs(
        2 * jax.random.normal(keys[1], (case.num_rows, case.num_in)),
        random_records(case.form, case.num_out, case.num_packed, keys[0]),
        gain if case.has_norm else None,
        jax.random.normal(keys[3], (case.num_out,)) if case.has_bias else None,
        jax.random.normal(keys[4], (case.num_rows, case.num_out)) if case.has_residual else None,
        None if case.num_filled is None else jax.random.permutation(keys[1], case.num_packed).astype(jnp.int32),
    )


def prepare(implementation: QuantizedLinear, case: Case, inputs: Inputs) -> Inputs:
    """Pack the weight; for shapes, return the packed shape."""
    is_gated = case.activation is not None
    shape = implementation.packed_shape(case.num_out, case.num_packed, case.form, is_gated)
    struct = jax.ShapeDtypeStruct(shape, np.uint8)
    packed = jax.pure_callback(
        lambda records: implementation.pack(np.asarray(records), case.form, is_gated), struct, inputs.weight
    )
    return inputs._replace(weight=packed)


def run(implementation: QuantizedLinear, case: Case, prepared: Inputs) -> Float[Array, "T results"]:
    """Multiply."""
    num_rows = jnp.int32(case.num_rows - case.num_padding) if case.num_padding else None
    found = implementation.matmul(
        prepared.x,
        prepared.weight,
        case.num_out,
        case.form,
        fused=prepared.fused(case),
        num_rows=num_rows,
        order=prepared.order,
    )
    return jnp.where(_used_rows(case), found, 0)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T results"]:
    """Decode the weight and compute all of it in float32."""
    x = inputs.x
    if inputs.norm_weight is not None:
        mean = jnp.mean(jnp.square(x), -1, keepdims=True)
        x = x * lax.rsqrt(mean + _EPS) * inputs.norm_weight
    x = rounded(x if inputs.order is None else ordered(x, inputs.order), case.form)
    y = jnp.dot(x, decode(inputs.weight, case.form).T, precision=lax.Precision.HIGHEST)
    y = y if inputs.bias is None else y + inputs.bias
    if case.activation is not None:
        y = ACTIVATIONS[case.activation](y[:, : case.num_out // 2]) * y[:, case.num_out // 2 :]
    y = y * case.scale
    y = y if inputs.residual is None else y + inputs.residual
    return jnp.where(_used_rows(case), y, 0)


def ordered(x: Float[Array, "T features"], order: Int[Array, " inner"]) -> Float[Array, "T inner"]:
    """Return the features of rows in another order; an index that no feature has stands for zero."""
    return jnp.take(x, order, axis=1, mode="fill", fill_value=0)


def rounded(x: Float[Array, "T inner"], form: Form) -> Float[Array, "T inner"]:
    """Return rows of activations as a form's matmul reads them."""
    if form.activations not in ROUNDED:
        return x
    return rounded_rows(x, x.shape[1] if form.activations == "row" else form.shared(x.shape[1]))


def compare(
    case: Case, inputs: Inputs, found: Float[Array, "T results"], expected: Float[Array, "T results"]
) -> Comparison:
    """Compare each row of the result in pieces of 128 columns; rows that are not in use are padding."""
    del inputs
    pieces = in_pieces(found, _PIECE), in_pieces(expected, _PIECE)
    return compare_rows(("product",), *pieces, _used_rows(case), tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for the order of sums, after a norm for an activation between two integers, and for bfloat16."""
    share = 2e-3 if case.form.activations and case.has_norm else 2e-5
    share = 1e-2 if case.form.activations == "bfloat16" else share
    return Tolerance(share, floor=0.1 * _PIECE**0.5)  # elements are about 1; the last piece may have few


def cost(case: Case) -> Cost:
    """Count the weight once as records hold it, without repeated scales, activations in and out."""
    form = case.form
    groups = case.num_in // (form.group or case.num_in)
    numbers = sum(dtype.itemsize for dtype in form.fields.values()) * groups
    weight = case.num_out * (case.num_in * form.code_bytes // form.span + numbers)
    return Cost(
        weight + 4 * case.num_rows * (case.num_in + case.num_out), 2 * case.num_rows * case.num_in * case.num_out
    )


def sizes(case: Case) -> dict[str, Form]:
    """Return the form."""
    return {"form": case.form}


def dtype(case: Case) -> str:
    """Return the type of codes."""
    return case.form.values


def _used_rows(case: Case) -> np.ndarray:
    return (np.arange(case.num_rows) < case.num_rows - case.num_padding)[:, None]
