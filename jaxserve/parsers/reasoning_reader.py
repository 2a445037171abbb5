"""Reads reasoning up to its end, or up to a tool call inside it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.parsers.source import Reading, Source, first_marker, partial_length


class Finder(Protocol):
    """Finds calls of offered tools."""

    def find(self, source: Source) -> Reading[int]:
        """Return 0 if the unread text begins with a call; otherwise how many of its characters were tried."""
        ...


class ReasoningReader:
    """Passes reasoning on.

    A marker opens a call only if it begins a line, and a call of an offered tool follows. Until that is certain, the
    text is held back; other markers are reasoning.

    Args:
      source: The text.
      emit: Receives the reasoning.
      finder: Finds calls; None if there are none to find.
      starts: Markers at which calls may begin.
      begins_line: Whether the text begins a line.
    """

    def __init__(
        self,
        source: Source,
        emit: Callable[[str], None],
        finder: Finder | None = None,
        starts: Sequence[str] = (),
        *,
        begins_line: bool = True,
    ) -> None:
        self._source = source
        self._emit = emit
        self._finder = finder
        self._starts = () if finder is None else tuple(starts)
        self._begins_line = begins_line
        self._is_after_marker = False  # inside a line: markers right after one that opens no call open none either
        self._num_tried = 0  # characters already searched for a call; searching them once keeps the work linear
        self.found_call = False

    def read_to(self, ends: Sequence[str]) -> Reading[str]:
        """Pass reasoning on up to one of `ends` or to a call, which stay unread.

        Returns:
          The end; "" if a call begins (`found_call`), or the text ends.
        """
        markers = [*ends, *self._starts]
        while True:
            text = self._source.rest()
            index, marker = first_marker(text, markers)
            if not marker and not self._source.is_ended:
                index -= partial_length(text, markers)
            self._pass(text[:index])
            if marker in ends or (not marker and self._source.is_ended):
                return marker
            if marker and (yield from self._begins_call()):
                self.found_call = True
                return ""
            if marker:
                begins_line = self._begins_line
                self._pass(marker)
                self._is_after_marker = not begins_line
            else:
                yield

    def add(self, text: str) -> None:
        """Pass on text that was taken from the source."""
        self._emit(text)
        if self._is_after_marker:
            text = text.lstrip()
            self._is_after_marker = not text
        if not self._is_after_marker:
            _, is_broken, line = text.rpartition("\n")
            self._begins_line = not line.strip() and (bool(is_broken) or self._begins_line)

    def _begins_call(self) -> Reading[bool]:
        if self._finder is None or not self._begins_line or self._num_tried > 0:
            return False
        self._num_tried = yield from self._finder.find(self._source)
        return self._num_tried == 0

    def _pass(self, text: str) -> None:
        if text:
            self.add(text)
            self._source.advance(len(text))
            self._num_tried -= len(text)
