"""Divides a model into pipeline stages of about equal size."""

import itertools
import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.api.errors import ConfigError
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.models.abstract import AbstractModel, LogicalParam
from jaxserve.models.stages import StageLayers, stages_of


class LayerCost(NamedTuple):
    """Bytes of the weights of a layer, an embedding or a head, and its multiplications for a token."""

    num_bytes: float
    num_products: float


def allowed_cuts(specs: Sequence[KVSpec | None]) -> list[int]:
    """Return the layers that a stage may begin with, besides the first: no layer from there on reads the keys and
    values of one before, or attends to the tokens that one before selects."""
    needs = ((layer, of) for layer, spec in enumerate(specs) if spec for of in (spec.reads, spec.selects_as))
    reads = [(layer, of) for layer, of in needs if of is not None]
    return [cut for cut in range(1, len(specs)) if not any(read < cut <= layer for layer, read in reads)]


def balanced_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    embedding: LayerCost,
    head: LayerCost,
    cuts: Collection[int] | None = None,
) -> list[StageLayers]:
    """Divide layers into stages so that the largest stage is as small as possible.

    The size of a stage is the larger of its share of all weights' bytes and its share of all multiplications. Of
    equally good divisions, the one with more layers in earlier stages is returned.

    Args:
        layers: Cost of each layer, at least as many as stages.
        num_stages: Number of stages.
        embedding: Cost of the embedding, in the first stage.
        head: Cost of final norm and head, in the last stage.
        cuts: Layers that a stage may begin with; None: any.

    Raises:
        ConfigError: There are too few such layers.
    """
    allowed = range(1, len(layers)) if cuts is None else cuts
    if len(allowed) < num_stages - 1:
        raise ConfigError(_too_few_cuts(num_stages, allowed))
    costs = [*layers]
    costs[0], costs[-1] = _add(costs[0], embedding), _add(costs[-1], head)
    if len(costs) == 1:
        return stages_of([1])
    sums = [*itertools.accumulate(costs, _add, initial=LayerCost(0, 0))]
    total = sums[-1]

    def size(first: int, stop: int) -> float:
        if first and first not in allowed:
            return math.inf
        parts = zip(sums[first], sums[stop], total, strict=True)
        return max((end - start) / (whole or 1) for start, end, whole in parts)

    # best[first]: the largest stage and the numbers of layers, if the layers from ``first`` on make the stages so far
    best = {first: (size(first, len(costs)), (len(costs) - first,)) for first in range(len(costs))}
    for later in range(1, num_stages):
        best = {
            first: min(
                (
                    (max(size(first, stop), best[stop][0]), (stop - first, *best[stop][1]))
                    for stop in range(first + 1, len(costs) - later + 1)
                ),
                key=lambda found: (found[0], [-count for count in found[1]]),
            )
            for first in range(len(costs) - later)
        }
    return stages_of(best[0][1])


def check_cuts(stages: Sequence[StageLayers], specs: Sequence[KVSpec | None]) -> None:
    """Raise ConfigError if a layer of one stage reads the keys and values of a layer of another."""
    cuts = allowed_cuts(specs)
    wrong = [stage.first for stage in stages if stage.first and stage.first not in cuts]
    if wrong:
        raise ConfigError(
            f"stage_layers: a stage may not begin with layer {wrong[0]}: layers from there on read the keys and values "
            f"of earlier ones; it may begin with: {', '.join(map(str, cuts)) or 'none'}"
        )


def _too_few_cuts(num_stages: int, cuts: Collection[int]) -> str:
    return (
        f"pipeline_parallel_size={num_stages}: layers of this model read the keys and values of others, so that a "
        f"stage may begin only with layer {', '.join(map(str, cuts)) or '0'}; use at most {len(cuts) + 1} stages"
    )


def _add(a: LayerCost, b: LayerCost) -> LayerCost:
    return LayerCost(a.num_bytes + b.num_bytes, a.num_products + b.num_products)


def divide(model: AbstractModel, num_stages: int) -> list[StageLayers]:
    """Divide a whole model into stages; see :func:`balanced_stages`."""
    layers, parts = dict[int, LayerCost](), dict[str, LayerCost]()
    for path, param in model.logical.items():
        cost, match = _cost(param), re.match(r"layers\.(\d+)\.", path)
        if match is not None:
            layers[int(match[1])] = _add(layers.get(int(match[1]), _NOTHING), cost)
        else:
            parts[path.split(".")[0]] = _add(parts.get(path.split(".")[0], _NOTHING), cost)
    table = parts["embed"]
    positions = parts.get("position_embed", _NOTHING)
    embedding = LayerCost(table.num_bytes + positions.num_bytes, 0)  # reads a row per token
    head = _add(parts.get("head", table), parts.get("norm", _NOTHING))
    costs = [layers[index] for index in sorted(layers)]
    return balanced_stages(costs, num_stages, embedding, head, allowed_cuts(model.kv_specs))


def _cost(param: LogicalParam) -> LayerCost:
    """Return the cost of one parameter; what is not a matmul's weight multiplies nothing."""
    size, weight = int(np.prod(param.struct.shape)), param.stored
    if weight is None:
        return LayerCost(size * param.struct.dtype.itemsize, 0)
    used = 1 if weight.experts is None else weight.experts.per_token / weight.experts.num_experts
    num_elements = weight.outer * weight.inner * (1 if weight.experts is None else weight.experts.num_experts)
    return LayerCost(size * param.struct.dtype.itemsize, num_elements * used)


_NOTHING = LayerCost(0, 0)
