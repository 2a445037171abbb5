"""The functions of an operation's file, which checks, compilations and benchmarks use.

The file of operation ``x`` is ``pallas_kernels/x.py``; its implementations are rows of ``registry.OPERATIONS["x"]``.
The tests run every case on every implementation that this machine can run, ``scripts/compile_check.py`` compiles the
benches for a GPU that need not be there, and ``scripts/gpu_check.py`` runs and measures both on one.
"""

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree


class Cost(NamedTuple):
    """Minimal work of a call: bytes moved between memory and chip, and floating-point operations."""

    num_bytes: int
    flops: int


class Tolerance(NamedTuple):
    """How far a row may be from its reference: ‖found - expected‖ <= share * max(‖expected‖, floor).

    Attributes:
        share: Relative error that rounding of the operands' dtype explains.
        floor: Smallest norm used for a row, so that near-zero rows are not compared too strictly.
    """

    share: float
    floor: float


class Comparison(NamedTuple):
    """A result beside its reference.

    Attributes:
        worst: Largest error of a row as a multiple of what is allowed; infinite for a result that is not finite.
        place: Position of that row, such as ``attention[3, 1]``.
        num_rows: Rows compared.
        num_padding: Rows not compared because their values are undefined; they must be finite.
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
        """Small edge cases, checked everywhere, also by interpreters."""
        ...

    @property
    def DEVICE_CASES(self) -> Mapping[str, Any]:
        """Cases checked on a GPU: ``CASES``, and the same in the dtypes and sizes that take its production tiles."""
        ...

    @property
    def BENCHES(self) -> Mapping[str, Any]:
        """Shapes of real models as the engine calls the operation, for speed."""
        ...

    @property
    def IS_IN_PLACE(self) -> bool:
        """Return whether ``run`` returns modified arguments, whose buffers should be donated."""
        ...

    def make_inputs(self, case: Any, key: jax.Array) -> PyTree[Array]:
        """Make random inputs of a case, in a form that all implementations share."""
        ...

    def prepare(self, implementation: Any, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """Convert the inputs to the implementation's form: work done once, not in each step."""
        ...

    def run(self, implementation: Any, case: Any, prepared: PyTree[Array]) -> PyTree[Array]:
        """Run the call to check or to measure."""
        ...

    def expected(self, case: Any, inputs: PyTree[Array]) -> PyTree[Array]:
        """Compute the expected result of ``run``, in plain JAX and float32."""
        ...

    def compare(self, case: Any, inputs: PyTree[Array], found: PyTree[Array], expected: PyTree[Array]) -> Comparison:
        """Compare the result of ``run`` with ``expected``, row by row; padding rows are ignored."""
        ...

    def cost(self, case: Any) -> Cost:
        """Return the minimal work of a case, for its roofline."""
        ...

    def sizes(self, case: Any) -> dict[str, int]:
        """Return the sizes passed to the implementations' ``unsupported``."""
        ...

    def dtype(self, case: Any) -> str:
        """Return the dtype of a case's operands, also passed to ``unsupported``."""
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
    """Return the shapes of ``make_inputs``: benches are larger than the memory of many machines."""
    return jax.eval_shape(functools.partial(op.make_inputs, case), jax.random.key(0))


def prepared_shapes(op: Operation, implementation: Any, case: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes of the arguments of ``run``."""
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
        found: Result of a kernel; all of it must be finite.
        expected: The expected result in float32.
        is_real: For each array, which of its rows count: [...] for an array [..., F]. The others are padding.
        tolerance: Allowed error of a row.
    """
    worst, place, num_rows, num_padding = 0.0, "", 0, 0
    leaves = (jax.tree.leaves(tree) for tree in (found, expected, is_real))
    for name, got, wanted, real in zip(outputs, *leaves, strict=True):
        if got.shape != wanted.shape:
            return Comparison(float("inf"), f"{name}: shape {got.shape} instead of {wanted.shape}", 0, 0)
        error, size, is_finite = _norms(got, wanted)
        real = np.broadcast_to(np.asarray(real), error.shape)
        excess = np.where(real, error / (tolerance.share * np.maximum(size, tolerance.floor)), 0.0)
        excess = np.where(is_finite & ~np.isnan(excess), excess, np.inf)
        num_rows, num_padding = num_rows + int(real.sum()), num_padding + int((~real).sum())
        if excess.size and excess.max() > worst:
            index = np.unravel_index(int(excess.argmax()), excess.shape)
            worst, place = float(excess.max()), f"{name}[{', '.join(map(str, index))}]"
    return Comparison(worst, place, num_rows, num_padding)


def in_pieces(rows: Float[Array | np.ndarray, "T F"], width: int) -> Float[Array | np.ndarray, "T pieces width"]:
    """Cut rows into pieces, the last filled up with zeros: a wrong tile is not lost in the norm of a wide row."""
    return _cut(np.asarray(rows), width, np) if _is_on_cpu() else _cut_on_device(rows, width)


def _is_on_cpu() -> bool:
    """Return whether NumPy compares arrays: XLA would compile a program for the shapes of each case."""
    return jax.default_backend() == "cpu"


def _cut(
    rows: Float[Array | np.ndarray, "T F"], width: int, numpy: ModuleType
) -> Float[Array | np.ndarray, "T pieces width"]:
    """Cut rows into pieces with NumPy or ``jax.numpy``."""
    num_pieces = -(-rows.shape[1] // width)
    padded = numpy.pad(rows, ((0, 0), (0, num_pieces * width - rows.shape[1])))
    return padded.reshape(rows.shape[0], num_pieces, width)


_cut_on_device = jax.jit(functools.partial(_cut, numpy=jnp), static_argnums=1)


def _row_norms(
    found: Float[Array | np.ndarray, "... F"], expected: Float[Array | np.ndarray, "... F"], numpy: ModuleType
) -> tuple[Float[Array | np.ndarray, "..."], Float[Array | np.ndarray, "..."], Bool[Array | np.ndarray, "..."]]:
    """Return norms of each row's difference and of the row itself, and whether the row is finite."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    difference, size = (numpy.asarray(numpy.sqrt(numpy.square(x).sum(-1))) for x in (found - expected, expected))
    return difference, size, numpy.asarray(numpy.isfinite(found).all(-1))


_row_norms_on_device = jax.jit(functools.partial(_row_norms, numpy=jnp))


def _norms(found: Array | np.ndarray, expected: Array | np.ndarray) -> list[np.ndarray]:
    """Return what ``_row_norms`` does, in memory of the host."""
    if not _is_on_cpu():
        return [np.asarray(part) for part in _row_norms_on_device(found, expected)]
    with np.errstate(all="ignore"):
        return [np.asarray(part) for part in _row_norms(np.asarray(found), np.asarray(expected), np)]
