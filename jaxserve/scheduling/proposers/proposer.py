"""What the scheduler asks of a proposer of draft tokens."""

from collections.abc import Sequence as Items
from typing import Protocol, runtime_checkable

from jaxserve.scheduling.sequence import Sequence


@runtime_checkable
class DraftProposer(Protocol):
    """Proposes draft tokens. Proposals affect how many steps a sequence takes, never its tokens.

    Each scheduler has its own, which knows a sequence from the first call of ``propose`` on. What a proposer keeps is a
    function of the tokens of its sequences.
    """

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """Return for each sequence any number of tokens that may follow its ``token_ids``; must not modify it.

        Those before index ``num_pending - 1`` are not used: steps in flight may be sampling them.
        """
        ...

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished, perhaps unknown; its tokens may be kept."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence, perhaps unknown, that has failed, or that may go on in another scheduler."""
        ...
