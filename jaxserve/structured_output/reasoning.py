"""Structured outputs of reasoning models: as in vLLM, constraints apply after the end of the reasoning."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.api.chat_messages import LastMessage
from jaxserve.parsers import last_turn, reasoning_parser, starts_in_reasoning
from jaxserve.scheduling.sequence import Constraint
from jaxserve.text.tokenizer import Tokenizer

_TAIL_LENGTH = 512
"""Number of last prompt tokens to search for the beginning of the last turn; four times as many if it is not there."""


class ReasoningMarkers(NamedTuple):
    """Tokens that delimit a model's reasoning.

    Attributes:
        name: Name of the reasoning parser.
        start_ids: Tokens that start the reasoning.
        end_ids: Tokens that end it.
        content_ids: Tokens of the texts after which the content starts.
    """

    name: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    content_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def texts(self) -> tuple[str, str]:
        """The texts that start and end the reasoning."""
        form = reasoning_parser(self.name)
        return form.start_text, form.end_text


class Reasoning(NamedTuple):
    """How an output may start with reasoning.

    Attributes:
        markers: Markers of the model.
        is_open: Whether the output starts inside the reasoning; None if that depends on whether its first token is
            ``markers.start_ids``.
    """

    markers: ReasoningMarkers
    is_open: bool | None


def find_reasoning(
    markers: ReasoningMarkers,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    is_chat: bool,
    last_message: LastMessage | None = None,
) -> Reasoning | None:
    """Return how the output of a prompt may start with reasoning; None if it cannot.

    Args:
        markers: Markers of the model.
        tokenizer: Tokenizer of the model.
        prompt_token_ids: The prompt, which may start or end the reasoning itself.
        is_chat: Whether the prompt is a conversation; then the reasoning parser decides if the prompt has no markers.
            Other prompts have reasoning only if they start it.
        last_message: The last message of the conversation.
    """
    text = _last_text(tokenizer, prompt_token_ids, last_message)
    is_open = starts_in_reasoning(text, markers.name, last_message)
    if is_chat:
        is_open = reasoning_parser(markers.name).begins_inside(is_open)
    if is_open is None and not (is_chat and len(markers.start_ids) == 1):
        is_open = False
    return None if is_open is False else Reasoning(markers, is_open)


def open_section(
    markers: ReasoningMarkers,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    is_chat: bool,
    last_message: LastMessage | None = None,
) -> Sequence[int]:
    """Return the prompt if it may end inside reasoning; nothing if only other turns than the last have markers.

    The arguments are those of `find_reasoning`.
    """
    text = _last_text(tokenizer, prompt_token_ids, last_message)
    is_open = starts_in_reasoning(text, markers.name, last_message)
    is_turn = is_chat or last_turn(text) is not None
    return () if is_open is False or (is_open is None and is_turn) else prompt_token_ids


def _last_text(tokenizer: Tokenizer, token_ids: Sequence[int], last_message: LastMessage | None) -> str:
    """Return the text of a prompt, at least from where its last turn begins."""
    num_tokens = _TAIL_LENGTH
    while True:
        text = tokenizer.decode(token_ids[-num_tokens:], skip_special_tokens=False)
        message = "" if last_message is None else last_message.text
        before = text.rstrip().removesuffix(message.strip())
        if num_tokens >= len(token_ids) or (len(text) > len(message) and last_turn(before) is not None):
            return text
        num_tokens *= 4


class AfterReasoning:
    """A `Constraint` that applies another one after the reasoning.

    The end of the reasoning is found in the text because its last characters may share a token with what follows.

    Args:
        constraint: The other constraint, in its initial state.
        reasoning: How the output starts with reasoning.
        text_of: Returns the text of a token.
    """

    def __init__(self, constraint: Constraint, reasoning: Reasoning, text_of: Callable[[int], str]):
        self._constraint = constraint
        self._markers = reasoning.markers
        self._is_open = reasoning.is_open
        self._text_of = text_of
        self._awaited = list(reasoning_parser(self._markers.name).content_start())
        self._text = ""

    def mask(self) -> bytes | None:
        """Return the mask of the tokens allowed next; None inside the reasoning."""
        if self._is_open:
            return None
        mask = self._constraint.mask()
        if self._is_open is False or mask is None:
            return mask
        start = self._markers.start_ids[0]
        return mask[: start >> 3] + bytes([mask[start >> 3] | 1 << (start & 7)]) + mask[(start >> 3) + 1 :]

    def allows(self, token: int) -> bool:
        """See ``Constraint``."""
        if self._is_open or (self._is_open is None and token == self._markers.start_ids[0]):
            return True
        return self._constraint.allows(token)

    def accept(self, token: int) -> bool:
        """Advance by the next token; return whether it completes the output."""
        if self._is_open is None:
            self._is_open = token == self._markers.start_ids[0]
            if self._is_open:
                return False
        if not self._is_open:
            return self._constraint.accept(token)
        self._text += self._text_of(token)
        while self._awaited and self._awaited[0] in self._text:
            _, _, self._text = self._text.partition(self._awaited.pop(0))
        self._is_open = bool(self._awaited)
        if self._is_open:
            self._text = self._text[max(0, len(self._text) - len(self._awaited[0]) + 1) :]
        return False

    def forced(self) -> list[int]:
        """See ``Constraint``: nothing before it is known that there is no reasoning, or that it has ended."""
        return self._constraint.forced() if self._is_open is False else []

    def save(self) -> tuple[Any, bool | None, str, list[str]]:
        """See ``Constraint``."""
        return self._constraint.save(), self._is_open, self._text, self._awaited.copy()

    def restore(self, state: tuple[Any, bool | None, str, list[str]]) -> None:
        """See ``Constraint``."""
        own, self._is_open, self._text, self._awaited = state
        self._constraint.restore(own)
