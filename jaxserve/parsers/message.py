"""Parsed messages, and the deltas that each piece of text adds."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model.

    `arguments` is JSON as the model wrote it (raw control characters in strings are escaped to make it valid). If the
    call was truncated or malformed, `is_complete` is False and `arguments` has the part before the error: the beginning
    of a JSON object.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True)
class ParsedMessage:
    """A parsed completion. Missing parts are None or empty."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolCallDelta:
    """An addition to the call at `index`. Only the call's first delta has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """An addition to a message; concatenating the deltas' texts gives those of the `ParsedMessage`."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the delta adds anything."""
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])
    is_complete: bool = False
    is_announced: bool = False
    num_given: int = 0

    def delta(self, index: int) -> ToolCallDelta:
        """Return what has not been returned yet."""
        new = "".join(self.arguments[self.num_given :])
        self.num_given = len(self.arguments)
        first = not self.is_announced
        self.is_announced = True
        return ToolCallDelta(index, self.id if first else None, self.name if first else None, new)


class MessageBuilder:
    """Builds a message while its completion is read. Each text passed to it is final.

    Args:
      check: Called before content is added (with None) and before a call opens (with its name); may raise.
    """

    def __init__(self, check: Callable[[str | None], None] | None = None) -> None:
        self._check = check
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._given_content = 0
        self._given_reasoning = 0
        self._changed_calls: dict[int, None] = {}
        self.is_call_open = False
        self.is_after_call = False
        """Whether the latest part is a call, without content after it."""

    @property
    def num_calls(self) -> int:
        """Number of calls so far, including an open one."""
        return len(self._calls)

    @property
    def is_empty(self) -> bool:
        """Whether there is neither content nor a call."""
        return not self._content and not self._calls

    def add_content(self, text: str) -> None:
        """Append to the content."""
        if text:
            if self._check is not None:
                self._check(None)
            self._content.append(text)
            self.is_after_call = False

    def add_reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        if text:
            self._reasoning.append(text)

    def open_call(self, call_id: str, name: str) -> None:
        """Open a call."""
        if self._check is not None:
            self._check(name)
        self._calls.append(_Call(call_id, name))
        self._changed_calls[len(self._calls) - 1] = None
        self.is_call_open = True

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the open call."""
        if text:
            self._calls[-1].arguments.append(text)
            self._changed_calls[len(self._calls) - 1] = None

    def close_call(self, *, is_complete: bool) -> None:
        """Close the open call."""
        self._calls[-1].is_complete = is_complete
        self.is_call_open = False
        self.is_after_call = True

    def take_delta(self) -> MessageDelta:
        """Return what was added since the last call of this method."""
        content = "".join(self._content[self._given_content :])
        reasoning = "".join(self._reasoning[self._given_reasoning :])
        self._given_content, self._given_reasoning = len(self._content), len(self._reasoning)
        calls = tuple(self._calls[index].delta(index) for index in self._changed_calls)
        self._changed_calls.clear()
        return MessageDelta(content or None, reasoning or None, calls)

    def message(self) -> ParsedMessage:
        """Return the message so far."""
        calls = tuple(ToolCall(call.id, call.name, "".join(call.arguments), call.is_complete) for call in self._calls)
        return ParsedMessage("".join(self._content) or None, "".join(self._reasoning) or None, calls)
