"""Speed of every implementation of every operation on its benches, as a share of what the ceilings allow."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.registry import OPERATIONS, load, operation
from scripts.gpu.driver import CompilationError, first_line, is_device_lost
from scripts.gpu.figures import Figure
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError
from scripts.gpu.timing import GRAPH_OPTIONS, MIN_SETS, Rotation, choose_sets, matching_leaves, tree_bytes

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
H200 = ("gpu", "NVIDIA H200")
GOALS = {
    "paged_attention": "decode on >= 256 MB of keys and values: 80 % of copy bandwidth, then 92 %; prefill: 450 "
    "TFLOP/s, then 600",
    "int4_matmul": "70 % of copy bandwidth on packed bytes, then 85 %",
    "grouped_matmul": "prefill: 70 % of the matrix rate, then 80 %",
}
_MOST_QUICK = 4
_BENCH_S = 4.0
_SEEDS = (jax.ShapeDtypeStruct((), np.uint32),) * 2


class Bench(NamedTuple):
    """A bench of an implementation, ready to be compiled; without a rotation there is only the reason."""

    name: str
    case: Any
    rotation: Rotation | None
    reason: str = ""


def rows(platform: str) -> list[tuple[str, str]]:
    """Operation and implementation: on a GPU all that are no mere interpreters, elsewhere those that run fast."""
    names = [(name, row) for name, table in OPERATIONS.items() for row in table if not row.endswith("interpret")]
    return names if platform == "gpu" else [(name, row) for name, row in names if row.startswith("xla")]


def items(context: Context) -> list[Item]:
    """One for each implementation of each operation."""
    found = []
    for name, row in rows("cpu" if context.is_tiny else "gpu"):
        seconds = 5.0 + len(_names(name, context))
        found.append(Item(f"{name}/{row}", seconds, 60.0 + 6.0 * seconds))
    return sorted(found, key=lambda item: item.name.endswith("/xla"))


def run(item: str, context: Context) -> Iterator[Figure]:
    """Compiles all benches of an implementation side by side, then measures one after the other."""
    name, row = item.split("/")
    device = jax.devices()[0]
    found = [_bench(name, row, bench, (device.platform, device.device_kind)) for bench in _names(name, context)]
    if context.is_tiny:
        found = [_with_sets(bench, MIN_SETS) for bench in found]
    ready = [bench for bench in found if bench.rotation is not None]
    if not ready:
        raise SkippedError("; ".join(dict.fromkeys(bench.reason for bench in found)) or "no bench")
    # All are compiled before the first is measured: compiling tries kernels on the device.
    compiled = compile_all({bench.name: functools.partial(_compiled, name, row, bench) for bench in ready})
    for bench in found:
        label = f"{name} {bench.name} {row}"
        if bench.rotation is None:
            yield Figure(part="kernels", name=label, value=None, note=bench.reason)
            continue
        if context.left_s() < _BENCH_S:
            raise SkippedError(f"the time was up at {bench.name}")
        try:
            yield _measured(name, row, bench, succeeded(compiled[bench.name]), context)
        except Exception as error:
            yield Figure(part="kernels", name=label, value="fail", note=f"{type(error).__name__}: {first_line(error)}")
            if is_device_lost(error):
                raise


def programs(context: Context) -> Iterator[Program]:
    """Every rotation, and what makes its inputs."""
    for name, row in rows("gpu"):
        for bench_name in _names(name, context):
            # Two sets of a program that is only compiled: further ones would be the same.
            bench = _with_sets(_bench(name, row, bench_name, H200), 2)
            if bench.rotation is None:
                continue
            label = f"{name} {bench_name} {row}"
            yield Program(label, bench.rotation.program, bench.rotation.arguments, (0,), options=GRAPH_OPTIONS)
            make, inputs = _inputs(name, bench.case)
            yield Program(f"{label}: inputs", make, _SEEDS)
            yield Program(f"{label}: prepare", _preparation(name, row, bench.case), (inputs,))


def _names(name: str, context: Context) -> list[str]:
    op = operation(name)
    if context.is_tiny:
        return list(op.CASES)[:2]
    names = list(op.BENCHES)
    return names[:: max(1, len(names) // _MOST_QUICK)] if context.is_quick else names


def _bench(name: str, row: str, bench_name: str, device: tuple[str, str]) -> Bench:
    """The rotation of a bench from shapes alone."""
    op, implementation = operation(name), load(name, row)
    case = op.BENCHES[bench_name] if bench_name in op.BENCHES else op.CASES[bench_name]
    reason = implementation.unsupported(*device, op.dtype(case), **op.sizes(case))
    if reason is not None:
        return Bench(bench_name, case, None, reason)
    call = functools.partial(op.run, implementation, case)
    struct = jax.eval_shape(_preparation(name, row, case), _inputs(name, case)[1])
    output = jax.eval_shape(call, struct)
    carried = matching_leaves(struct, output) if op.IS_IN_PLACE else {}
    touched, held = op.cost(case).num_bytes, tree_bytes(struct) + (0 if carried else tree_bytes(output))
    num_sets = choose_sets(touched, held)
    if num_sets is None:
        return Bench(bench_name, case, None, f"three sets of {held / 1e9:.0f} GB do not fit")
    return Bench(bench_name, case, Rotation(call, struct, num_sets, carried))


def _with_sets(bench: Bench, num_sets: int) -> Bench:
    """The same bench with another number of sets."""
    if bench.rotation is None:
        return bench
    return bench._replace(rotation=dataclasses.replace(bench.rotation, num_sets=num_sets))


def _inputs(name: str, case: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """What makes the inputs of a set from the run's seed and the set's number, and their shapes."""

    def make(seed: jax.Array, i: jax.Array) -> Any:
        return operation(name).make_inputs(case, jax.random.fold_in(jax.random.key(seed), i))

    return make, jax.eval_shape(make, *_SEEDS)


def _preparation(name: str, row: str, case: Any) -> Callable[[Any], Any]:
    """What an implementation makes of the inputs: a program of its own, to which they are no constants."""
    return functools.partial(operation(name).prepare, load(name, row), case)


def _compiled(name: str, row: str, bench: Bench) -> tuple[Any, Any, Any]:
    """Compiled: the calls, what makes inputs, what prepares them."""
    assert bench.rotation is not None
    make, inputs = _inputs(name, bench.case)
    prepare = jax.jit(_preparation(name, row, bench.case))
    return bench.rotation.compile(), jax.jit(make).lower(*_SEEDS).compile(), prepare.lower(inputs).compile()


def _measured(name: str, row: str, bench: Bench, compiled: tuple[Any, Any, Any], context: Context) -> Figure:
    assert bench.rotation is not None
    calls, make_inputs, prepare = compiled
    op = operation(name)
    seed = np.uint32(context.seed % 2**32)

    def make(i: int) -> Any:
        return prepare(make_inputs(seed, np.uint32(i)))

    timing = bench.rotation.measure(calls, make)
    cost = op.cost(bench.case)
    note = f"{cost.num_bytes / timing.seconds / 1e9:.0f} GB/s, {cost.flops / timing.seconds / 1e12:.1f} TFLOP/s"
    note += f"; {timing.num_sets} sets of {cost.num_bytes / 1e6:.0f} MB in turn, repeats within {timing.spread:.1%}"
    if timing.num_sets * cost.num_bytes < 50 << 20:
        note += "; all of it fits into the L2 cache"
    best = context.least_s(cost.num_bytes, cost.flops)
    goal = GOALS.get(name, "")
    return Figure.timed("kernels", f"{name} {bench.name} {row}", timing.seconds, best, note=note, goal=goal)


def compile_all(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Results of several functions side by side; an error in the place of the result where one fails."""

    def call(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, min(12, os.cpu_count() or 1))) as pool:
        futures = {name: pool.submit(call, function) for name, function in functions.items()}
        return {name: future.result() for name, future in futures.items()}


def succeeded(result: Any) -> Any:
    """A result of ``compile_all``; raises what stands in its place where it failed."""
    if isinstance(result, Exception):
        raise CompilationError(f"{type(result).__name__}: {result}") from result
    return result
