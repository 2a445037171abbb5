"""Leave drafts to the device: the methods of ``speculative_config`` whose drafts a model makes after each step."""

from collections.abc import Sequence as Items

from jaxserve.scheduling.plan import ON_DEVICE
from jaxserve.scheduling.sequence import Sequence


class DeviceProposer:
    """Proposes the drafts that the device has for a sequence, whatever they are."""

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``; the masks of a constraint would need drafts that the host knows."""
        return [
            [] if each.constraint is not None else [ON_DEVICE] * (each.num_pending - 1 + each.num_next_drafts)
            for each in sequences
        ]

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``; nothing is known of it."""

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``; nothing is known of it."""
