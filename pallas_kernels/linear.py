"""Matrix multiplication of activations by a stored weight, fused with neighbouring operations: interface, cases,
reference.

An implementation owns how it stores a weight: ``packed_shape``, ``pack`` and its inverse ``unpack`` on the host,
``rows`` and ``matmul`` inside programs. Only the linear layers, the embedding and the loader call these.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows, in_pieces

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Norm(NamedTuple):
    """Root-mean-square norm of each row before the matmul (arXiv:1910.07467)."""

    weight: Float[Array, " inner"]
    eps: float


class Fused(NamedTuple):
    """The operations fused with a matmul.

    Attributes:
        norm: Norm of the rows, before it.
        bias: Added to the matmul.
        activation: One of ``ACTIVATIONS``, for a gated weight: the first half of matmul plus bias are gates, and the
            result is ``activation(gates)`` times the other half. Nothing else follows then.
        scale: Factor of matmul plus bias.
        residual: Added at the end.
    """

    norm: Norm | None = None
    bias: Float[Array, " outer"] | None = None
    activation: str | None = None
    scale: float = 1.0
    residual: Float[Array, "T outer"] | None = None


def finished(y: Float[Array, "T outer"], fused: Fused, dtype: jnp.dtype) -> Float[Array, "T results"]:
    """Return what follows a product, computed by XLA.

    Args:
        y: The product, in float32.
        fused: The operations; the norm before it is not among them.
        dtype: In which gates and what they multiply are computed.
    """
    if fused.bias is not None:
        y += fused.bias.astype(jnp.float32)
    if fused.activation is not None:
        gates, others = jnp.split(y.astype(dtype), 2, axis=1)
        return ACTIVATIONS[fused.activation](gates) * others
    if fused.residual is not None:
        y = y.astype(fused.residual.dtype)
    y = y if fused.scale == 1.0 else y * fused.scale
    return y if fused.residual is None else fused.residual + y


@runtime_checkable
class LinearKernel(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; the dtype is that of the weight."""
        ...

    def packed_shape(self, outer: int, inner: int, dtype: str, is_gated: bool = False) -> tuple[int, ...]:
        """Return the shape of a packed weight; its first axis holds outputs, its second features.

        A gated one is multiplied with an activation.
        """
        ...

    def pack(self, weight: Float[np.ndarray, "outer inner"], is_gated: bool = False) -> Float[np.ndarray, "..."]:
        """Pack a weight, in its own dtype; may return the same array."""
        ...

    def unpack(
        self, packed: Float[np.ndarray, "..."], outer: int, inner: int, is_gated: bool = False
    ) -> Float[np.ndarray, "outer inner"]:
        """Unpack a weight, bit for bit."""
        ...

    def rows(self, packed: Float[Array, "..."], indices: Int[Array, " T"], inner: int) -> Float[Array, "T inner"]:
        """Return rows of the weight in its dtype; indices are in range."""
        ...

    def matmul(
        self,
        x: Float[Array, "T inner"],
        packed: Float[Array, "..."],
        outer: int,
        *,
        fused: Fused,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T results"]:
        """Compute ``x @ weight.T`` and what is fused with it.

        Args:
            x: Activations.
            packed: The weight.
            outer: Number of its outputs; with an activation the result has half as many.
            fused: The fused operations.
            num_rows: Rows in use, the first of the T; the results of other rows are undefined. None: all.

        Returns:
            The result, accumulated in float32: float32, or the residual's dtype if there is one.
        """
        ...


class Case(NamedTuple):
    """A matmul of [num_rows, num_in] with a weight [num_out, num_in]; the last ``num_padding`` rows are not in use."""

    num_rows: int
    num_in: int = 64
    num_out: int = 96
    dtype: str = "float32"
    has_norm: bool = False
    activation: str | None = None
    has_bias: bool = False
    scale: float = 1.0
    has_residual: bool = False
    num_padding: int = 0


_PIECE = 128  # columns of a result that are compared together
_EPS = 1e-5
IS_IN_PLACE = False
_SHAPES: Mapping[str, Case] = {
    **{f"rows_{num_rows}": Case(num_rows) for num_rows in (*range(1, 14), 16, 17, 31, 33, 64)},
    "odd_in": Case(5, num_in=37),
    "tiny": Case(3, num_in=3, num_out=1),
    "odd_out": Case(4, num_out=33),
    "two_outs": Case(9, num_out=2),
    "wide": Case(2, num_in=1536, num_out=200),
    "many_rows": Case(300, num_in=576, num_out=200),
    "parts": Case(30, num_in=1700, num_out=72, has_residual=True),
    "padded": Case(64, num_padding=50, has_norm=True),
    "norm": Case(5, has_norm=True),
    "norm_odd": Case(20, num_in=37, has_norm=True, has_bias=True),
    "bias": Case(5, has_bias=True, num_out=70),
    "residual": Case(7, has_residual=True, scale=0.22, has_bias=True),
    "scale": Case(3, scale=2.5),
    **{name: Case(6, num_in=45, num_out=2 * 70, activation=name) for name in ACTIVATIONS},
    "gated": Case(40, num_in=160, num_out=2 * 64, activation="silu", has_norm=True),
    "gated_one": Case(1, num_in=1000, num_out=2 * 136, activation="silu", has_bias=True),
    "gated_odd": Case(70, num_in=33, num_out=2 * 37, activation="silu", has_bias=True),
}
CASES: Mapping[str, Case] = _SHAPES | {
    f"{name}_bf16": case._replace(dtype="bfloat16") for name, case in _SHAPES.items()
}
DEVICE_CASES = CASES
_LAYERS = {"smollm_qkv": (576, 960), "smollm_gate_up": (576, 3072), "smollm_down": (1536, 576), "wide": (2048, 8192)}
BENCHES: Mapping[str, Case] = {
    f"{layer}_{num_rows}_{dtype}": Case(num_rows, num_in, num_out, dtype)
    for layer, (num_in, num_out) in _LAYERS.items()
    for dtype in ("float32", "bfloat16")
    for num_rows in (1, 8, 32, 512)
}


class Inputs(NamedTuple):
    """Arguments of a call; ``weight`` is packed once they are prepared."""

    x: Float[Array, "T inner"]
    weight: Float[Array, "..."]
    norm_weight: Float[Array, " inner"] | None
    bias: Float[Array, " outer"] | None
    residual: Float[Array, "T outer"] | None

    def fused(self, case: Case) -> Fused:
        """Return the fused operations of the case."""
        norm = None if self.norm_weight is None else Norm(self.norm_weight, _EPS)
        return Fused(norm, self.bias, case.activation, case.scale, self.residual)


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random activations in float32 and random parameters."""
    keys = jax.random.split(key, 5)
    weight = jax.random.normal(keys[0], (case.num_out, case.num_in)) * case.num_in**-0.5
    gain = jax.random.uniform(keys[2], (case.num_in,), minval=0.5, maxval=1.5)
    return Inputs(
        2 * jax.random.normal(keys[1], (case.num_rows, case.num_in)),
        weight.astype(case.dtype),
        gain.astype(case.dtype) if case.has_norm else None,
        jax.random.normal(keys[3], (case.num_out,)).astype(case.dtype) if case.has_bias else None,
        jax.random.normal(keys[4], (case.num_rows, case.num_out)) if case.has_residual else None,
    )


def prepare(implementation: LinearKernel, case: Case, inputs: Inputs) -> Inputs:
    """Pack the weight; for shapes, return the packed shape."""
    is_gated = case.activation is not None
    shape = implementation.packed_shape(case.num_out, case.num_in, case.dtype, is_gated)
    struct = jax.ShapeDtypeStruct(shape, case.dtype)
    packed = jax.pure_callback(lambda weight: implementation.pack(np.asarray(weight), is_gated), struct, inputs.weight)
    return inputs._replace(weight=packed)


def run(implementation: LinearKernel, case: Case, prepared: Inputs) -> Float[Array, "T results"]:
    """Multiply."""
    num_rows = jnp.int32(case.num_rows - case.num_padding) if case.num_padding else None
    found = implementation.matmul(
        prepared.x, prepared.weight, case.num_out, fused=prepared.fused(case), num_rows=num_rows
    )
    return jnp.where(_used_rows(case), found, 0)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T results"]:
    """Compute all of it in float32."""
    x = inputs.x
    if inputs.norm_weight is not None:
        mean = jnp.mean(jnp.square(x), -1, keepdims=True)
        x = x * lax.rsqrt(mean + _EPS) * inputs.norm_weight.astype(jnp.float32)
    y = jnp.dot(x, inputs.weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    y = y if inputs.bias is None else y + inputs.bias.astype(jnp.float32)
    if case.activation is not None:
        y = ACTIVATIONS[case.activation](y[:, : case.num_out // 2]) * y[:, case.num_out // 2 :]
    y = y * case.scale
    y = y if inputs.residual is None else y + inputs.residual
    return jnp.where(_used_rows(case), y, 0)


def compare(
    case: Case, inputs: Inputs, found: Float[Array, "T results"], expected: Float[Array, "T results"]
) -> Comparison:
    """Compare each row of the result in pieces of 128 columns; rows that are not in use are padding."""
    del inputs
    pieces = in_pieces(found, _PIECE), in_pieces(expected, _PIECE)
    return compare_rows(("product",), *pieces, _used_rows(case), tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for the order of sums; with 16-bit weights also for activations that are rounded to the weight's dtype."""
    share = 1e-5 if case.dtype == "float32" else 1e-2
    return Tolerance(share, floor=0.1 * _PIECE**0.5)  # elements are about 1; the last piece may have few


def cost(case: Case) -> Cost:
    """Count the weight once, activations in and out."""
    weight = case.num_in * case.num_out * jnp.dtype(case.dtype).itemsize
    return Cost(
        weight + 4 * case.num_rows * (case.num_in + case.num_out), 2 * case.num_rows * case.num_in * case.num_out
    )


def sizes(case: Case) -> dict[str, int]:
    """Return no sizes: implementations accept all."""
    del case
    return {}


def dtype(case: Case) -> str:
    """Return the dtype of the weight."""
    return case.dtype


def _used_rows(case: Case) -> np.ndarray:
    return (np.arange(case.num_rows) < case.num_rows - case.num_padding)[:, None]
