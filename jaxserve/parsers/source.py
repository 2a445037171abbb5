"""Text that arrives in pieces, read as if it were complete.

A format is a generator that reads a `Source` and yields whenever it needs more text. It sees a sequence of characters,
never the pieces, so its results cannot depend on how the text is divided.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
# Yields when the available text is used up before the end; the driver resumes it after the next piece.
Reading = Generator[None, None, Result]

MAX_NAME_LENGTH = 256
"""Longest name of a tool; longer text is not a call."""
MAX_HELD_LENGTH = 8192
"""Most characters that are held back until it is certain whether a marker begins a call, and most white space that is
looked through before a marker."""


class NotACall(Exception):
    """The text that was being read as a tool call is not one, or is malformed."""


class Source:
    """The unread rest of a text. Held text was already read, but becomes content if it turns out not to be a call.

    A piece costs as much as its own length and that of the unread text, however much is held.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._num_before = 0  # characters before the text
        self._held_from: int | None = None
        self._held_before: list[str] = []  # held pieces that are no longer in the text
        self.is_ended = False

    def feed(self, text: str) -> None:
        """Append a piece."""
        if self._held_from is not None:
            self._held_before.append(self._text[self._held_from : self._position])
            self._held_from = 0
        self._num_before += self._position
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self.is_ended = True

    def rest(self) -> str:
        """Return the unread text that is available."""
        return self._text[self._position :]

    @property
    def num_read(self) -> int:
        """Number of characters read."""
        return self._num_before + self._position

    @property
    def is_at_end(self) -> bool:
        """Whether all text has been read."""
        return self.is_ended and self._position == len(self._text)

    def advance(self, count: int) -> None:
        """Mark characters as read."""
        self._position += count

    def hold(self) -> None:
        """Start holding the text that is read."""
        self._held_from, self._held_before = self._position, []

    def held(self) -> str:
        """Return the text read since `hold`; empty when nothing is held."""
        if self._held_from is None:
            return ""
        return "".join([*self._held_before, self._text[self._held_from : self._position]])

    def release(self) -> str:
        """Return the text read since `hold` and stop holding; empty when nothing is held."""
        held = self.held()
        self._held_from, self._held_before = None, []
        return held

    def rewind(self, num_held: int) -> None:
        """Unread the held text after its first `num_held` characters."""
        assert self._held_from is not None
        held = self.held()
        self._num_before = self.num_read - len(held)
        self._text = held + self.rest()
        self._held_from, self._held_before, self._position = 0, [], num_held

    def peek(self) -> Reading[str]:
        """Read the next character without taking it; empty at the end."""
        while self._position == len(self._text):
            if self.is_ended:
                return ""
            yield
        return self._text[self._position]

    def peek_past_space(self) -> Reading[str]:
        """Take white space, then peek."""
        while (character := (yield from self.peek())).isspace():
            self.advance(1)
        return character

    def expect(self, character: str) -> Reading[None]:
        """Take white space and one character.

        Raises:
          NotACall: Another character, or the end.
        """
        if (yield from self.peek_past_space()) != character:
            raise NotACall
        self.advance(1)

    def match(self, options: Sequence[str]) -> Reading[str]:
        """Take white space, at most `MAX_HELD_LENGTH` characters, and the first option that follows it; return "" and
        take nothing if none does."""
        while True:
            rest = self.rest()
            text = rest.lstrip()
            if len(rest) - len(text) > MAX_HELD_LENGTH:
                return ""
            for option in options:
                if text.startswith(option):
                    self.advance(len(rest) - len(text) + len(option))
                    return option
            if self.is_ended or not any(option.startswith(text) for option in options):
                return ""
            yield

    def take(self, *spellings: str) -> Reading[None]:
        """Take white space and a marker in one of its spellings.

        Raises:
          NotACall: Other text, or the end.
        """
        if not (yield from self.match(spellings)):
            raise NotACall

    def skip_all(self, markers: Sequence[str]) -> Reading[list[str]]:
        """Take all markers that follow, with the white space before them, and return them; also one that the end cuts
        off."""
        taken: list[str] = []
        while marker := (yield from self.match(markers)):
            taken.append(marker)
        rest = self.rest().strip()
        if self.is_ended and rest and any(marker.startswith(rest) for marker in markers):
            self.advance(len(self.rest()))
        return taken

    def read_name(self, end: str) -> Reading[str]:
        """Take a name and the marker after it; return the name.

        Raises:
          NotACall: No marker within `MAX_NAME_LENGTH` characters, or characters that no name has.
        """
        name = ""
        while not name.endswith(end):
            character = yield from self.peek()
            if not character or character in "<\n{" or len(name) > MAX_NAME_LENGTH:
                raise NotACall
            self.advance(1)
            name += character
        name = name.removesuffix(end).strip()
        if not name:
            raise NotACall
        return name

    def read_identifier(self) -> Reading[str]:
        """Take white space and a name of letters, digits and "_-./:"; return the name.

        Raises:
          NotACall: There is no name, or one of more than `MAX_NAME_LENGTH` characters.
        """
        name = ""
        character = yield from self.peek_past_space()
        while character and (character.isalnum() or character in "_-./:") and len(name) <= MAX_NAME_LENGTH:
            self.advance(1)
            name += character
            character = yield from self.peek()
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise NotACall
        return name

    def read_to(self, markers: Sequence[str], emit: Callable[[str], None]) -> Reading[str]:
        """Pass text on up to the first of several markers, which stays unread; return the marker, or "" at the end."""
        while True:
            text = self.rest()
            index, marker = first_marker(text, markers)
            if not marker and not self.is_ended:
                index -= partial_length(text, markers)
            if index:
                emit(text[:index])
            self.advance(index)
            if marker or self.is_ended:
                return marker
            yield


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the first marker in `text` and its index; the text's length and "" if there is none."""
    first, found = len(text), ""
    for marker in markers:
        index = text.find(marker, 0, first + len(marker))
        if index >= 0 and (index, marker) < (first, found):
            first, found = index, marker
    return first, found


def partial_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    firsts = {marker[0] for marker in markers}
    for length in range(longest, 0, -1):
        if text[-length] not in firsts:
            continue
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
