"""What a model's answer consists of: as a whole, and as what one more piece of text adds."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for.

    `arguments` is JSON text as the model wrote it (raw control characters in strings are escaped, so that it is JSON).
    Where a call broke off, because the answer was cut or went wrong, `is_complete` is False and `arguments` is the part
    before the break: the beginning of a JSON object.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True)
class ParsedMessage:
    """An answer, taken apart. Parts that did not appear are None or empty."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolCallDelta:
    """An addition to the call at `index`. The call's first delta, and no other, has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """An addition to an answer; joined, the deltas' texts are those of the `ParsedMessage`."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything in it."""
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
        """What has not been given out yet."""
        new = "".join(self.arguments[self.num_given :])
        self.num_given = len(self.arguments)
        first = not self.is_announced
        self.is_announced = True
        return ToolCallDelta(index, self.id if first else None, self.name if first else None, new)


class MessageBuilder:
    """Collects an answer while it is read. Each text given to it is final."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._given_content = 0
        self._given_reasoning = 0
        self._changed_calls: dict[int, None] = {}
        self.is_call_open = False
        self.is_after_call = False
        """Whether a call has come, and no content since."""

    @property
    def num_calls(self) -> int:
        """Calls so far, an open one included."""
        return len(self._calls)

    def add_content(self, text: str) -> None:
        """Append to the content."""
        if text:
            self._content.append(text)
            self.is_after_call = False

    def add_reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        if text:
            self._reasoning.append(text)

    def open_call(self, call_id: str, name: str) -> None:
        """Begin a call."""
        self._calls.append(_Call(call_id, name))
        self._changed_calls[len(self._calls) - 1] = None
        self.is_call_open = True

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the open call."""
        if text:
            self._calls[-1].arguments.append(text)
            self._changed_calls[len(self._calls) - 1] = None

    def close_call(self, *, is_complete: bool) -> None:
        """End the open call."""
        self._calls[-1].is_complete = is_complete
        self.is_call_open = False
        self.is_after_call = True

    def take_delta(self) -> MessageDelta:
        """Return what was added since the last time."""
        content = "".join(self._content[self._given_content :])
        reasoning = "".join(self._reasoning[self._given_reasoning :])
        self._given_content, self._given_reasoning = len(self._content), len(self._reasoning)
        calls = tuple(self._calls[index].delta(index) for index in self._changed_calls)
        self._changed_calls.clear()
        return MessageDelta(content or None, reasoning or None, calls)

    def message(self) -> ParsedMessage:
        """Return everything so far."""
        calls = tuple(ToolCall(call.id, call.name, "".join(call.arguments), call.is_complete) for call in self._calls)
        return ParsedMessage("".join(self._content) or None, "".join(self._reasoning) or None, calls)
