"""What an operation's file offers to whoever checks, compiles or measures its implementations.

The file of operation ``x`` is ``pallas_kernels/x.py``; its implementations are rows of ``registry.OPERATIONS["x"]``.
The tests run every case on every implementation that this machine can run, ``scripts/compile_check.py`` compiles the
benches for a GPU that need not be there, and ``scripts/gpu_check.py`` runs and measures both on one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, PyTree


class Cost(NamedTuple):
    """The least that a call has to do: bytes moved between memory and chip, and floating-point operations."""

    num_bytes: int
    flops: int


@runtime_checkable
class Operation(Protocol):
    """An operation's file. Cases are hashable; every function of arrays below can be traced.

    Attributes:
        CASES: Small and nasty shapes, for right answers.
        BENCHES: Shapes of real models, for speed.
        IS_IN_PLACE: Whether ``run`` gives back changed arguments, which it is to take over.
    """

    CASES: Mapping[str, Any]
    BENCHES: Mapping[str, Any]
    IS_IN_PLACE: bool

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
