"""Compile a function with bound arguments once for all tests of a file, which call it many times."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """Return the compiled function that takes the arguments after ``bound``, which must be hashable."""
    return _compiled(function, bound)


@functools.cache
def _compiled(function: Callable[..., Any], bound: tuple[Any, ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, *bound))
