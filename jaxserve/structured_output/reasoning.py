"""Structured outputs of models that reason: the rule holds from the end of the reasoning on, as in vLLM."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.parsers import reasoning_parser, starts_in_reasoning
from jaxserve.scheduling.sequence import Constraint
from jaxserve.text.tokenizer import Tokenizer

_TAIL_LENGTH = 32
"""Tokens of a prompt's end that hold an open or a closed reasoning, each mark spelled letter by letter at the worst."""


class ReasoningMarks(NamedTuple):
    """How a model marks its reasoning.

    Attributes:
        name: Of the format, in ``jaxserve.parsers``.
        start_ids: Tokens that begin it.
        end_ids: Tokens that end it.
    """

    name: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


class Reasoning(NamedTuple):
    """What of an answer may be reasoning.

    Attributes:
        marks: The model's.
        is_open: Whether the answer begins inside of it; None where it does if its first token is ``marks.start_ids``.
    """

    marks: ReasoningMarks
    is_open: bool | None


def find_reasoning(
    marks: ReasoningMarks, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], is_chat: bool
) -> Reasoning | None:
    """The reasoning that the answer to a prompt begins with; None where there is none.

    Args:
        marks: The model's.
        tokenizer: The model's.
        prompt_token_ids: They may have opened or closed the reasoning at their end.
        is_chat: Whether the prompt is a conversation, so that the format tells where the prompt says nothing. Other
            prompts have reasoning only where they have opened it.
    """
    tail = tokenizer.decode(prompt_token_ids[-_TAIL_LENGTH:], skip_special_tokens=False)
    is_open = starts_in_reasoning(tail, marks.name)
    if is_chat:
        is_open = reasoning_parser(marks.name).begins_inside(is_open)
    if is_open is None and not (is_chat and len(marks.start_ids) == 1):
        is_open = False
    return None if is_open is False else Reasoning(marks, is_open)


class AfterReasoning:
    """A `Constraint` that lets an answer reason freely, and then holds another.

    Args:
        rule: The other, at its start.
        reasoning: What comes before it.
    """

    def __init__(self, rule: Constraint, reasoning: Reasoning):
        self._rule = rule
        self._marks = reasoning.marks
        self._is_open = reasoning.is_open
        self._recent: list[int] = []

    def mask(self) -> bytes | None:
        """Tokens allowed next; None inside the reasoning."""
        if self._is_open:
            return None
        mask = self._rule.mask()
        if self._is_open is False or mask is None:
            return mask
        start = self._marks.start_ids[0]
        return mask[: start >> 3] + bytes([mask[start >> 3] | 1 << (start & 7)]) + mask[(start >> 3) + 1 :]

    def accept(self, token: int) -> bool:
        """Takes the next token; returns whether the text is complete with it."""
        if self._is_open is None:
            self._is_open = token == self._marks.start_ids[0]
            if self._is_open:
                return False
        if not self._is_open:
            return self._rule.accept(token)
        end = list(self._marks.end_ids)
        self._recent = [*self._recent, token][-len(end) :]
        self._is_open = self._recent != end
        return False
