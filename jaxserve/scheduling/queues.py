"""The queues of a scheduler: which sequences wait, which run, and which of those that wait is next."""

import bisect
import collections

from jaxserve.api.turns import Turns
from jaxserve.scheduling.sequence import Sequence


class SequenceQueues:
    """The waiting and running sequences, each ordered by priority, then by arrival.

    Sequences of different API keys are admitted in turns, whatever their priorities: each key has the same number of
    tokens admitted, in proportion to its weight. One that was preempted has had its turn, and goes first.

    Attributes:
        waiting: Sequences without a slot, in order.
        running: Sequences with a slot, in order.
        free_slots: The other slots.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int):
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._num_waiting: collections.Counter[str] = collections.Counter()  # by key
        self._turns = Turns()

    def enqueue(self, *sequences: Sequence) -> None:
        """Insert sequences into the waiting queue, in order."""
        for sequence in sequences:
            key = sequence.request.turn.key
            if not self._num_waiting[key]:
                self._turns.join(key)
            self._num_waiting[key] += 1
            bisect.insort(self.waiting, sequence, key=_rank)

    @property
    def next(self) -> Sequence:
        """The waiting sequence to admit next; there must be one."""
        if len(self._num_waiting) == 1:
            return self.waiting[0]
        resumed = next((sequence for sequence in self.waiting if sequence.num_preemptions), None)
        if resumed is not None:
            return resumed
        key = self._turns.next(self._num_waiting)
        return next(sequence for sequence in self.waiting if sequence.request.turn.key == key)

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence to a free slot; one must be free."""
        if not sequence.num_preemptions:
            self._turns.take(sequence.request.turn, len(sequence.token_ids))
        self._leave(sequence)
        sequence.slot = self.free_slots.pop()
        bisect.insort(self.running, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and free its slot; a follower not yet enqueued is in neither queue."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence in self.waiting:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the waiting queue."""
        if sequence is self.waiting[0]:
            self.waiting.popleft()
        else:
            self.waiting.remove(sequence)
        key = sequence.request.turn.key
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key]


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival
