"""What the counters of speculative decoding say: how many drafts there were, and how many of their tokens were kept."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.api.metric_types import Metric

_PREFIX = "spec_decode_num_"


class DraftTotals(NamedTuple):
    """Counters of speculative decoding.

    Attributes:
        num_drafts: Number of drafts verified.
        num_tokens: Number of their tokens.
        accepted: Number of accepted tokens at each position.
    """

    num_drafts: float = 0.0
    num_tokens: float = 0.0
    accepted: tuple[float, ...] = ()

    @classmethod
    def of(cls, metrics: Iterable[Metric]) -> "DraftTotals":
        """Return the counters among an engine's metrics; zeros without speculative decoding."""
        counts, accepted = dict[str, float](), dict[int, float]()
        for metric in metrics:
            name = metric.name.partition(":")[2]
            if name == f"{_PREFIX}accepted_tokens_per_pos":
                accepted[int(metric.labels["position"])] = metric.value
            elif name.startswith(_PREFIX):
                counts[name.removeprefix(_PREFIX)] = metric.value
        by_position = tuple(accepted[position] for position in sorted(accepted))
        return cls(counts.get("drafts", 0.0), counts.get("draft_tokens", 0.0), by_position)

    def since(self, other: "DraftTotals") -> "DraftTotals":
        """Return what has been counted since other totals of the same engine."""
        accepted = itertools.zip_longest(self.accepted, other.accepted, fillvalue=0.0)
        return DraftTotals(
            self.num_drafts - other.num_drafts,
            self.num_tokens - other.num_tokens,
            tuple(new - old for new, old in accepted),
        )

    @property
    def num_accepted(self) -> float:
        """Number of accepted tokens."""
        return sum(self.accepted)

    @property
    def mean_length(self) -> float:
        """Mean number of tokens that a step with a draft gives a sequence: the accepted ones and the one after them."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.num_accepted / max(self.num_tokens, 1)
