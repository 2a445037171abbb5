"""Communication of a program, counted in its jaxpr, which lists collectives explicitly, or in what XLA made of it."""

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

from sharding.layout import ShardingLayout

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


_COMPILED = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


class Collective(NamedTuple):
    """One collective equation: kind, mesh axes, bytes received per device, and executions per call."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    times: int


def collectives(jaxpr: core.Jaxpr, times: int = 1, *, is_likely: bool = False) -> Iterator[Collective]:
    """Yield the collectives of a jaxpr and of its inner jaxprs; a scan's counted per iteration, a while body's once.

    Args:
        jaxpr: A program, or a part of it.
        times: Executions of the part per call.
        is_likely: Whether of a conditional only the branch for True counts; else all branches do.
    """
    for equation in jaxpr.eqns:
        kind = _KINDS.get(equation.primitive.name)
        if kind is not None:
            axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
            outputs: list[Any] = [variable.aval for variable in equation.outvars]
            num_bytes = sum(output.size * output.dtype.itemsize for output in outputs)
            yield Collective(kind, axes if isinstance(axes, tuple) else (axes,), num_bytes, times)
        rounds = times * equation.params["length"] if equation.primitive.name == "scan" else times
        params = equation.params
        if is_likely and equation.primitive.name == "cond":
            params = {"branches": params["branches"][-1:]}
        for inner in core.jaxprs_in_params(params):
            yield from collectives(inner, rounds, is_likely=is_likely)


def count_collectives(traced: jax.stages.Traced) -> dict[str, int]:
    """Return the number of collectives of each kind in one call of a traced function."""
    counts: collections.Counter[str] = collections.Counter()
    for collective in collectives(traced.jaxpr.jaxpr):
        counts[collective.kind] += collective.times
    return dict(counts)


def compiled_collectives(text: str) -> dict[str, int]:
    """Return the operands of every collective: XLA combines several into one with a tuple result.

    Args:
        text: The optimized program.
    """
    counts: dict[str, int] = {}
    for result, kind in re.findall(rf"= (\([^=]*?\)|\S+) ({_COMPILED})(?:-start)?\(", text):
        num_arrays = len(re.findall(r"\w+\[", result))
        num_operands = (
            num_arrays // 2 if result.startswith("((") else num_arrays
        )  # an async start returns operands and results
        counts[kind] = counts.get(kind, 0) + num_operands
    return counts


def stated_collectives(
    layout: ShardingLayout, num_layers: int, num_sparse: int = 0, *, has_fallback: bool = False
) -> dict[str, int]:
    """Return the number of collectives of each kind in one step, as the layout states them.

    Norms over all heads at once, loops over tiles of rows, and prompt logprobs add to these. Steps with few tokens do
    not split hidden states, whatever ``layout.residual`` is; their layout is that of ``ShardedModel.for_shape``.

    Args:
        layout: Layout, resolved on the mesh.
        num_layers: Decoder layers.
        num_sparse: Those of them with experts.
        has_fallback: Whether an exchange of fewer rows, with one of all rows as its fallback, precedes the experts
            (``all_to_all``).
    """
    splits = {logical: layout.mesh_axis(logical) is not None for logical in layout.rules}
    counts: collections.Counter[str] = collections.Counter()
    has_all_rows = layout.residual_axis is None
    summed = "all-reduce" if has_all_rows else "reduce-scatter"
    counts[summed] += num_layers * splits.get("q_heads", False) + splits.get("vocab", False)
    counts[summed] += (num_layers - num_sparse) * splits.get("ffn", False)
    counts["all-gather"] += splits.get("vocab", False) and layout.logits == "gathered"
    counts["all-gather"] += 0 if has_all_rows else 2 * num_layers + 1
    counts["all-gather"] += num_layers * splits.get("tokens", False)
    counts["all-to-all"] += num_layers * splits.get("tokens", False)
    for kind, count in _expert_collectives(layout, has_fallback).items():
        counts[kind] += num_sparse * count
    return {kind: count for kind, count in counts.items() if count}


def stated_sampling(layout: ShardingLayout, variant: str, *, has_processors: bool = False) -> dict[str, int]:
    """Return the number of collectives of each kind that sample a step's tokens, as the layout states them.

    Those of the search for the last token that top-k or top-p keeps are counted once, though they run for neither, one
    or both of them; its 32 rounds run only where that token is not among the 1,024 most likely ones.

    Args:
        layout: Layout, resolved on the mesh.
        variant: ``greedy``, ``sampled`` or ``full``.
        has_processors: Whether logits processors need whole rows.
    """
    if layout.logits == "gathered":
        return {}
    counts = collections.Counter({"all-gather": 1})  # each device's most likely token
    if variant != "greedy":  # the largest score and a block's weights; the blocks' sums, candidates, and masses
        counts.update({"all-reduce": 2, "all-gather": 1 + 1 + 1 + 32})
    if variant == "full":  # the tokens' scores, and the largest; ranks, alternatives, and the sum of all
        counts.update({"all-reduce": 2, "all-gather": 3 + has_processors})
    return dict(counts)


def _expert_collectives(layout: ShardingLayout, has_fallback: bool) -> dict[str, int]:
    """Return the collectives of one layer of experts."""
    features, experts = layout.mesh_axis("expert_ffn"), layout.mesh_axis("experts")
    axes = {features, experts} if layout.dispatch == "all_reduce" else {features}
    axes -= {None}
    scattered = layout.residual_axis in axes
    counts = collections.Counter({"all-reduce": int(bool(axes - {layout.residual_axis})), "reduce-scatter": scattered})
    if layout.dispatch == "gather":
        counts.update({"all-gather": 2, "reduce-scatter": 1})
    elif layout.dispatch == "all_to_all":
        counts.update({"all-to-all": 6 if has_fallback else 3, "all-reduce": has_fallback})
    return counts


def bytes_per_device(shape: tuple[int, ...], itemsize: int, sharding: jax.sharding.Sharding) -> int:
    """Return the bytes of one array on each device of its sharding."""
    local = sharding.shard_shape(shape)
    size = itemsize
    for dimension in local:
        size *= dimension
    return size
