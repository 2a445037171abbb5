"""Reads a message: opens its tool calls, and passes on the content between them."""

import re
from collections.abc import Callable, Sequence

from jaxserve.parsers.message import MessageBuilder
from jaxserve.parsers.source import MAX_HELD_LENGTH, NotACall, Reading, Source, first_marker, partial_length
from jaxserve.parsers.tag_reasoning import TagReader

Spellings = tuple[str, ...]
"""A marker, in each form in which models write it."""


class CallReader:
    """Reads calls from a source into a message, and the content between them.

    A call opens when its name is known and its arguments have started correctly. Until then its text is held, and
    becomes content if it turns out not to be a call. An open call stays a call: if it is malformed, it ends there,
    incomplete, and reading continues as content with the offending character.

    The markers of calls are never content. A block without a readable call is content as a whole, with its markers.

    Args:
      source: The text.
      message: The message.
      make_id: Makes the ids of calls.
      tags: Reasoning between tags in the content; None if there is none.
    """

    def __init__(
        self, source: Source, message: MessageBuilder, make_id: Callable[[], str], tags: TagReader | None = None
    ) -> None:
        self.source = source
        self.message = message
        self._make_id = make_id
        self._tags = tags
        self._ids: set[str] = set()
        self._dropped: dict[Spellings, None] = {}  # closing markers of calls
        self._spared: list[Spellings] = []  # those of a block that is content
        self._space = ""  # content that is dropped if a call follows
        self._lead = ""  # content between the held markers, which are dropped if a call follows
        self._num_searched = 0  # characters without a marker that ends a lead; one search keeps the work linear

    def open(self, name: str, call_id: str | None = None) -> None:
        """Open a call; the held text is its beginning. It gets a new id if the model wrote none, or one twice."""
        self.source.release()
        if self._lead.strip():
            self.message.add_content(self._space + self._lead.rstrip())
        self._space = self._lead = ""
        if call_id is None or call_id in self._ids:
            call_id = self._make_id()
        self._ids.add(call_id)
        self.message.open_call(call_id, name)

    def add_content(self, text: str) -> None:
        """Append to the content."""
        if text:
            self.message.add_content(self._space + text)
            self._space = ""

    def release(self) -> str:
        """Make the held text content, and return it."""
        text = self.source.release()
        self._lead = ""
        self.add_content(text)
        return text

    def attempt(self, reading: Reading[None]) -> Reading[bool]:
        """Read a possible call; return whether it was one. If not, its text becomes content.

        Held text of an open call is part of the call if the end of the text cuts it off, and content otherwise.
        """
        num_calls = self.message.num_calls
        try:
            yield from reading
        except NotACall:
            if self.message.is_call_open:
                self.message.close_call(is_complete=False)
                if self.source.is_at_end:
                    self.source.release()
            self.release()
        return self.message.num_calls > num_calls

    def read_block(
        self, reading: Reading[None], closings: Sequence[Spellings], outer: Sequence[Spellings] = ()
    ) -> Reading[None]:
        """Read a possible call and its closing markers.

        Args:
          reading: Reads the call.
          closings: The closing markers of the block, which are content with it if it is no call.
          outer: Those of the blocks around it.
        """
        if (yield from self.attempt(reading)):
            yield from self.close(*closings, *outer)
        else:
            self._spared = [*closings]

    def close(self, *closings: Spellings) -> Reading[None]:
        """Take the closing markers that follow a call; from now on they are dropped wherever they come."""
        self.drop(*closings)
        self._spared = []
        yield from self.source.skip_all([spelling for spellings in self._dropped for spelling in spellings])

    def drop(self, *closings: Spellings) -> None:
        """Drop these closing markers from now on."""
        self._dropped.update(dict.fromkeys(closings))

    def read_lead(self, stops: Sequence[str], dropped: Sequence[str] = (), ends: Sequence[str] = ()) -> Reading[str]:
        """Take text between a held marker and the one that begins a call. It is content, without the markers.

        Args:
          stops: Markers that begin a call; the first is taken.
          dropped: Markers that may come before.
          ends: Markers that come after the calls.

        Returns:
          The stop; "" if none comes, or too late: then the held marker is content, and the text after it is unread.
        """
        source, markers = self.source, [*stops, *ends]
        held, begin = source.held(), source.num_read
        self._num_searched = max(self._num_searched, begin)
        while True:
            text, num_searched = source.rest(), self._num_searched - begin
            index, marker = first_marker(text[num_searched:], markers)
            index += num_searched
            if not marker and not source.is_ended:
                index -= partial_length(text, markers)
            is_late = index > MAX_HELD_LENGTH
            self._num_searched = begin + min(index, MAX_HELD_LENGTH)
            if is_late or marker in ends or (source.is_ended and not marker):
                self.release()
                self._spared = [tuple(ends)]
                return ""
            if marker:
                source.advance(index + len(marker))
                self._lead = held[: len(held) - len(held.lstrip())] + _without(text[:index], dropped)
                return marker
            yield

    def read_content(self, markers: Sequence[str], separator: str = "") -> Reading[str]:
        """Pass content on up to a marker; take the marker and return it, or "" at the end of the text.

        The marker is held, with the white space before it and, right after a call, the separator: they become content
        only if no call follows. White space between a call and the end of the text is dropped. Of white space, the last
        `MAX_HELD_LENGTH` characters are held at most, and what is before them is content.
        """
        source, message = self.source, self.message
        while True:
            text = source.rest()
            others = self._other_markers()
            index, marker = first_marker(text, [*markers, *others])
            if not marker and source.is_ended:
                self._end_content(text, separator)
                return ""
            if not marker:
                index -= partial_length(text, [*markers, *others])
            before = text[:index]
            if markers or message.is_after_call:
                before = before.rstrip()
            if separator and message.is_after_call and before.strip() == separator:
                before = ""
            before = text[: max(len(before), index - MAX_HELD_LENGTH)]
            self.add_content(before)
            source.advance(len(before))
            if marker in markers:
                source.hold()
                source.advance(index - len(before) + len(marker))
                return marker
            if marker:
                if not message.is_after_call:
                    self._hold_space(text[len(before) : index])
                source.advance(index - len(before) + len(marker))
                yield from self._take_other(marker, markers)
            else:
                yield

    def _hold_space(self, text: str) -> None:
        self._space += text
        if len(self._space) > MAX_HELD_LENGTH:
            self.message.add_content(self._space)
            self._space = ""

    def _end_content(self, text: str, separator: str) -> None:
        self.source.advance(len(text))
        text = self._space + text
        self._space = ""
        if not (self.message.is_after_call and text.strip() in ("", separator)):
            self.message.add_content(text)

    def _other_markers(self) -> list[str]:
        """Return the markers that the content may have and that begin no call."""
        tags = () if self._tags is None else self._tags.markers
        return [*tags, *(spelling for spellings in self._dropped for spelling in spellings)]

    def _take_other(self, marker: str, starts: Sequence[str]) -> Reading[None]:
        spared = [spellings for spellings in self._spared if marker in spellings]
        if self._tags is not None and marker in self._tags.markers:
            yield from self._tags.take(marker, starts)
        elif spared:
            self._spared.remove(spared[0])
            self.add_content(marker)


def _without(text: str, markers: Sequence[str]) -> str:
    """Return a text without markers that are in it."""
    return re.sub("|".join(map(re.escape, markers)), "", text) if markers else text
