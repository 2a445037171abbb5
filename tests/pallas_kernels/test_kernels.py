"""Every implementation of every operation: right answers where this machine runs it, CUDA's front end anywhere."""

import functools
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.operation import Operation, Tolerance, compare_rows, input_shapes, prepared_shapes
from pallas_kernels.registry import OPERATIONS, UnsupportedKernelError, choose, load, operation, select
from tests.compiled import compiled

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


def compared(found, is_real=(True, True, True)):
    expected = jnp.array([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    return compare_rows(("out",), found, expected, np.array(is_real), Tolerance(0.01, floor=0.1))


def test_errors_are_shares_of_each_row():
    """A row of 5 may be off by 0.05, one of 0 by a hundredth of the floor, whatever others there are."""
    exact = jnp.array([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    assert compared(exact) == (0.0, "", 3, 0)
    found = compared(exact.at[0, 0].add(0.04).at[2, 1].add(0.1))
    assert found.worst == pytest.approx(0.8, rel=1e-3) and found.place == "out[0]" and found.is_right
    found = compared(exact.at[1, 1].add(0.002))
    assert found.worst == pytest.approx(2, rel=1e-3) and found.place == "out[1]" and not found.is_right


def test_padding_may_hold_anything_finite():
    exact = jnp.array([[3.0, 4.0], [7.0, 0.0], [30.0, 40.0]])
    assert not compared(exact).is_right
    assert compared(exact, (True, False, True)) == (0.0, "", 2, 1)
    assert compared(exact.at[1, 0].set(jnp.nan), (True, False, True)).worst == float("inf")
    assert compared(exact.at[2, 0].set(jnp.inf), (True, False, True)).place == "out[2]"


def test_a_result_of_another_shape_is_wrong():
    found = compared(jnp.zeros((3, 1)))
    assert not found.is_right and "shape (3, 1) instead of (3, 2)" in found.place


@pytest.mark.parametrize("name", ["int4_matmul", "grouped_matmul"])
def test_one_wrong_column_of_a_wide_row_is_seen(name):
    """Of 8192 columns one is zeroed: 1.1 % of the row, but 9 % of its piece."""
    op = operation(name)
    case = op.DEVICE_CASES["wide_rows_2" if name == "int4_matmul" else "wide_9"]
    inputs = compiled(op.make_inputs, case)(jax.random.key(3))
    expected = compiled(op.expected, case)(inputs)
    assert op.compare(case, inputs, expected.astype(case.dtype), expected).is_right
    column = int(jnp.argmax(jnp.abs(expected[0])))
    found = op.compare(case, inputs, expected.at[0, column].set(0), expected)
    assert found.worst > 3 and found.place == f"product[0, {column // 128}]"


@pytest.mark.parametrize("name", OPERATIONS)
def test_device_cases_hold_all_others(name):
    op = operation(name)
    assert op.CASES.items() <= op.DEVICE_CASES.items()
    assert len(set(op.DEVICE_CASES.values())) == len(op.DEVICE_CASES)


def test_attention_has_a_twin_for_each_production_tile():
    op = operation("paged_attention")
    for case in op.CASES.values():
        for head_dim in (64, 128, 256):
            assert case._replace(head_dim=head_dim, dtype="bfloat16") in op.DEVICE_CASES.values()


@functools.cache
def inputs_and_expected(name: str, case_name: str):
    """The inputs of a case and the reference's result, which all implementations share."""
    op = operation(name)
    case = op.CASES[case_name]
    inputs = compiled(op.make_inputs, case)(jax.random.key(zlib.crc32(case_name.encode())))
    return inputs, compiled(op.expected, case)(inputs)


@pytest.mark.parametrize("name, row, case_name", CASES)
def test_matches_reference(name, row, case_name):
    op = operation(name)
    case = op.CASES[case_name]
    op, implementation = runnable(name, row, case, jax.default_backend(), jax.devices()[0].device_kind)
    inputs, expected = inputs_and_expected(name, case_name)
    prepared = compiled(op.prepare, implementation, case)(inputs)
    found = compiled(op.run, implementation, case)(prepared)
    comparison = op.compare(case, inputs, found, expected)
    assert comparison.is_right, comparison


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
    reasons = "fast: no gpu today; slow: no gpu today"
    message = rf"^no implementation of paged_attention for float32, page_size=7 on H200 \(gpu\): {reasons}$"
    with pytest.raises(UnsupportedKernelError, match=message):
        select("paged_attention", **where)
    monkeypatch.setitem(OPERATIONS, "paged_attention", dict.fromkeys(rows, ""))
    found = choose("paged_attention", **where)
    assert found.implementation is rows["plain"] and found.name == "plain"
    assert found.why == "the first that can run; not fast: no gpu today; not slow: no gpu today"
    assert choose("paged_attention", name="plain", **where).why == "requested"


def refuse(name, platform, device_kind, dtype, **sizes):
    return f"no {platform} today"


def test_abstract_arrays_of_a_bench_hold_no_memory():
    """Shapes alone: benches are larger than this machine."""
    op = operation("paged_attention")
    case = next(iter(op.BENCHES.values()))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(input_shapes(op, case)))
    assert jnp.dtype(op.dtype(case)).itemsize == 2
