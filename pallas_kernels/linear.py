"""Matrix multiplication of activations by a weight as checkpoints store it: interface, cases and a plain reference."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows, in_pieces


@runtime_checkable
class LinearKernel(Protocol):
    """What an implementation module offers."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; the dtype is that of the weight."""
        ...

    def matmul(self, x: Float[Array, "T inner"], weight: Float[Array, "outer inner"]) -> Float[Array, "T outer"]:
        """Compute ``x @ weight.T``, accumulated and returned in float32, which is never rounded below."""
        ...


class Case(NamedTuple):
    """A multiplication of [num_rows, num_in] by a weight [num_out, num_in]."""

    num_rows: int
    num_in: int = 64
    num_out: int = 96
    dtype: str = "float32"


_PIECE = 128  # columns of a result that are compared together
IS_IN_PLACE = False
_SHAPES: Mapping[str, Case] = {
    **{f"rows_{num_rows}": Case(num_rows) for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 64)},
    "odd_in": Case(5, num_in=37),
    "tiny": Case(3, num_in=3, num_out=1),
    "odd_out": Case(4, num_out=33),
    "two_outs": Case(9, num_out=2),
    "wide": Case(2, num_in=1536, num_out=200),
    "many_rows": Case(300, num_in=576, num_out=130),
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
    """Arguments of a call."""

    x: Float[Array, "T inner"]
    weight: Float[Array, "outer inner"]


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random activations in float32 and a random weight."""
    left, right = jax.random.split(key)
    weight = jax.random.normal(right, (case.num_out, case.num_in)) * case.num_in**-0.5
    return Inputs(jax.random.normal(left, (case.num_rows, case.num_in)), weight.astype(case.dtype))


def prepare(implementation: Any, case: Case, inputs: Inputs) -> Inputs:
    """Return the inputs: weights are taken as checkpoints store them."""
    del implementation, case
    return inputs


def run(implementation: LinearKernel, case: Case, prepared: Inputs) -> Float[Array, "T outer"]:
    """Multiply."""
    del case
    return implementation.matmul(*prepared)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T outer"]:
    """Multiply in float32."""
    del case
    return jnp.dot(inputs.x, inputs.weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)


def compare(
    case: Case, inputs: Inputs, found: Float[Array, "T outer"], expected: Float[Array, "T outer"]
) -> Comparison:
    """Compare each row of the result in pieces of 128 columns; none is padding."""
    del inputs
    is_real = np.ones((case.num_rows, 1), bool)
    pieces = in_pieces(found, _PIECE), in_pieces(expected, _PIECE)
    return compare_rows(("product",), *pieces, is_real, tolerance(case))


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
    """Nothing that an implementation refuses."""
    del case
    return {}


def dtype(case: Case) -> str:
    """The weight's."""
    return case.dtype
