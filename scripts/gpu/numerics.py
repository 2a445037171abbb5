"""Check results on the device: every implementation against its operation's reference, over all cases.

Each case runs 20 times on inputs of a fixed seed and 20 times on fresh ones; all runs must have the same bits, since
what changes from run to run is a race. Before each run, memory of the results' sizes is filled with NaN and freed, so
that a result which is not written is likely to show.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.operation import Comparison, input_shapes, prepared_shapes
from pallas_kernels.registry import load, operation
from scripts.gpu.compiling import compile_all, compiled_without_autotuning, succeeded
from scripts.gpu.driver import is_device_lost
from scripts.gpu.figures import Figure
from scripts.gpu.parts import AS_NEEDED, AUTOTUNE_OFF, Context, Item, Program, SkippedError, Working
from scripts.gpu.rows import H200, rows
from scripts.gpu.wrong_results import WrongResultError, failure_note

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
FIXED_SEED = 7
NUM_RUNS = 20
_MOST_QUICK = 12
_TOGETHER = 24  # cases that are compiled before the first of them runs
_TINY = {"paged_attention": ("edges", "mixed", "window", "mixed_bf16_h64")}


def items(context: Context) -> list[Item]:
    """List the implementations of each operation, paged attention first, those in plain XLA last."""
    return [Item(f"{name}/{row}", 5.0 + 0.8 * len(_names(name, context))) for name, row in rows(context.is_tiny)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Compile cases side by side, then run each on inputs of a fixed seed and on fresh ones."""
    context.refuse_broken(item)
    name, row = item.split("/")
    names, refused = _split_refused(name, row, _names(name, context))
    for start in range(0, len(names), _TOGETHER):
        together = names[start : start + _TOGETHER]
        checks = yield from compile_all({each: functools.partial(Check, name, row, each) for each in together})
        for case_name in together:
            if context.left_s() < 1.0:
                raise SkippedError(f"the time limit was reached at {case_name}")
            yield Working(f"running {name} {case_name} {row}")
            yield from figures_of("numerics", name, row, case_name, checks[case_name], context)
    for reason, given in itertools.groupby(sorted(refused, key=refused.__getitem__), refused.__getitem__):
        yield Figure(part="numerics", name=f"{name} {row} refuses: {reason}", value=None, note=", ".join(given))


def figures_of(part: str, name: str, row: str, case_name: str, check: Any, context: Context) -> Iterator[Figure]:
    """Run a compiled check of a case, or tell why it did not compile.

    Raises:
        Exception: It cost the process its device.
    """
    label = f"{name} {case_name} {row}"
    notes = []
    try:
        for seed in (FIXED_SEED, context.seed):
            found = succeeded(check).run(seed)
            place = f" at {found.place}" if found.place else ""
            notes.append(f"seed {seed}: worst row {found.worst:.2g} of what is allowed{place}")
            if not found.is_right:
                raise WrongResultError(notes[-1])
    except Exception as problem:
        yield Figure(part=part, name=label, value="fail", note=failure_note(problem))
        if is_device_lost(problem):
            raise
        return
    notes.append(f"{found.num_rows} rows, {found.num_padding} of padding left out; {NUM_RUNS} runs alike")
    yield Figure(part=part, name=label, value="pass", note="; ".join(notes))


def programs(context: Context) -> Iterator[Program]:
    """List the calls, preparations and references of all cases."""
    seen = set()
    for name, row in rows(is_tiny=False):
        op, implementation = operation(name), load(name, row)
        for case_name in _names(name, context):
            case = op.DEVICE_CASES[case_name]
            if implementation.unsupported(*H200, op.dtype(case), **op.sizes(case)) is not None:
                continue
            inputs, prepared = input_shapes(op, case), prepared_shapes(op, implementation, case)
            label = f"{name} {case_name} {row}"
            yield Program(label, functools.partial(op.run, implementation, case), (prepared,), options=AUTOTUNE_OFF)
            prepare = functools.partial(op.prepare, implementation, case)
            yield Program(f"{label}: prepare", prepare, (inputs,), options=AUTOTUNE_OFF)
            if (name, case_name) not in seen:
                seen.add((name, case_name))
                reference = functools.partial(op.expected, case)
                yield Program(f"{name} {case_name}: reference", reference, (inputs,), options=AUTOTUNE_OFF)


class Check:
    """A case of an implementation with all its programs compiled. Inputs are made in a program of their own.

    Were they made in the one that uses them, the compiler could keep more digits of them than their dtype has.
    """

    def __init__(self, name: str, row: str, case_name: str):
        op, implementation = operation(name), load(name, row)
        self._op, self._case = op, op.DEVICE_CASES[case_name]
        self._make, self._expected = _shared_programs(name, case_name)
        prepare = functools.partial(op.prepare, implementation, self._case)
        call = functools.partial(op.run, implementation, self._case)
        self._prepare = compiled_without_autotuning(prepare, input_shapes(op, self._case))
        lowered = jax.jit(call).lower(prepared_shapes(op, implementation, self._case))
        self._run = lowered.compile(compiler_options=AUTOTUNE_OFF)
        self._poison = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info)]

    def run(self, seed: int) -> Comparison:
        """Compare the first of 20 runs with the reference.

        Raises:
            WrongResultError: A later run has other bits than the first.
        """
        inputs = self._make(np.uint32(seed % 2**32))
        prepared = self._prepare(inputs)
        found, bits = self._run_once(prepared)
        for number in range(2, NUM_RUNS + 1):
            if self._run_once(prepared)[1] != bits:
                raise WrongResultError(f"seed {seed}: run {number} has other bits than the first")
        return self._op.compare(self._case, inputs, found, self._expected(inputs))

    def _run_once(self, prepared: Any) -> tuple[Any, list[bytes]]:
        """Return a result and its bits."""
        jax.block_until_ready(jax.device_put(self._poison))  # freed at once: the result is likely to take its place
        found = self._run(prepared)
        return found, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)]


def _split_refused(name: str, row: str, names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split cases into those that the implementation takes on this device, and the others with its reasons."""
    op, implementation, device = operation(name), load(name, row), jax.devices()[0]
    taken, refused = [], {}
    for each in names:
        case = op.DEVICE_CASES[each]
        reason = implementation.unsupported(device.platform, device.device_kind, op.dtype(case), **op.sizes(case))
        if reason is None:
            taken.append(each)
        else:
            refused[each] = reason
    return taken, refused


@functools.cache
def _shared_programs(name: str, case_name: str) -> tuple[Any, Any]:
    """Compile what makes a case's inputs from a seed, and its reference: the same for all implementations."""
    op = operation(name)
    case = op.DEVICE_CASES[case_name]

    def make(seed: jax.Array) -> Any:
        return op.make_inputs(case, jax.random.key(seed))

    expected = functools.partial(op.expected, case)
    return compiled_without_autotuning(make, np.uint32(0)), compiled_without_autotuning(
        expected, input_shapes(op, case)
    )


def _names(name: str, context: Context) -> list[str]:
    names = list(operation(name).DEVICE_CASES)
    if context.is_tiny:
        return list(_TINY.get(name, names[:2]))
    return names[:: max(1, len(names) // _MOST_QUICK)] if context.is_quick else names
