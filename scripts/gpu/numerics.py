"""Right answers on the device: every implementation against its operation's reference, over all cases."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.operation import input_shapes, largest_error, prepared_shapes
from pallas_kernels.registry import load, operation
from scripts.gpu.driver import first_line, is_device_lost
from scripts.gpu.figures import Figure
from scripts.gpu.kernels import H200, compile_all, rows, succeeded
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
FIXED_SEED = 7
_MOST_QUICK = 4


def items(context: Context) -> list[Item]:
    """One for each implementation of each operation; those of the project's own kernels first."""
    found = []
    for name, row in rows("cpu" if context.is_tiny else "gpu"):
        seconds = 5.0 + 0.5 * len(_names(name, context))
        found.append(Item(f"{name}/{row}", seconds, 90.0 + 8.0 * seconds))
    return sorted(found, key=lambda item: item.name.endswith("/xla"))


def run(item: str, context: Context) -> Iterator[Figure]:
    """Compiles all cases side by side, then runs each on inputs of a fixed seed and on fresh ones."""
    name, row = item.split("/")
    op, implementation = operation(name), load(name, row)
    device = jax.devices()[0]
    refused, compilers = {}, {}
    for case_name in _names(name, context):
        case = op.CASES[case_name]
        reason = implementation.unsupported(device.platform, device.device_kind, op.dtype(case), **op.sizes(case))
        if reason is None:
            compilers[case_name] = functools.partial(Check, name, row, case_name)
        else:
            refused[case_name] = reason
    checks = compile_all(compilers)
    for case_name in compilers:
        for seed, word in ((FIXED_SEED, "fixed"), (context.seed, "fresh")):
            label = f"{name} {case_name} {row}, {word} seed"
            if context.left_s() < 1.0:
                raise SkippedError(f"the time was up at {case_name}")
            try:
                error = succeeded(checks[case_name]).error(seed)
            except Exception as problem:
                note = f"seed {seed}: {type(problem).__name__}: {first_line(problem)}"
                yield Figure(part="numerics", name=label, value="fail", note=note)
                if is_device_lost(problem):
                    raise
                continue
            allowed = op.tolerance(op.CASES[case_name])
            note = f"seed {seed}: largest error {error:.2e} of the largest value, allowed {allowed:.2e}"
            yield Figure(part="numerics", name=label, value="pass" if error <= allowed else "fail", note=note)
    for reason in dict.fromkeys(refused.values()):
        names = [case_name for case_name, given in refused.items() if given == reason]
        note = f"{reason} ({', '.join(names)})"
        yield Figure(part="numerics", name=f"{name} {row}: {len(names)} cases not for it", value=None, note=note)


def programs(context: Context) -> Iterator[Program]:
    """Calls and references of all cases."""
    seen = set()
    for name, row in rows("gpu"):
        op, implementation = operation(name), load(name, row)
        for case_name in _names(name, context):
            case = op.CASES[case_name]
            if implementation.unsupported(*H200, op.dtype(case), **op.sizes(case)) is not None:
                continue
            inputs, prepared = input_shapes(op, case), prepared_shapes(op, implementation, case)
            label = f"{name} {case_name} {row}"
            yield Program(label, functools.partial(op.run, implementation, case), (prepared,))
            yield Program(f"{label}: prepare", functools.partial(op.prepare, implementation, case), (inputs,))
            if (name, case_name) not in seen:
                seen.add((name, case_name))
                yield Program(f"{name} {case_name}: reference", functools.partial(op.expected, case), (inputs,))


class Check:
    """A case of an implementation with all its programs compiled. Inputs are made in a program of their own.

    Were they made in the one that uses them, the compiler could keep more digits of them than their type has.
    """

    def __init__(self, name: str, row: str, case_name: str):
        op, implementation = operation(name), load(name, row)
        case = op.CASES[case_name]
        self._make, self._expected = _shared_programs(name, case_name)
        prepare = functools.partial(op.prepare, implementation, case)
        call = functools.partial(op.run, implementation, case)
        self._prepare = jax.jit(prepare).lower(input_shapes(op, case)).compile()
        self._run = jax.jit(call).lower(prepared_shapes(op, implementation, case)).compile()

    def error(self, seed: int) -> float:
        """Largest difference as a share of the largest expected value; infinite where a result is no number."""
        inputs = self._make(np.uint32(seed % 2**32))
        found = self._run(self._prepare(inputs))
        return largest_error(found, self._expected(inputs))


@functools.cache
def _shared_programs(name: str, case_name: str) -> tuple[Any, Any]:
    """What makes a case's inputs from a seed, and its reference: the same for all implementations."""
    op = operation(name)
    case = op.CASES[case_name]

    def make(seed: jax.Array) -> Any:
        return op.make_inputs(case, jax.random.key(seed))

    compiled = jax.jit(make).lower(np.uint32(0)).compile()
    return compiled, jax.jit(functools.partial(op.expected, case)).lower(input_shapes(op, case)).compile()


def _names(name: str, context: Context) -> list[str]:
    most = 2 if context.is_tiny else _MOST_QUICK if context.is_quick else None
    return list(operation(name).CASES)[:most]
