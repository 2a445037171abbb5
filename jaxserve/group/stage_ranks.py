"""Which processes of a group have which pipeline stages of which data slice."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.device.build import EnginePlan
from jaxserve.device.sharded_model import ShardedModel


class StageRanks(NamedTuple):
    """The ranks of the devices of each stage of a data slice.

    Attributes:
        ranks: Ranks of each stage, in the order of its devices.
        counts_experts: Whether each stage counts the tokens of its experts.
    """

    ranks: Sequence[Sequence[int]]
    counts_experts: bool

    @classmethod
    def of(cls, stages: Sequence[ShardedModel]) -> "StageRanks":
        """Return those of the stages of a data slice."""
        ranks = [[*dict.fromkeys(int(device.process_index) for device in each.mesh.devices.flat)] for each in stages]
        return cls(ranks, stages[0].counts_expert_tokens)

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


def slice_ranks(plan: EnginePlan) -> list[StageRanks]:
    """Return the ranks of the stages of each data slice."""
    return [StageRanks.of(stages) for stages in plan.replicas]


def all_partners(plan: EnginePlan, rank: int) -> list[int]:
    """Return the ranks with which a rank exchanges what the stages of any data slice hand over."""
    return sorted({partner for ranks in slice_ranks(plan) for partner in ranks.partners(rank)})
