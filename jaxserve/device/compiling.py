"""Compile programs on threads, keep them on disk so that the next start only loads them, and tell their memory."""

import concurrent.futures
import os
import re
from typing import NamedTuple

import jax

from jaxserve.device.memory import return_freed_memory
from jaxserve.layers.cpu import cpu_key
from sharding.mesh import Device

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


def use_compilation_cache(directory: str | None, device: Device) -> None:
    """Enable JAX's persistent compilation cache for this process, unless it is already configured.

    On GPUs the cache includes XLA's autotuning results. It can be copied to another machine with the same device and
    versions.

    Args:
        directory: Cache directory; None for the user's cache directory, empty for no cache.
        device: Target device; each kind has its own subdirectory.
    """
    if directory == "" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if directory is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        directory = os.path.join(home, "jaxserve", "xla")
    kind = cpu_key() if device.platform == "cpu" else re.sub(r"\W+", "-", device.device_kind)
    jax.config.update("jax_compilation_cache_dir", os.path.join(directory, kind))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
