"""Which processes of a group have which pipeline stages."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.device.build import EnginePlan


class StageRanks(NamedTuple):
    """The ranks of each stage's devices.

    Attributes:
        ranks: Ranks of each stage, in the order of its devices.
        counts_experts: Whether each stage counts the tokens of its experts.
    """

    ranks: Sequence[Sequence[int]]
    counts_experts: bool

    @classmethod
    def of(cls, plan: EnginePlan) -> "StageRanks":
        """Return those of a plan."""
        ranks = [
            [*dict.fromkeys(int(device.process_index) for device in model.mesh.devices.flat)] for model in plan.models
        ]
        return cls(ranks, plan.models[0].counts_expert_tokens)

    @property
    def first_of_last(self) -> int:
        """The rank that reports what the last stage samples, unless rank 0 has a part of it."""
        return 0 if 0 in self.ranks[-1] else self.ranks[-1][0]

    @property
    def reporters(self) -> list[int]:
        """Ranks that send results of each step to rank 0, which does not know them."""
        found = {self.first_of_last}
        if self.counts_experts:
            found |= {ranks[0] for ranks in self.ranks}
        return sorted(found - {0})

    def partners(self, rank: int) -> list[int]:
        """Return the ranks with which a rank exchanges what stages hand over."""
        last = len(self.ranks) - 1
        pairs = [(stage, stage + 1) for stage in range(last)] + [(last, stage) for stage in range(last)]
        found = set[int]()
        for one, other in pairs:
            for mine, theirs in ((one, other), (other, one)):
                if rank in self.ranks[mine]:
                    found |= {*self.ranks[theirs]}
        return sorted(found - {rank})
