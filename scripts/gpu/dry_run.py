"""Build everything the check would run from shapes and lower it for CUDA; compile it where JAX's CUDA wheels are."""

import collections
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.lowering import lower_for_cuda
from scripts.gpu.driver import first_line
from scripts.gpu.figures import Figure, Results, line
from scripts.gpu.parts import Context, Part, Program
from scripts.gpu.steps import lower_step, steps
from sharding import get_layout


class Compiler(NamedTuple):
    """What turns programs into figures: a mesh of GPUs that need not be there, and what compiles for it, or neither."""

    mesh: Any = None
    compile_for: Any = None
    compile_traced: Any = None

    @property
    def word(self) -> str:
        """What a program that passes was."""
        return "lowered" if self.mesh is None else "compiled"


def find_compiler(lowers_only: bool) -> Compiler:
    """Return the device-less compiler, where this environment has one."""
    has_plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))
    if lowers_only or not has_plugin or sys.version_info < (3, 12):
        return Compiler()
    from scripts.deviceless import compile_for, compile_traced, h200_mesh

    return Compiler(h200_mesh(1), compile_for, compile_traced)


def run(
    parts: dict[str, Part], context: Context, compiler: Compiler, results: Results, show: Callable[[str], None]
) -> None:
    """Check every program of some parts and keep a figure for each part, and one for each failure."""
    for name, part in parts.items():
        counts: collections.Counter[str] = collections.Counter()
        start = time.monotonic()
        for label, check in _checks(name, part, context, compiler):
            try:
                counts[check() or compiler.word] += 1
            except Exception as error:
                counts["failed"] += 1
                note = f"{type(error).__name__}: {first_line(error)}"
                figure = Figure(part=name, name=label, value="fail", note=note)
                results.add(figure)
                show(line(figure))
        what = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no programs of JAX"
        items = "; ".join(item.name for item in part.items(context))
        note = f"{what} in {time.monotonic() - start:.0f} s. Items: {items}"
        figure = Figure(part=name, name="dry run", value="fail" if counts["failed"] else "pass", note=note)
        results.add(figure)
        show(line(figure))


def _checks(name: str, part: Part, context: Context, compiler: Compiler) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and check of each program; shapes that cannot even be built are a failure too."""
    if name == "engine":
        for step in steps(context, compiler.mesh):
            yield step.name, functools.partial(_check_step, step.trace, compiler)
        return
    programs = part.programs(context)
    while True:
        try:
            program = next(programs)
        except StopIteration:
            return
        except Exception as error:
            yield "shapes", functools.partial(_raise, error)
            return
        yield program.name, functools.partial(_check, program, compiler)


def _check(program: Program, compiler: Compiler) -> str | None:
    """Lower or compiles; returns what else became of the program, where it was neither."""
    if compiler.mesh is None:
        if program.needs_wheels:
            return "left out, since JAX's CUDA wheels are not there"
        lower_for_cuda(program.function, *program.structs)
        return None
    whole = get_layout("tensor_parallel").on(compiler.mesh).sharding(compiler.mesh)

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    structs: Sequence[Any] = jax.tree.map(placed, program.structs)
    compiler.compile_for(
        compiler.mesh, program.function, *structs, donate_argnums=program.donated, options=program.options
    )
    return None


def _check_step(trace: Callable[[], Any], compiler: Compiler) -> None:
    if compiler.mesh is None:
        lower_step(trace())
    else:
        compiler.compile_traced(compiler.mesh, trace())


def _raise(error: Exception) -> None:
    raise error
