"""Reasoning between two tags: what a format declares, and the reader of it."""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxserve.parsers.message import MessageBuilder
from jaxserve.parsers.reasoning_format import ReasoningFormat
from jaxserve.parsers.reasoning_reader import Finder, ReasoningReader
from jaxserve.parsers.source import Reading, Source

_SPECIAL_TOKEN = re.compile(r"\s*<[|｜][^<>|｜]*[|｜]>\s*")


class TagReasoning(ReasoningFormat):
    """<think>…</think>.

    A tool call among `call_texts` ends the reasoning wherever it comes: these markers are single tokens.
    """

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"
    label: ClassVar[str] = ""
    """Text that may follow `start_text` and is no reasoning."""
    content_tags: ClassVar[Mapping[str, str]] = {}
    """Tags that may surround the content, which are no part of it: the opening one -> the closing one."""
    is_open_by_default: ClassVar[bool] = False
    """Whether a completion begins with reasoning unless the prompt has closed it, even without `start_text`."""
    is_repeated: ClassVar[bool] = False
    """Whether reasoning may begin anywhere, not only at the beginning of the completion."""

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return whether a completion begins inside; None if it does only if it begins with `start_text`."""
        return starts_inside is not False if cls.is_open_by_default else starts_inside

    @classmethod
    def ends_inside(cls, turn: str) -> bool | None:
        """Return whether the beginning of an assistant's turn ends inside the reasoning (True) or after it (False);
        None if the turn has no text yet."""
        start, end = cls.start_text, cls.end_text
        if cls.is_repeated and start in turn:
            return turn.rfind(start) > turn.rfind(end)
        if turn.rstrip().endswith(start):  # after a tool's response in the same turn
            return True
        rest = turn.lstrip()
        while not rest.startswith(start) and (token := _SPECIAL_TOKEN.match(rest)):
            rest = rest[token.end() :]
        while rest.startswith(start):
            _, is_closed, rest = rest.partition(end)
            if not is_closed:
                return True
            rest = rest.lstrip()
        return False if rest or end in turn else None


class TagReader:
    """Reads reasoning between tags, in the text that a `CallReader` reads.

    Args:
      source: The text.
      message: Receives the reasoning.
      form: The format.
      finder: As in `ReasoningReader`.
    """

    def __init__(
        self, source: Source, message: MessageBuilder, form: type[TagReasoning], finder: Finder | None
    ) -> None:
        self._source = source
        self._message = message
        self._form = form
        self._finder = finder
        self._is_end_late = False
        # Special tokens are dropped even if the prompt has the opening tag.
        self._content_ends = tuple(form.content_tags.values()) if form.has_special_markers else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags that the content may have; the closing tag after a call ended the reasoning before it."""
        starts = (self._form.start_text,) if self._form.is_repeated else ()
        ends = (self._form.end_text,) if self._is_end_late else ()
        return (*starts, *ends, *self._content_ends)

    def begin(self, is_inside: bool | None, starts: Sequence[str], *, begins_line: bool) -> Reading[None]:
        """Read the reasoning at the beginning of the completion, and the tag before the content.

        Args:
          is_inside: Whether the prompt has opened the reasoning.
          starts: As in `ReasoningReader`.
          begins_line: As in `ReasoningReader`, if the completion has no opening tag.
        """
        if (yield from self._source.match([self._form.start_text])):
            yield from self._read(starts)
        elif is_inside:
            yield from self._read(starts, begins_line=begins_line)
        tag = yield from self._source.match([*self._form.content_tags])
        if tag:
            end = self._form.content_tags[tag]
            self._content_ends = (f"\n{end}", end)
            if (yield from self._source.peek()) == "\n":
                self._source.advance(1)

    def take(self, marker: str, starts: Sequence[str]) -> Reading[None]:
        """Continue after one of `markers`, which was taken from the content."""
        if marker in self._content_ends:
            yield from self._source.peek_past_space()
            return
        self._is_end_late = False
        if marker == self._form.start_text:
            yield from self._read(starts)

    def _read(self, starts: Sequence[str], *, begins_line: bool = True) -> Reading[None]:
        if self._form.label:
            yield from self._source.match([self._form.label])
        end, calls = self._form.end_text, [text for text in self._form.call_texts if text in starts]
        reader = ReasoningReader(
            self._source, self._message.add_reasoning, self._finder, starts, begins_line=begins_line
        )
        if (yield from reader.read_to([end, *calls])) == end:
            self._source.advance(len(end))
        else:
            self._is_end_late = not self._source.is_at_end
