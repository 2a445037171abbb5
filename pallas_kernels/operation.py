"""What an operation's file offers to whoever checks, compiles or measures its implementations.

The file of operation ``x`` is ``pallas_kernels/x.py``; its implementations are rows of ``registry.OPERATIONS["x"]``.
The tests run every case on every implementation that this machine can run, ``scripts/compile_check.py`` compiles the
benches for a GPU that need not be there, and ``scripts/gpu_check.py`` runs and measures both on one.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, PyTree


class Cost(NamedTuple):
    """The least that a call has to do: bytes moved between memory and chip, and floating-point operations."""

    num_bytes: int
    flops: int


@runtime_checkable
class Operation(Protocol):
    """An operation's file. Cases are hashable; every function of arrays below can be traced."""

    @property
    def CASES(self) -> Mapping[str, Any]:
        """Small and nasty shapes, for right answers."""
        ...

    @property
    def BENCHES(self) -> Mapping[str, Any]:
        """Shapes of real models, for speed."""
        ...

    @property
    def IS_IN_PLACE(self) -> bool:
        """Whether ``run`` gives back changed arguments, which it is to take over."""
        ...

    def make_inputs(self, case: Any, key: jax.Array) -> PyTree[Array]:
        """Random inputs of a case, in a form that all implementations share."""
        ...

    def prepare(self, implementation: Any, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """The inputs in the form that the implementation takes them: what is done once, not in each step."""
        ...

    def run(self, implementation: Any, case: Any, prepared: PyTree[Array]) -> PyTree[Array]:
        """The call to check or to measure."""
        ...

    def expected(self, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """What ``run`` has to give, in plain JAX and float32; NaN stands where any finite number may."""
        ...

    def tolerance(self, case: Any) -> float:
        """Largest difference from ``expected`` that rounding explains, as a share of the largest expected value."""
        ...

    def cost(self, case: Any) -> Cost:
        """What the roofline of a case is computed from."""
        ...

    def sizes(self, case: Any) -> dict[str, int]:
        """What implementations may refuse a case by; given to their ``unsupported``."""
        ...

    def dtype(self, case: Any) -> str:
        """Element type of a case's operands; given to ``unsupported`` too."""
        ...


def input_shapes(op: Operation, case: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """What ``make_inputs`` gives, without its numbers: benches are larger than many machines."""
    return jax.eval_shape(functools.partial(op.make_inputs, case), jax.random.key(0))


def prepared_shapes(op: Operation, implementation: Any, case: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """What ``run`` takes, without its numbers."""
    return jax.eval_shape(functools.partial(op.prepare, implementation, case), input_shapes(op, case))


def largest_error(found: PyTree[Array | np.ndarray], expected: PyTree[Array | np.ndarray]) -> float:
    """Largest difference from ``expected``, as ``tolerance`` counts it; NaN there stands for anything that is finite.

    Infinite where a result is not finite or has another shape.
    """
    worst = 0.0
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        if got.shape != wanted.shape or not np.isfinite(got).all():
            return float("inf")
        counts = ~np.isnan(wanted)
        largest = np.abs(wanted[counts]).max(initial=1e-30)
        worst = max(worst, float(np.abs(got - wanted)[counts].max(initial=0.0) / largest))
    return worst
