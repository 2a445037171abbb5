"""What an operation's file offers to whoever checks, compiles or measures its implementations.

The file of operation ``x`` is ``pallas_kernels/x.py``; its implementations are rows of ``registry.OPERATIONS["x"]``.
The tests run every case on every implementation that this machine can run, ``scripts/compile_check.py`` compiles the
benches for a GPU that need not be there, and ``scripts/gpu_check.py`` runs and measures both on one.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree


class Cost(NamedTuple):
    """The least that a call has to do: bytes moved between memory and chip, and floating-point operations."""

    num_bytes: int
    flops: int


class Tolerance(NamedTuple):
    """How far a row may be from its reference: ‖found - expected‖ <= share * max(‖expected‖, floor).

    Attributes:
        share: What rounding of the operands' dtype explains.
        floor: Norm below which a row counts as this large, so that rows of almost nothing are not held to nothing.
    """

    share: float
    floor: float


class Comparison(NamedTuple):
    """A result beside its reference.

    Attributes:
        worst: Largest error of a row as a multiple of what is allowed; infinite for a result that is not finite.
        place: Where that row is, such as ``attention[3, 1]``.
        num_rows: Rows compared.
        num_padding: Rows left out because nothing is said of them but that they are finite.
    """

    worst: float
    place: str
    num_rows: int
    num_padding: int

    @property
    def is_right(self) -> bool:
        """Return whether every row is within its tolerance."""
        return self.worst <= 1


@runtime_checkable
class Operation(Protocol):
    """An operation's file. Cases are hashable; every function of arrays below can be traced."""

    @property
    def CASES(self) -> Mapping[str, Any]:
        """Small and nasty shapes, checked everywhere: interpreters run them too."""
        ...

    @property
    def DEVICE_CASES(self) -> Mapping[str, Any]:
        """What is checked on a GPU: ``CASES``, and the same in the dtypes and sizes that take its production tiles."""
        ...

    @property
    def BENCHES(self) -> Mapping[str, Any]:
        """Shapes of real models as the engine calls the operation, for speed."""
        ...

    @property
    def IS_IN_PLACE(self) -> bool:
        """Return whether ``run`` gives back changed arguments, which it is to take over."""
        ...

    def make_inputs(self, case: Any, key: jax.Array) -> PyTree[Array]:
        """Random inputs of a case, in a form that all implementations share."""
        ...

    def prepare(self, implementation: Any, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """Return the inputs in the form that the implementation takes them: what is done once, not in each step."""
        ...

    def run(self, implementation: Any, case: Any, prepared: PyTree[Array]) -> PyTree[Array]:
        """Return the call to check or to measure."""
        ...

    def expected(self, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """What ``run`` has to give, in plain JAX and float32."""
        ...

    def compare(self, case: Any, inputs: PyTree[Array], found: PyTree[Array], expected: PyTree[Array]) -> Comparison:
        """Compare what ``run`` gave with ``expected``, row by row; rows of padding are left out."""
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


def add_twins(cases: Mapping[str, Any], twins: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cases, and each of them with some fields changed, without repeating one that is there already.

    Args:
        cases: Named tuples by name.
        twins: What to change, by the end of the twin's name.
    """
    found = dict(cases)
    for name, case in cases.items():
        for ending, changes in twins.items():
            twin = case._replace(**changes)
            if twin not in found.values():
                found[f"{name}_{ending}"] = twin
    return found


BFLOAT16_HEADS = {f"bf16_h{width}": {"dtype": "bfloat16", "head_dim": width} for width in (64, 128, 256)}
"""The dtype and the head sizes that attention kernels have their production tiles for."""


def input_shapes(op: Operation, case: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """What ``make_inputs`` gives, without its numbers: benches are larger than many machines."""
    return jax.eval_shape(functools.partial(op.make_inputs, case), jax.random.key(0))


def prepared_shapes(op: Operation, implementation: Any, case: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """What ``run`` takes, without its numbers."""
    return jax.eval_shape(functools.partial(op.prepare, implementation, case), input_shapes(op, case))


def compare_rows(
    outputs: Sequence[str],
    found: PyTree[Array | np.ndarray],
    expected: PyTree[Array | np.ndarray],
    is_real: PyTree[Array | np.ndarray],
    tolerance: Tolerance,
) -> Comparison:
    """Compare arrays row by row, a row being their last axis.

    A tolerance on the whole array's largest value would let a kernel drop a tile of a long context: the error of that
    is spread over all of a row and no larger than a few percent of the largest value anywhere.

    Args:
        outputs: Name of each array.
        found: What a kernel gave; all of it must be finite.
        expected: The same in float32.
        is_real: For each array, which of its rows count: [...] for an array [..., F]. The others are padding.
        tolerance: What a row may be off by.
    """
    worst, place, num_rows, num_padding = 0.0, "", 0, 0
    leaves = (jax.tree.leaves(tree) for tree in (found, expected, is_real))
    for name, got, wanted, real in zip(outputs, *leaves, strict=True):
        if got.shape != wanted.shape:
            return Comparison(float("inf"), f"{name}: shape {got.shape} in place of {wanted.shape}", 0, 0)
        error, size, is_finite = (np.asarray(part) for part in _row_norms(got, wanted))
        real = np.broadcast_to(np.asarray(real), error.shape)
        excess = np.where(real, error / (tolerance.share * np.maximum(size, tolerance.floor)), 0.0)
        excess = np.where(is_finite & ~np.isnan(excess), excess, np.inf)
        num_rows, num_padding = num_rows + int(real.sum()), num_padding + int((~real).sum())
        if excess.size and excess.max() > worst:
            index = np.unravel_index(int(excess.argmax()), excess.shape)
            worst, place = float(excess.max()), f"{name}[{', '.join(map(str, index))}]"
    return Comparison(worst, place, num_rows, num_padding)


@functools.partial(jax.jit, static_argnums=1)
def in_pieces(rows: Float[Array | np.ndarray, "T F"], width: int) -> Float[Array, "T pieces width"]:
    """Cut rows into pieces, the last filled up with zeros: a wrong tile is not lost in the norm of a wide row."""
    num_pieces = -(-rows.shape[1] // width)
    padded = jnp.pad(rows, ((0, 0), (0, num_pieces * width - rows.shape[1])))
    return padded.reshape(rows.shape[0], num_pieces, width)


@jax.jit
def _row_norms(
    found: Float[Array | np.ndarray, "... F"], expected: Float[Array | np.ndarray, "... F"]
) -> tuple[Float[Array, "..."], Float[Array, "..."], Bool[Array, "..."]]:
    """Norms of each row's difference and of the row itself, and whether the row is finite."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    difference, size = (jnp.sqrt(jnp.square(x).sum(-1)) for x in (found - expected, expected))
    return difference, size, jnp.isfinite(found).all(-1)
