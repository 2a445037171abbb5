"""Sequences of requests that only a scheduler runs."""

import abc
from collections.abc import Sequence as Items
from typing import Any

from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_params import RepetitionDetectionParams
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.repetition import RepetitionSearch
from jaxserve.scheduling.sequence import Sequence, in_mask


def make_sequence(
    name: str,
    token_ids: list[int],
    num_prompt_tokens: int,
    max_length: int,
    *,
    priority: int = 0,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    repetition: RepetitionDetectionParams | None = None,
    **fields: Any,
) -> Sequence:
    """Make a sequence of a request of its own, with the name as its id."""
    params = SamplingParams(
        max_tokens=max_length,
        min_tokens=min_tokens,
        prompt_logprobs=prompt_logprobs,
        repetition_detection=repetition,
    )
    request = Request(request_id=name, params=params, priority=priority)
    search = None if repetition is None else RepetitionSearch(repetition)
    return Sequence(request, token_ids, num_prompt_tokens, max_length, repetition=search, **fields)


def name_of(sequence: Sequence) -> str:
    """Return the name that a sequence was made with."""
    return sequence.request.request_id


def proposed(proposer: DraftProposer, sequence: Sequence) -> list[int]:
    """Return what a proposer proposes for a sequence."""
    (drafts,) = proposer.propose([sequence])
    return drafts


class NoState(abc.ABC):
    """A proposer that takes one sequence after the other, and keeps nothing of them."""

    @abc.abstractmethod
    def follow(self, sequence: Sequence) -> list[int]:
        """Return tokens that may follow a sequence's."""

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """Return them for each sequence."""
        return [self.follow(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        """Nothing is kept."""
        del sequence

    def forget(self, sequence: Sequence) -> None:
        """Nothing was kept."""
        del sequence


class Taken:
    """The state of a constraint that forces nothing: the tokens that it has taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> bytes | None:
        """All are allowed."""
        return None

    def allows(self, token: int) -> bool:
        """Whether the mask has it."""
        return in_mask(self.mask(), token)

    def forced(self) -> list[int]:
        """Nothing is."""
        return []

    def save(self) -> int:
        """Their number."""
        return len(self.taken)

    def restore(self, state: int) -> None:
        """Forgets the later ones."""
        del self.taken[state:]


STOP_STRING = "the stop string"


class StopAfter:
    """Text whose stop string is complete with the token of a number, counted from 1.

    Attributes:
        num_pushed: Number of tokens so far, up to that one.
    """

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self.num_pushed = 0

    def push_tokens(self, token_ids: list[int], /) -> tuple[str, int] | None:
        """Return the verdict of a detokenizer."""
        self.num_pushed = min(self.num_pushed + len(token_ids), self._num_tokens)
        return (STOP_STRING, self.num_pushed) if self.num_pushed == self._num_tokens else None
