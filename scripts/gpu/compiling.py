"""Compile programs side by side, with a word to the watchdog after each."""

import concurrent.futures
import os
from collections.abc import Callable, Generator
from typing import Any

import jax

from scripts.gpu.driver import CompilationError
from scripts.gpu.parts import AUTOTUNE_OFF, Working

COMPILE_S = 150.0
"""Seconds that a program may take to compile, with all others at once and the device trying out its kernels."""


def compile_all(functions: dict[str, Callable[[], Any]]) -> Generator[Working, None, dict[str, Any]]:
    """Call several functions side by side and return their results; where one fails its error takes the result's place.

    Yields a word for the watchdog whenever one of them is done.
    """
    found: dict[str, Any] = {}
    yield Working(f"compiling {len(functions)} programs", COMPILE_S)
    with concurrent.futures.ThreadPoolExecutor(max(1, min(12, os.cpu_count() or 1))) as pool:
        futures = {pool.submit(function): name for name, function in functions.items()}
        for future in concurrent.futures.as_completed(futures):
            error = future.exception()
            found[futures[future]] = future.result() if error is None else error
            yield Working(f"compiling {len(functions)} programs, of which {len(found)} are ready", COMPILE_S)
    return found


def compiled_without_autotuning(function: Callable[..., Any], *structs: Any) -> jax.stages.Compiled:
    """Compile a program whose speed does not matter."""
    return jax.jit(function).lower(*structs).compile(compiler_options=AUTOTUNE_OFF)


def succeeded(result: Any) -> Any:
    """Return a result of ``compile_all``.

    Raises:
        CompilationError: It failed.
    """
    if isinstance(result, BaseException):
        raise CompilationError(f"{type(result).__name__}: {result}") from result
    return result
