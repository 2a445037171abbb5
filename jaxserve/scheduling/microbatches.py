"""Divide the running sequences over the plans that are in the stages of a pipeline at the same time."""

from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step


class Microbatches:
    """Begins steps, and chooses which running sequences each may contain, so that every stage of a pipeline has work.

    With S stages, a token that plan k samples can be read on the device from plan k + S on. So the sequences form S
    microbatches: one that samples in plan k next decodes in plan k + S. Each plan takes at most its share of all
    sequences, those least recently planned first, which keeps the microbatches balanced while sequences come and go.
    Prompt chunks that do not sample may follow each other in consecutive plans.

    Args:
        num_stages: Number of stages S.
        num_slots: Number of slots, of all microbatches together.

    Attributes:
        number: Number of the plan being made. Every call of ``begin`` counts, also if nothing can be planned then:
            a tick of the pipeline without work.
    """

    def __init__(self, num_stages: int, num_slots: int):
        self.number = -1
        self._max_rows = -(-num_slots // num_stages)
        self._num_stages = num_stages
        self._num_slots = num_slots
        self._plans: list[StepPlan | None] = [None] * num_stages

    def begin(self, running: list[Sequence], num_waiting: int) -> Step:
        """Begin the next step. With one stage, all running sequences are due, and ``due`` is ``running`` itself."""
        self.number += 1
        if self._num_stages == 1:
            return Step(StepPlan(self.number), running, self._num_slots, self._num_slots, len(running))
        oldest, busy, num_runnable, due = self.number - self._num_stages, set[int](), 0, list[Sequence]()
        for sequence in running:
            if not _has_tokens_left(sequence):
                continue
            waits_for_host = sequence.waits_for_host
            num_runnable += not waits_for_host
            if waits_for_host or (sequence.num_pending and sequence.last_plan > oldest):
                busy.add(sequence.last_plan)
            else:
                due.append(sequence)
        num_free = max(self._num_stages - len(busy), 1)
        decodes = [sequence for sequence in due if sequence.decode_limit]
        num_last = sum(sequence.num_computed + 2 == sequence.max_length for sequence in decodes)
        num_decoding = sum(sequence.decode_limit > 0 for sequence in running)
        max_decodes = self._share(len(decodes) - num_last, num_free, num_last, num_decoding)
        num_others = len(due) - num_last + min(num_waiting, self._num_slots - len(running))
        total = min(len(running) + num_waiting, self._num_slots)
        max_members = self._share(num_others, num_free, num_last, total)
        if len(decodes) > max_decodes:
            postponed = set(sorted(decodes, key=_last_plan)[max_decodes:])
            due = [sequence for sequence in due if sequence not in postponed]
        return Step(StepPlan(self.number), due, self._max_rows, max_members, num_runnable)

    def add(self, step: Step) -> None:
        """Record a step, and compare the rows of its plan with the microbatch's previous plan."""
        plan, index = step.plan, step.plan.number % self._num_stages
        previous, self._plans[index] = self._plans[index], plan
        if previous is not None:
            plan.compare_rows(previous)
        if self._num_stages > 1:
            for sequence in step.sequences:
                sequence.last_plan = plan.number

    def _share(self, num_returning: int, num_free: int, num_last: int, total: int) -> int:
        """Return how many of the sequences that could be planned now to plan.

        Args:
            num_returning: Number of those that will decode again, S plans later.
            num_free: Number of microbatches without sequences that will: these and this one divide them.
            num_last: Number of those whose last row it is; there is nothing to divide.
            total: Number of sequences in all microbatches.
        """
        return min(num_last - (-num_returning // num_free), -(-total // self._num_stages))


def _has_tokens_left(sequence: Sequence) -> bool:
    """Whether a running sequence has tokens to compute that are not planned yet."""
    if not sequence.decode_limit:
        return not sequence.num_pending  # else its pooled vector is in flight
    return sequence.num_computed + 1 < sequence.max_length


def _last_plan(sequence: Sequence) -> int:
    return sequence.last_plan
