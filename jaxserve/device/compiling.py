"""Compile programs on threads, and tell their memory."""

import concurrent.futures
from typing import NamedTuple

import jax

from jaxserve.device.memory import return_freed_memory

Compiling = concurrent.futures.Future[jax.stages.Compiled]


def submit(pool: concurrent.futures.Executor, traced: jax.stages.Traced, after: Compiling | None = None) -> Compiling:
    """Lower a program, and compile it on a thread of a pool, after another one that was submitted before, if any."""
    return pool.submit(_compile, traced.lower(), after)


def _compile(lowered: jax.stages.Lowered, after: Compiling | None) -> jax.stages.Compiled:
    """Compile a program, then return memory freed by the compiler to the system, so that it does not add up."""
    if after is not None:
        concurrent.futures.wait([after])
    compiled = lowered.compile()
    return_freed_memory()
    return compiled


class ProgramBytes(NamedTuple):
    """Bytes per device of a program's temporaries and of its new outputs."""

    temporary: int
    outputs: int


def bytes_of(program: jax.stages.Compiled) -> ProgramBytes:
    """Return the memory of a program; 0 if the backend has no memory analysis."""
    analysis = program.memory_analysis()
    if analysis is None:
        return ProgramBytes(0, 0)
    return ProgramBytes(analysis.temp_size_in_bytes, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
