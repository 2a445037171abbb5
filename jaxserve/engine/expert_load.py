"""Sums of the tokens that an engine routed to each expert."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxserve.api.metric_types import Counter, Metric


class ExpertLoad:
    """Counts tokens per layer and expert, over all steps and replicas of an engine.

    Args:
        layers: Indices of the layers with experts.
        num_experts: Number of experts of each.
        num_groups: Number of groups of consecutive layers that the metric distinguishes.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, num_groups: int):
        self._sums = np.zeros((len(layers), num_experts), np.int64)
        starts = [len(layers) * group // num_groups for group in range(num_groups + 1)]
        self._groups = {
            _range_name(layers[start], layers[end - 1]): slice(start, end)
            for start, end in zip(starts[:-1], starts[1:], strict=True)
        }

    def add(self, tokens: Int[np.ndarray, "layers E"]) -> None:
        """Add the counts of a step."""
        self._sums += tokens

    def total(self) -> Int[np.ndarray, "layers E"]:
        """Return the sums so far, one row for each layer with experts."""
        return self._sums.copy()

    def collect(self, prefix: str) -> list[Metric]:
        """Return the metric ``expert_tokens``: a counter for each group of layers and expert."""
        return [
            Counter(f"{prefix}expert_tokens", {"layers": name, "expert": str(expert)}, int(count))
            for name, rows in self._groups.items()
            for expert, count in enumerate(self._sums[rows].sum(0))
        ]


def _range_name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
