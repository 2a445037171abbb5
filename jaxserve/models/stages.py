"""Pipeline stages: consecutive layers of a model that run on devices of their own (GPipe, arXiv:1811.06965)."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple


class StageLayers(NamedTuple):
    """The layers of one stage. The first stage also embeds tokens; the last also has the final norm and the head.

    Attributes:
        first: Index of its first layer.
        stop: Index after its last layer.
        num_layers: Layers of the whole model.
    """

    first: int
    stop: int
    num_layers: int

    @property
    def layers(self) -> range:
        """Indices of its layers in the whole model."""
        return range(self.first, self.stop)

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits and samples."""
        return self.stop == self.num_layers

    def whole_path(self, path: str) -> str:
        """Return a path in the stage's module as it is in the whole model."""
        return re.sub(r"^layers\.(\d+)\.", lambda match: f"layers.{self.layers[int(match[1])]}.", path)


def stages_of(num_layers: Sequence[int]) -> list[StageLayers]:
    """Return stages with the given numbers of layers."""
    ends = [*itertools.accumulate(num_layers, initial=0)]
    return [StageLayers(first, stop, ends[-1]) for first, stop in itertools.pairwise(ends)]
