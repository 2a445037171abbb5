"""Every implementation of every operation: right answers where this machine runs it, CUDA's front end anywhere."""

import functools
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import registry
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.operation import Operation, input_shapes, largest_error, prepared_shapes
from pallas_kernels.registry import OPERATIONS, UnsupportedKernelError, choose, load, operation, select

ROWS = [(name, row) for name, table in OPERATIONS.items() for row in table]
CASES = [(name, row, case) for name, row in ROWS for case in operation(name).CASES]
BENCHES = [(name, row, bench) for name, row in ROWS if "interpret" not in row for bench in operation(name).BENCHES]


def runnable(name: str, row: str, case, platform: str, device_kind: str):
    """The implementation, or a skipped test with its reason."""
    op = operation(name)
    implementation = load(name, row)
    reason = implementation.unsupported(platform, device_kind, op.dtype(case), **op.sizes(case))
    if reason is not None:
        pytest.skip(reason)
    return op, implementation


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_offer_all_that_checks_need(name):
    assert isinstance(operation(name), Operation)
    assert operation(name).CASES and operation(name).BENCHES


def test_errors_are_shares_of_the_largest_value():
    expected = (jnp.array([2.0, jnp.nan, -4.0]), jnp.zeros(2))
    assert largest_error((jnp.array([2.0, 9.0, -3.0]), jnp.zeros(2)), expected) == 0.25
    assert largest_error((jnp.array([2.0, jnp.nan, -4.0]), jnp.zeros(2)), expected) == float("inf")
    assert largest_error((jnp.zeros(2), jnp.zeros(2)), expected) == float("inf")


@pytest.mark.parametrize("name, row, case_name", CASES)
def test_matches_reference(name, row, case_name):
    op = operation(name)
    case = op.CASES[case_name]
    op, implementation = runnable(name, row, case, jax.default_backend(), jax.devices()[0].device_kind)
    inputs = op.make_inputs(case, jax.random.key(zlib.crc32(case_name.encode())))
    prepared = op.prepare(implementation, case, inputs)
    found = jax.jit(functools.partial(op.run, implementation, case))(prepared)
    assert largest_error(found, op.expected(case, inputs)) <= op.tolerance(case)


@pytest.mark.parametrize("name, row, bench_name", BENCHES)
def test_lowers_for_an_h200(name, row, bench_name):
    case = operation(name).BENCHES[bench_name]
    op, implementation = runnable(name, row, case, "gpu", "NVIDIA H200")
    prepared = prepared_shapes(op, implementation, case)
    assert "stablehlo" in lower_for_cuda(functools.partial(op.run, implementation, case), prepared)


def test_select_refuses_unknown_names():
    with pytest.raises(ValueError, match="unknown operation 'convolution'; operations: .*paged_attention"):
        select("convolution", platform="cpu", device_kind="cpu", dtype="float32")
    with pytest.raises(ValueError, match="unknown implementation 'fast' of paged_attention; implementations: "):
        select("paged_attention", platform="cpu", device_kind="cpu", dtype="float32", name="fast")


def test_select_gives_all_reasons(monkeypatch):
    """In order, and why those before the one it took could not."""
    rows = {name: SimpleNamespace(unsupported=functools.partial(refuse, name)) for name in ("fast", "slow")}
    rows["plain"] = SimpleNamespace(unsupported=lambda *device, **sizes: None)
    monkeypatch.setattr(registry, "load", lambda operation, name: rows[name])
    monkeypatch.setitem(OPERATIONS, "paged_attention", dict.fromkeys(["fast", "slow"], ""))
    where = {"platform": "gpu", "device_kind": "H200", "dtype": "float32", "page_size": 7}
    message = r"^no paged_attention for float32, page_size=7 on H200 \(gpu\): fast: no gpu today; slow: no gpu today$"
    with pytest.raises(UnsupportedKernelError, match=message):
        select("paged_attention", **where)
    monkeypatch.setitem(OPERATIONS, "paged_attention", dict.fromkeys(rows, ""))
    found = choose("paged_attention", **where)
    assert found.implementation is rows["plain"] and found.name == "plain"
    assert found.why == "the first that can run; not fast: no gpu today; not slow: no gpu today"
    assert choose("paged_attention", name="plain", **where).why == "asked for"


def refuse(name, platform, device_kind, dtype, **sizes):
    return f"no {platform} today"


def test_abstract_arrays_of_a_bench_hold_no_memory():
    """Shapes alone: benches are larger than this machine."""
    op = operation("paged_attention")
    case = next(iter(op.BENCHES.values()))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(input_shapes(op, case)))
    assert jnp.dtype(op.dtype(case)).itemsize == 2
