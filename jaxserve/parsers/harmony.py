"""OpenAI's Harmony format (GPT-OSS): a completion is a sequence of messages, each with a header that names its channel.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from jaxserve.parsers.reasoning_format import ReasoningFormat
from jaxserve.parsers.reasoning_reader import ReasoningReader
from jaxserve.parsers.source import Reading, Source

Emit = Callable[[str], None]
MakeReader = Callable[[Emit], ReasoningReader]
"""Makes the reader of a message's reasoning."""

MESSAGE = "<|message|>"
CALL_START = "<|channel|>commentary to="
CALL_END = "<|call|>"
FUNCTIONS = "functions."

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", CALL_END)
_CHANNELS = ("analysis", "commentary", "final")
_MAX_HEADER_LENGTH = 400
_HEADER = re.compile(
    r"(?:<\|start\|>(?P<role>[\w.-]*))?(?:\s*to=(?P<early>[\w./:-]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w*)(?:\s+to=(?P<late>[\w./:-]+))?)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*(?P<message><\|message\|>)?"
)


class _Header(NamedTuple):
    """A message's header. The recipient may be written before the channel or after it."""

    channel: str = ""
    recipient: str = ""

    @property
    def is_call(self) -> bool:
        """Whether the message goes to a tool. The final channel is for the user, whatever the recipient."""
        if self.channel == "final" or self.recipient in ("", "user", "assistant"):
            return False
        return self.channel != "analysis" or self.recipient.startswith(FUNCTIONS)


class HarmonyReasoning(ReasoningFormat):
    """The analysis channel of Harmony's messages; the other channels are content.

    Tool calls remain in the content, in one form: <|channel|>commentary to=functions.f<|message|>{…}<|call|>. Messages
    of one kind are separated by a line break. Text without a valid header is content; so is a marker that neither ends
    the completion nor precedes a header. A header that the end of the completion cuts off is dropped.
    """

    start_text: ClassVar[str] = "<|channel|>analysis<|message|>"
    end_text: ClassVar[str] = "<|end|>"
    content_texts: ClassVar[tuple[str, ...]] = ("<|channel|>final", MESSAGE)
    call_texts: ClassVar[tuple[str, ...]] = ("<|channel|>commentary",)
    has_special_markers: ClassVar[bool] = True

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return True unless the prompt ends in the final channel: a final message's header has to come first."""
        return starts_inside is not False

    @classmethod
    def ends_inside(cls, turn: str) -> bool | None:
        """Return whether a turn ends inside an analysis message (True) or a final one (False); None for neither."""
        _, channel, message = turn.rpartition(_CHANNEL)
        header, is_open, body = message.partition(MESSAGE)
        if not channel or not is_open or any(end in body for end in _ENDS):
            return None
        name = header.strip()
        return True if name == "analysis" else False if re.match(r"final\b", name) else None

    @staticmethod
    def run(
        source: Source, starts_inside: bool | None, reasoning: Emit, content: Emit, make_reader: MakeReader
    ) -> Reading[None]:
        """Read to the end of the text.

        Args:
          source: The text.
          starts_inside: Whether the prompt has already opened the reasoning; None if it has no markers.
          reasoning: Receives the reasoning, without its markers.
          content: Receives the rest.
          make_reader: Makes a reader, which ends the reasoning where a tool call begins.
        """
        thoughts, texts = _Messages(reasoning), _Messages(content)
        header: _Header | None = _Header("analysis" if starts_inside else "")
        if starts_inside is None:
            header = (yield from _read_first_header(source, texts.add)) or header
        is_end_late = False
        while header is not None:
            if header.is_call:
                content(f"{CALL_START}{header.recipient}{MESSAGE}")
                header = yield from _read_body(source, ReasoningReader(source, content))
                if header is not None:
                    content(CALL_END)
                is_end_late = False
                continue
            is_analysis = header.channel == "analysis"
            messages = thoughts if is_analysis else texts
            reader = make_reader(thoughts.add) if is_analysis else ReasoningReader(source, texts.add)
            header = yield from _read_body(source, reader, drops_end=is_end_late)
            messages.end()
            is_end_late = reader.found_call


class _Messages:
    """Passes on messages, separated by line breaks."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._separator = ""
        self._has_text = False

    def add(self, text: str) -> None:
        """Append to the current message."""
        self._emit(self._separator + text)
        self._separator, self._has_text = "", True

    def end(self) -> None:
        """End the current message."""
        self._separator = "\n" if self._has_text else ""


def _read_first_header(source: Source, emit: Emit) -> Reading[_Header | None]:
    """Read the header at the beginning of a completion, whose prompt ends with <|start|>assistant."""
    source.hold()
    marker = yield from source.match(["to=", _START, _CHANNEL, MESSAGE])
    header = (yield from _read_header(source, marker)) if marker else None
    text = source.release()
    if header is None and text:
        emit(text)
    return header


def _read_body(source: Source, reader: ReasoningReader, *, drops_end: bool = False) -> Reading[_Header | None]:
    """Pass a message's text on.

    Args:
      source: The text.
      reader: Passes the text on.
      drops_end: Whether the first <|end|> is no text: it belongs to reasoning that a call has ended.

    Returns:
      The following message's header, an empty one if the message ends without another; None if the text ends first.
    """
    while True:
        marker = yield from reader.read_to([_START, _CHANNEL, *_ENDS])
        if not marker:
            return _Header() if reader.found_call else None
        source.hold()
        source.advance(len(marker))
        is_end = marker in _ENDS
        header = None
        if not is_end or (marker := (yield from source.match([_START, _CHANNEL]))):
            header = yield from _read_header(source, marker)
        elif source.is_ended and not source.rest().strip():
            source.advance(len(source.rest()))
            header = _Header()
        text = source.release()
        if header is not None:
            return header
        if drops_end and is_end:
            drops_end = False
            text = text[next(len(end) for end in _ENDS if text.startswith(end)) :]
        if text:
            reader.add(text)


def _read_header(source: Source, text: str) -> Reading[_Header | None]:
    """Read the rest of a header, up to its <|message|>.

    Returns:
      The header, an empty one if the end of the text cuts it off; None if it is not a header.
    """
    while not text.endswith(MESSAGE):
        if marker := (yield from source.match([_CHANNEL, _CONSTRAIN, MESSAGE])):
            text += marker
            continue
        character = yield from source.peek()
        if not character:
            break
        if character in "<{\n" or len(text) > _MAX_HEADER_LENGTH:
            return None
        source.advance(1)
        text += character
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    if not match["message"]:
        is_cut = "assistant".startswith(match["role"] or "") and _is_cut_channel(match["channel"])
        return _Header() if is_cut and text.startswith("<") else None
    return _Header(match["channel"] or "", match["late"] or match["early"] or "")


def _is_cut_channel(name: str | None) -> bool:
    return any(channel.startswith(name or "") for channel in _CHANNELS)
