"""Divides a model into pipeline stages of about equal size."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.models.abstract import AbstractModel, LogicalParam
from jaxserve.models.stages import StageLayers, stages_of


class LayerCost(NamedTuple):
    """Bytes of the weights of a layer, an embedding or a head, and its multiplications for a token."""

    num_bytes: float
    num_products: float


def balanced_stages(
    layers: Sequence[LayerCost], num_stages: int, embedding: LayerCost, head: LayerCost
) -> list[StageLayers]:
    """Divide layers into stages so that the largest stage is as small as possible.

    The size of a stage is the larger of its share of all weights' bytes and its share of all multiplications. Of
    equally good divisions, the one with more layers in earlier stages is returned.

    Args:
        layers: Cost of each layer, at least as many as stages.
        num_stages: Number of stages.
        embedding: Cost of the embedding, in the first stage.
        head: Cost of final norm and head, in the last stage.
    """
    costs = [*layers]
    costs[0], costs[-1] = _add(costs[0], embedding), _add(costs[-1], head)
    if len(costs) == 1:
        return stages_of([1])
    sums = [*itertools.accumulate(costs, _add, initial=LayerCost(0, 0))]
    total = sums[-1]

    def size(first: int, stop: int) -> float:
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
    head = _add(parts.get("head", table), parts["norm"])
    return balanced_stages([layers[index] for index in sorted(layers)], num_stages, embedding, head)


def _cost(param: LogicalParam) -> LayerCost:
    """Return the cost of one parameter; what is not a matmul's weight multiplies nothing."""
    size, weight = int(np.prod(param.struct.shape)), param.stored
    if weight is None:
        return LayerCost(size * param.struct.dtype.itemsize, 0)
    used = 1 if weight.experts is None else weight.experts.per_token / weight.experts.num_experts
    return LayerCost(size * param.struct.dtype.itemsize, size * used)


_NOTHING = LayerCost(0, 0)
