"""The order in which a step uses weights and KV pages and exchanges data, read from its jaxpr."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_hidden, trace_step
from sharding.plan import Collective, collectives

PAGES = "KV pages"
"""What the pages of keys and values are called among the arrays that a step uses."""

_LAYER = "_run_layer"
_SAME_ARRAY = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "optimization_barrier",
    "reshape",
    "slice",
    "squeeze",
    "transpose",
}
_WRITES = {"dynamic_update_slice", "scatter"}

Names = dict[Any, str]
_Part = tuple[str, "str | Collective"]


class FlowStep(NamedTuple):
    """The arrays that a device computes with, and the collective that follows.

    Attributes:
        arrays: Names of weights, in the order of first use, and ``PAGES``.
        collective: None after the last arrays.
    """

    arrays: tuple[str, ...]
    collective: Collective | None


class Flow(NamedTuple):
    """The order of one layer's step, with what precedes and follows the layer in a step of only this layer."""

    before: tuple[FlowStep, ...]
    layer: tuple[FlowStep, ...]
    after: tuple[FlowStep, ...]

    @property
    def collectives(self) -> list[Collective]:
        """The layer's collectives in order."""
        return [step.collective for step in self.layer if step.collective is not None]


def trace_flow(sharded: ShardedModel, shape: BatchShape) -> Flow:
    """Trace the program of one layer and return its order; sampling is greedy."""
    traced = trace_step(sharded, shape, "greedy") if sharded.is_last else trace_hidden(sharded, shape)
    jaxpr = traced.jaxpr.jaxpr
    names = dict(zip(jaxpr.invars, _argument_names(sharded, jaxpr), strict=False))
    parts: dict[str, list[str | Collective]] = {"before": [], "layer": [], "after": []}
    is_past = False
    for where, event in _events(jaxpr, {var: name for var, name in names.items() if name}, ""):
        is_past = is_past or where == _LAYER
        parts["layer" if where == _LAYER else "after" if is_past else "before"].append(event)
    return Flow(**{name: tuple(_steps(events)) for name, events in parts.items()})


def _argument_names(sharded: ShardedModel, jaxpr: core.Jaxpr) -> list[str]:
    """Return the name of each argument; "" for those that are neither weights nor pages."""
    model = sharded.abstract_model
    logical = {array: path for path, param in model.logical.items() for array in param.arrays}
    paths = list(model.params)
    names = [logical[paths[group[0]]].removeprefix("layers.0.") for group in sharded.packing.groups]
    names += [PAGES] * len(jax.tree.leaves(sharded.abstract_all_pools()))
    return names + [""] * (len(jaxpr.invars) - len(names))


def _events(jaxpr: core.Jaxpr, names: Names, where: str) -> Iterator[_Part]:
    """Yield the arrays that equations use and the collectives, in order, each with where it is: in the layer or not.

    Adds to ``names`` the variables that hold the same arrays.
    """
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        inner = [] if kind == "pallas_call" else [*core.jaxprs_in_params(equation.params)]
        if not inner:
            yield from ((where, found) for found in collectives(jaxpr.replace(eqns=[equation])))
        inside = _LAYER if equation.params.get("name") == _LAYER else where
        for each in inner:
            given = dict(zip(each.invars, _operands(equation, each), strict=True))
            known = {var: names[operand] for var, operand in given.items() if operand in names}
            yield from _events(each, known, inside)
            names |= _results(equation, each, known)
        used = [names[var] for var in equation.invars if isinstance(var, core.Var) and var in names]
        if used and kind in _SAME_ARRAY | _WRITES:
            names |= dict.fromkeys(equation.outvars, used[0])
        if not inner and kind not in _SAME_ARRAY:
            yield from ((where, name) for name in used)


def _operands(equation: core.JaxprEqn, inner: core.Jaxpr) -> Sequence[Any]:
    """Return what each argument of an inner jaxpr is outside; None for a value that is not a variable."""
    outer: list[Any] = [var if isinstance(var, core.Var) else None for var in equation.invars]
    if equation.primitive.name == "while":
        num_condition = equation.params["cond_nconsts"]
        num_body = equation.params["body_nconsts"]
        carried = outer[num_condition + num_body :]
        is_condition = inner is equation.params["cond_jaxpr"].jaxpr
        consts = outer[:num_condition] if is_condition else outer[num_condition : num_condition + num_body]
        return [*consts, *carried]
    missing = len(inner.invars) - len(outer)
    return [None] * missing + outer[max(0, -missing) :]  # a cond's first operand is the index of the branch


def _results(equation: core.JaxprEqn, inner: core.Jaxpr, known: Mapping[Any, str]) -> Names:
    """Return the names of an equation's results that are named in its inner jaxpr: the written pages."""
    if len(inner.outvars) != len(equation.outvars):
        return {}
    pairs = zip(equation.outvars, inner.outvars, strict=True)
    return {out: known[var] for out, var in pairs if isinstance(var, core.Var) and var in known}


def _steps(events: Sequence[str | Collective]) -> Iterator[FlowStep]:
    """Group events: the arrays before each collective, each once."""
    arrays: dict[str, None] = {}
    for event in events:
        if isinstance(event, str):
            arrays[event] = None
        else:
            yield FlowStep(tuple(arrays), event)
            arrays = {}
    if arrays:
        yield FlowStep(tuple(arrays), None)
