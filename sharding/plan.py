"""Communication of a program, counted in its jaxpr, which lists collectives explicitly."""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
}


class Collective(NamedTuple):
    """One collective equation: kind, mesh axes, bytes received per device, and executions per call."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    times: int


def collectives(jaxpr: core.Jaxpr, times: int = 1) -> Iterator[Collective]:
    """Yield the collectives of a jaxpr and of its inner jaxprs; a scan's counted per iteration, a while body's once."""
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        if kind is not None:
            axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
            outputs: list[Any] = [variable.aval for variable in equation.outvars]
            num_bytes = sum(output.size * output.dtype.itemsize for output in outputs)
            yield Collective(kind, axes if isinstance(axes, tuple) else (axes,), num_bytes, times)
        rounds = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in core.jaxprs_in_params(equation.params):
            yield from collectives(inner, rounds)


def count_collectives(traced: jax.stages.Traced) -> dict[str, int]:
    """Return the number of collectives of each kind in one call of a traced function."""
    counts: collections.Counter[str] = collections.Counter()
    for collective in collectives(traced.jaxpr.jaxpr):
        counts[collective.kind] += collective.times
    return dict(counts)


def bytes_per_device(shape: tuple[int, ...], itemsize: int, sharding: jax.sharding.Sharding) -> int:
    """Return the bytes of one array on each device of its sharding."""
    local = sharding.shard_shape(shape)
    size = itemsize
    for dimension in local:
        size *= dimension
    return size
