"""Measure every implementation of every operation on its benches, as a share of what the ceilings allow.

Each bench compares its result with the operation's reference before it is timed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.registry import load, operation
from scripts.gpu.compiling import compile_all, compiled_without_autotuning, succeeded
from scripts.gpu.driver import is_device_lost
from scripts.gpu.figures import Figure
from scripts.gpu.parts import AS_NEEDED, AUTOTUNE_OFF, Context, Item, Program, SkippedError, Working
from scripts.gpu.rows import H200, rows
from scripts.gpu.timing import GRAPH_OPTIONS, MIN_SETS, Rotation, choose_sets, matching_leaves, tree_bytes
from scripts.gpu.wrong_results import failure_note, require_right

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
GOALS = {
    "paged_attention": "decode on >= 256 MB of keys and values: 80 % of copy bandwidth, then 92 %; prefill: 450 "
    "TFLOP/s, then 600",
    "latent_attention": "decode of 16 heads: 70 % of copy bandwidth, then 85 %; of 128 heads: 55 % of the matrix rate, "
    "then 70 %",
    "int4_matmul": "70 % of copy bandwidth on packed bytes, then 85 %",
    "grouped_matmul": "prefill: 70 % of the matrix rate, then 80 %",
}
_MOST_QUICK = 4
_BENCH_S = 4.0
_TOGETHER = 12  # benches that are compiled before the first of them is timed: compiling tries kernels on the device
_SEEDS = (jax.ShapeDtypeStruct((), np.uint32),) * 2


class Bench(NamedTuple):
    """A bench of an implementation, ready to be compiled; without a rotation there is only the reason."""

    name: str
    case: Any
    rotation: Rotation | None
    reason: str = ""


def items(context: Context) -> list[Item]:
    """List the implementations of each operation, paged attention first, those in plain XLA last."""
    return [Item(f"{name}/{row}", 5.0 + 1.5 * len(_names(name, context))) for name, row in rows(context.is_tiny)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Compile some benches of an implementation side by side, then measure one after the other, and so on."""
    context.refuse_untimed(item)
    name, row = item.split("/")
    device = jax.devices()[0]
    found = [make_bench(name, load(name, row), each, device) for each in _names(name, context)]
    if context.is_tiny:
        found = [_with_sets(bench, MIN_SETS) for bench in found]
    if all(bench.rotation is None for bench in found):
        raise SkippedError("; ".join(dict.fromkeys(bench.reason for bench in found)) or "no bench")
    for start in range(0, len(found), _TOGETHER):
        yield from measure_all("kernels", name, row, load(name, row), found[start : start + _TOGETHER], context)


def measure_all(
    part: str, name: str, row: str, implementation: Any, benches: list[Bench], context: Context
) -> Iterator[Figure | Working]:
    """Compile benches side by side, then compare and time one after the other.

    Raises:
        SkippedError: The time limit was reached.
        Exception: A bench cost the process its device.
    """
    ready = {bench.name: bench for bench in benches if bench.rotation is not None}
    compiled = yield from compile_all(
        {each: functools.partial(_compiled, name, implementation, bench) for each, bench in ready.items()}
    )
    for bench in benches:
        label = f"{name} {bench.name} {row}"
        if bench.rotation is None:
            yield Figure(part=part, name=label, value=None, note=bench.reason)
            continue
        if context.left_s() < _BENCH_S:
            raise SkippedError(f"the time limit was reached at {bench.name}")
        yield Working(f"timing {label}")
        try:
            yield _measured(part, label, name, bench, succeeded(compiled[bench.name]), context)
        except Exception as error:
            yield Figure(part=part, name=label, value="fail", note=failure_note(error))
            if is_device_lost(error):
                raise


def programs(context: Context) -> Iterator[Program]:
    """List every rotation, what makes its inputs, and the reference of each bench."""
    seen = set()
    for name, row in rows(is_tiny=False):
        for bench_name in _names(name, context):
            # Two sets of a program that is only compiled: further ones would be the same.
            bench = _with_sets(make_bench(name, load(name, row), bench_name, None), 2)
            if bench.rotation is None:
                continue
            label = f"{name} {bench_name} {row}"
            yield Program(label, bench.rotation.program, bench.rotation.arguments, (0,), options=GRAPH_OPTIONS)
            make, inputs = _inputs(name, bench.case)
            prepare = _preparation(name, load(name, row), bench.case)
            yield Program(f"{label}: prepare", prepare, (inputs,), options=AUTOTUNE_OFF)
            if (name, bench_name) not in seen:
                seen.add((name, bench_name))
                yield Program(f"{name} {bench_name}: inputs", make, _SEEDS, options=AUTOTUNE_OFF)
                reference = functools.partial(operation(name).expected, bench.case)
                yield Program(f"{name} {bench_name}: reference", reference, (inputs,), options=AUTOTUNE_OFF)


def _names(name: str, context: Context) -> list[str]:
    op = operation(name)
    if context.is_tiny:
        return list(op.CASES)[:2]
    names = list(op.BENCHES)
    return names[:: max(1, len(names) // _MOST_QUICK)] if context.is_quick else names


def make_bench(
    name: str,
    implementation: Any,
    bench_name: str,
    device: Any,
    suited: Callable[[Any], Any] = lambda case: case,
) -> Bench:
    """Make the rotation of a bench from shapes alone.

    Args:
        name: Operation.
        implementation: One of its implementations.
        bench_name: One of its benches, or of its cases.
        device: What it is to run on; None for an H200 that need not be there.
        suited: Changes the case to what the implementation takes.
    """
    op = operation(name)
    case = suited(op.BENCHES[bench_name] if bench_name in op.BENCHES else op.CASES[bench_name])
    where = H200 if device is None else (device.platform, device.device_kind)
    reason = implementation.unsupported(*where, op.dtype(case), **op.sizes(case))
    if reason is not None:
        return Bench(bench_name, case, None, reason)
    call = jax.jit(functools.partial(op.run, implementation, case))  # traced once for all sets
    struct = jax.eval_shape(_preparation(name, implementation, case), _inputs(name, case)[1])
    output = jax.eval_shape(call, struct)
    carried = matching_leaves(struct, output) if op.IS_IN_PLACE else {}
    touched, held = op.cost(case).num_bytes, tree_bytes(struct) + (0 if carried else tree_bytes(output))
    num_sets = choose_sets(touched, held)
    if num_sets is None:
        return Bench(bench_name, case, None, f"three sets of {held / 1e9:.0f} GB do not fit")
    return Bench(bench_name, case, Rotation(call, struct, num_sets, carried))


def _with_sets(bench: Bench, num_sets: int) -> Bench:
    """Return the same bench with another number of sets."""
    if bench.rotation is None:
        return bench
    return bench._replace(rotation=dataclasses.replace(bench.rotation, num_sets=num_sets))


def _inputs(name: str, case: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return what makes the inputs of a set from the run's seed and the set's number, and their shapes."""

    def make(seed: jax.Array, i: jax.Array) -> Any:
        return operation(name).make_inputs(case, jax.random.fold_in(jax.random.key(seed), i))

    return make, jax.eval_shape(make, *_SEEDS)


def _preparation(name: str, implementation: Any, case: Any) -> Callable[[Any], Any]:
    """Return what an implementation makes of the inputs: a program of its own, to which they are no constants."""
    return functools.partial(operation(name).prepare, implementation, case)


class _Compiled(NamedTuple):
    """The programs of a bench: the calls, what makes inputs, what prepares them, and the reference."""

    calls: Any
    make_inputs: Any
    prepare: Any
    expected: Any


def _compiled(name: str, implementation: Any, bench: Bench) -> _Compiled:
    assert bench.rotation is not None
    inputs = _inputs(name, bench.case)[1]
    prepare = compiled_without_autotuning(_preparation(name, implementation, bench.case), inputs)
    make_inputs, expected = _shared_programs(name, bench.case)
    return _Compiled(bench.rotation.compile(), make_inputs, prepare, expected)


@functools.cache
def _shared_programs(name: str, case: Any) -> tuple[Any, Any]:
    """Compile what makes a bench's inputs, and its reference: the same for all implementations."""
    make, inputs = _inputs(name, case)
    expected = functools.partial(operation(name).expected, case)
    return compiled_without_autotuning(make, *_SEEDS), compiled_without_autotuning(expected, inputs)


def _measured(part: str, label: str, name: str, bench: Bench, compiled: _Compiled, context: Context) -> Figure:
    """Compare and time a bench.

    Raises:
        WrongResultError: Its result is not the reference's.
    """
    assert bench.rotation is not None
    op = operation(name)
    seed = np.uint32(context.seed % 2**32)
    worst = 0.0

    def make(i: int) -> Any:
        return compiled.prepare(compiled.make_inputs(seed, np.uint32(i)))

    def check(found: Any) -> None:
        nonlocal worst
        inputs = compiled.make_inputs(seed, np.uint32(0))
        comparison = op.compare(bench.case, inputs, found, compiled.expected(inputs))
        worst = comparison.worst
        require_right(comparison, f", seed {seed}")

    timing = bench.rotation.measure(compiled.calls, make, check)
    cost = op.cost(bench.case)
    note = f"{cost.num_bytes / timing.seconds / 1e9:.0f} GB/s, {cost.flops / timing.seconds / 1e12:.1f} TFLOP/s"
    note += f"; {timing.num_sets} sets of {cost.num_bytes / 1e6:.0f} MB in turn, repeats within {timing.spread:.1%}"
    note += f"; result compared: worst row {worst:.2g} of what is allowed"
    if timing.num_sets * cost.num_bytes < 50 << 20:
        note += "; all of it fits into the L2 cache"
    best = context.least_s(cost.num_bytes, cost.flops)
    return Figure.timed(
        part, label, timing.seconds, best, note=note, goal=GOALS.get(name, "") if part == "kernels" else ""
    )
