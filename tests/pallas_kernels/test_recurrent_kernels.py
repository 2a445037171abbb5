"""Updates of recurrent layers: results do not depend on how a context is cut, the batch, threads or instructions.

Native kernels give the same bits; XLA compiles a program for each shape, whose roundings may differ.
"""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_net, mamba2, native_library, recurrent_native, short_convolution
from pallas_kernels.recurrent_states import Row, StateRows, States, copy_states
from pallas_kernels.registry import load
from tests.compiled import compiled

REPOSITORY = Path(__file__).parents[2]
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
LENGTH = 100
ROWS = (Row(LENGTH, is_new=True, snapshots=(5, 77)), Row(3), Row(1))
CASES: dict[str, Any] = {
    "delta_net": delta_net.Case(ROWS, key_dim=20, value_dim=48),
    "key_decays": delta_net.Case(ROWS, key_dim=21, value_dim=48, has_key_decays=True),
    "mamba2": mamba2.Case(ROWS, head_dim=24, state_dim=20, norm_groups=1),
    "short_convolution": short_convolution.Case(ROWS, num_channels=200),
}
OPERATIONS: dict[str, Any] = {"delta_net": delta_net, "mamba2": mamba2, "short_convolution": short_convolution}
OPERATION_OF = {name: "delta_net" if name == "key_decays" else name for name in CASES}
ROWS_OF = {"native": needs_native, "xla": ()}
IMPLEMENTATIONS = [
    pytest.param(
        name, row, marks=pytest.mark.slow if (name, row) == ("key_decays", "xla") else marks, id=f"{name}-{row}"
    )
    for name in CASES
    for row, marks in ROWS_OF.items()
]


@pytest.fixture
def threads():
    """Sets the number of threads, and the default again afterwards."""
    yield native_library.set_threads
    native_library.set_threads(None)


def prepared_inputs(name: str, row: str) -> Any:
    """The prepared inputs of the operation's case."""
    op, case = OPERATIONS[OPERATION_OF[name]], CASES[name]
    inputs = compiled(op.make_inputs, case)(jax.random.key(5))
    return compiled(op.prepare, load(OPERATION_OF[name], row), case)(inputs)


def arrays_of(prepared: Any) -> tuple[jax.Array, ...]:
    """The arrays of state pages."""
    return (prepared.tail,) if isinstance(prepared, short_convolution.Inputs) else tuple(prepared.states)


def with_arrays(prepared: Any, arrays: tuple[jax.Array, ...]) -> Any:
    return prepared._replace(states=States(*arrays)) if len(arrays) == 2 else prepared._replace(tail=arrays[0])


def update(name: str, row: str, prepared: Any) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
    """Results [T, ...] of a call and its arrays of state pages, in the layout of the implementation."""
    y, arrays = compiled(call, name, row)(prepared)
    return np.asarray(y), arrays


def call(name: str, row: str, prepared: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    case, implementation = CASES[name], load(OPERATION_OF[name], row)
    if name == "short_convolution":
        y, tail = implementation.update(*prepared)
        return y, (tail,)
    if OPERATION_OF[name] == "delta_net":
        y, states = implementation.update(*prepared, sizes=case.heads, eps=1e-6)
    else:
        norm = mamba2.GroupNorm(prepared.norm_weight, 1e-5, case.norm_groups)
        y, states = implementation.update(*prepared[:4], sizes=case.heads, limits=case.limits, norm=norm)
    return y, tuple(states)


def rows_of(*rows: tuple[int, int, bool], snapshots: tuple[tuple[int, int], ...] = ()) -> StateRows:
    """Rows of (length, page, is_new); the first has snapshots of (length, page)."""
    lens = np.array([length for length, _, _ in rows])
    return StateRows(
        starts=jnp.asarray(np.cumsum(lens) - lens, jnp.int32),
        lens=jnp.asarray(lens, jnp.int32),
        are_new=jnp.asarray([is_new for _, _, is_new in rows]),
        pages=jnp.asarray([page for _, page, _ in rows], jnp.int32),
        snapshot_tokens=jnp.asarray([length - 1 for length, _ in snapshots], jnp.int32),
        snapshot_pages=jnp.asarray([page for _, page in snapshots], jnp.int32),
    )


def in_chunks(name: str, row: str, sizes: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Results of the first sequence computed in chunks of the sizes, repeated, and the page's arrays at its end."""
    prepared = prepared_inputs(name, row)
    tokens, arrays, results, done = prepared.projected[:LENGTH], arrays_of(prepared), [], 0
    while done < LENGTH:
        size = min(sizes[len(results) % len(sizes)], LENGTH - done)
        step = with_arrays(prepared, arrays)._replace(
            projected=tokens[done : done + size], rows=rows_of((size, 2, done == 0))
        )
        y, arrays = update(name, row, step)
        results.append(y)
        done += size
    return np.concatenate(results), [np.asarray(array[2]) for array in arrays]


def assert_same(found: Any, wanted: Any, row: str = "native") -> None:
    """Compare bits, of XLA's programs numbers."""
    for one, other in zip(found, wanted, strict=True):
        if row == "xla":
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name, row", IMPLEMENTATIONS)
def test_results_do_not_depend_on_chunks_or_the_batch(name, row):
    whole, pages = in_chunks(name, row, [LENGTH])
    for sizes in ([7], [64], [3, 1, 50, 1], [33, 32]):
        found, found_pages = in_chunks(name, row, sizes)
        assert_same([found, *found_pages], [whole, *pages], row)
    prepared = prepared_inputs(name, row)
    y, arrays = update(name, row, prepared)
    page = prepared.rows.pages[0]
    assert_same([y[:LENGTH], *(np.asarray(array[page]) for array in arrays)], [whole, *pages], row)


@pytest.mark.parametrize("name, row", IMPLEMENTATIONS)
def test_a_snapshot_is_the_state_of_a_shorter_prompt(name, row):
    prepared = prepared_inputs(name, row)
    tokens = prepared.projected[:LENGTH]
    plain, _ = update(name, row, prepared._replace(projected=tokens, rows=rows_of((LENGTH, 3, True))))
    for lengths in ((1, 77), (2, 31), (32, 33), (31, LENGTH)):
        snapshots = ((lengths[0], 1), (lengths[1], 5))
        rows = rows_of((LENGTH, 3, True), snapshots=snapshots)
        y, arrays = update(name, row, prepared._replace(projected=tokens, rows=rows))
        assert_same([y], [plain], row)
        for length, page in snapshots:
            shorter = prepared._replace(projected=tokens[:length], rows=rows_of((length, 3, True)))
            _, wanted = update(name, row, shorter)
            assert_same([np.asarray(array[page]) for array in arrays], [np.asarray(array[3]) for array in wanted], row)
        untouched = [page for page in range(len(arrays[0])) if page not in (1, 3, 5)]
        for array, before in zip(arrays, arrays_of(prepared), strict=True):
            np.testing.assert_array_equal(array[np.array(untouched)], before[np.array(untouched)])


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_threads(threads, name):
    prepared = prepared_inputs(name, "native")
    found = {}
    for count in (1, 2, 5):
        threads(count)
        y, arrays = update(name, "native", prepared)
        found[count] = [y, *map(np.asarray, arrays)]
    assert_same(found[2], found[1])
    assert_same(found[5], found[1])


CHILD = textwrap.dedent("""
    import json, sys
    from tests.pallas_kernels import test_recurrent_kernels as tests
    print(json.dumps([tests.native_library.instructions(), tests.digests()]))
""")


def digests() -> dict[str, str]:
    """A digest of each operation's results and states."""
    found = {}
    for name in CASES:
        y, arrays = update(name, "native", prepared_inputs(name, "native"))
        used = y[: sum(row.length for row in ROWS)]
        found[name] = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in (used, *arrays))).hexdigest()
    return found


@needs_native
def test_bits_do_not_depend_on_instructions():
    if native_library.instructions() == "avx2":
        pytest.skip("the CPU has no newer instructions than AVX2")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "JAXSERVE_MAX_CPU_ISA": "avx2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    instructions, found = json.loads(done.stdout.splitlines()[-1])
    assert instructions == "avx2" and found == digests()


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_states_are_updated_in_place(name):
    prepared = prepared_inputs(name, "native")
    arrays = arrays_of(prepared)

    def step(arrays: Any, prepared: Any) -> Any:
        return call(name, "native", with_arrays(prepared, arrays))

    analysis = jax.jit(step, donate_argnums=0).lower(arrays, prepared).compile().memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == sum(array.nbytes for array in arrays)
    assert analysis.temp_size_in_bytes < 1 << 14


@needs_native
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "change",
    [
        {"lens": jnp.array([LENGTH, 3, 50], jnp.int32)},
        {"lens": jnp.array([-1, 3, 1], jnp.int32)},
        {"starts": jnp.array([0, 1, 103], jnp.int32)},
        {"pages": jnp.array([2, 100, 3], jnp.int32)},
        {"snapshot_pages": jnp.array([-2, 0], jnp.int32)},
        {"snapshot_pages": jnp.array([0, 100], jnp.int32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rows_outside_of_the_arrays_are_errors(name, change):
    """Not the end of the process."""
    prepared = prepared_inputs(name, "native")
    rows = prepared.rows._asdict()
    first = {field: value[: 2 if "snapshot" in field else 3] for field, value in rows.items()}
    rows = StateRows(**(first | change))
    with pytest.raises(Exception, match=f"jaxserve_{OPERATION_OF[name]}: rows name tokens or pages that do not exist"):
        update(name, "native", prepared._replace(rows=rows))


@needs_native
def test_operands_that_do_not_go_together_are_errors():
    for name in CASES:
        prepared = prepared_inputs(name, "native")
        arrays = arrays_of(prepared)
        for other in (
            prepared._replace(projected=prepared.projected[:, 1:]),
            with_arrays(prepared, (arrays[0][:, :1], *arrays[1:])),
            with_arrays(prepared, (arrays[0][:1], *arrays[1:])) if len(arrays) == 2 else None,
        ):
            if other is not None:
                with pytest.raises(
                    Exception, match=f"jaxserve_{OPERATION_OF[name]}: shapes or dtypes do not go together"
                ):
                    update(name, "native", other)


@pytest.mark.parametrize(
    "dtype, sizes, reason",
    [
        ("bfloat16", {}, "projections and tails must be float32, not bfloat16"),
        ("float32", {"taps": 5}, "a convolution must have 2 to 4 taps, not 5"),
        ("float32", {"taps": 1}, "a convolution must have 2 to 4 taps, not 1"),
    ],
)
def test_says_what_it_cannot_do(dtype, sizes, reason):
    assert recurrent_native.unsupported("cpu", "cpu", dtype, **sizes) == reason
    assert recurrent_native.unsupported("gpu", "NVIDIA H200", dtype) == "native kernels run on CPUs"


@pytest.mark.parametrize("row", [pytest.param("native", marks=needs_native), "xla"])
def test_copies_of_pages(row):
    """A page may be a source and a target; a target that is no page takes nothing."""
    copy = copy_states if row == "xla" else recurrent_native.copy_states
    arrays = jnp.arange(5 * 6.0).reshape(5, 2, 3), jnp.arange(5.0).reshape(5, 1) + 100
    found = jax.jit(copy)(arrays, jnp.array([0, 1, 4], jnp.int32), jnp.array([1, 3, 5], jnp.int32))
    for new, old in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(new, old[np.array([0, 0, 2, 1, 4])])


@pytest.mark.parametrize("shape", [(3, 2, 5, 16), (2, 1, 4, 20), (1, 3, 7, 3)])
def test_layouts_of_states(shape):
    state = jax.random.normal(jax.random.key(0), shape)
    stored = recurrent_native.to_layout(state)
    assert stored.shape == (shape[0], *recurrent_native.state_shape(*shape[1:]))
    np.testing.assert_array_equal(recurrent_native.from_layout(stored, shape[3]), state)
