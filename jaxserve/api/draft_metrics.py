"""The drafts of one completion, as `per_request_spec_decode_metrics` reports them: vLLM's class and names."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True, kw_only=True)
class RequestSpecDecodeMetrics:
    """Drafts verified for one completion. Steps without a draft are not counted."""

    num_spec_tokens: int
    """`num_speculative_tokens` of the engine: most tokens of a draft."""
    histogram: list[int]
    """Number of drafts with each number of accepted tokens, from 0 to `num_spec_tokens`."""
    num_draft_tokens: int = 0
    per_step_accepted: list[int]
    """Accepted tokens of each draft, in order; empty unless the level is `detailed`."""
    per_step_drafted: list[int]
    """Tokens of each draft, likewise."""

    def to_dict(self) -> dict[str, Any]:
        """Return the object that the server's responses have."""
        num_drafts = sum(self.histogram)
        num_accepted = sum(length * count for length, count in enumerate(self.histogram))
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / max(num_drafts, 1),
            "draft_acceptance_rate": num_accepted / max(self.num_draft_tokens, 1),
            "acceptance_histogram": self.histogram,
            "num_spec_steps": num_drafts,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.per_step_accepted:
            found |= {"per_step_accepted": self.per_step_accepted, "per_step_drafted": self.per_step_drafted}
        return found


class DraftReport(NamedTuple):
    """What is reported about the drafts of each completion.

    Attributes:
        num_spec_tokens: Most tokens of a draft.
        is_detailed: Whether the drafts are listed.
    """

    num_spec_tokens: int
    is_detailed: bool

    @classmethod
    def at_level(cls, level: str, num_spec_tokens: int) -> "DraftReport | None":
        """Return what `per_request_spec_decode_metrics` asks for; None for nothing."""
        return None if level == "none" else cls(num_spec_tokens, level == "detailed")

    def of(self, drafted: Sequence[int], accepted: Sequence[int]) -> RequestSpecDecodeMetrics:
        """Return the report on drafts, from the tokens and the accepted tokens of each."""
        counts = collections.Counter(accepted)
        return RequestSpecDecodeMetrics(
            num_spec_tokens=self.num_spec_tokens,
            histogram=[counts[length] for length in range(self.num_spec_tokens + 1)],
            num_draft_tokens=sum(drafted),
            per_step_accepted=[*accepted] if self.is_detailed else [],
            per_step_drafted=[*drafted] if self.is_detailed else [],
        )
