"""The scheduler's part that keeps sequences in order and gives out slots."""

import bisect
from collections import deque

from jaxserve.scheduling.sequence import Sequence


class SequenceQueues:
    """Sequences that wait for a slot and sequences that have one, each in order of priority, then of arrival.

    Attributes:
        waiting: Sequences without a slot, in order.
        running: Sequences with a slot, in order.

    Args:
        num_slots: Sequences that can run at once.
    """

    def __init__(self, num_slots: int):
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_arrivals = 0

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence can run."""
        return bool(self._free_slots)

    def number(self, sequence: Sequence) -> None:
        """Note that a new sequence, or a follower of one, arrives after all others."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1

    def wait(self, *sequences: Sequence) -> None:
        """Put sequences in their places among those that wait."""
        for sequence in sequences:
            bisect.insort(self.waiting, sequence, key=_rank)

    def run_first(self) -> None:
        """Give the first sequence that waits a slot; one must be free."""
        sequence = self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        bisect.insort(self.running, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue, and its slot from it; a follower that has not been added is in none."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
