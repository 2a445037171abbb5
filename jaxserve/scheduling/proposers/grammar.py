"""Propose no drafts but those of the scheduler itself: the method ``grammar`` of ``speculative_config``."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from jaxserve.scheduling.sequence import Sequence


class GrammarProposer:
    """Proposes nothing: rows have drafts only where a constraint forces tokens; see ``constrained_drafts``.

    Args:
        config: The checked ``speculative_config``.
    """

    def __init__(self, config: Mapping[str, Any]):
        pass

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``: return nothing."""
        return [[] for _ in sequences]

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""
