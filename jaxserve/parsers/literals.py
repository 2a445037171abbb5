"""Literals that are written otherwise than in JSON, as JSON."""

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from jaxserve.parsers.json_scanner import MAX_DEPTH, whole_json
from jaxserve.parsers.source import NotACall, Reading, Source

_WORDS = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}


class LiteralReader(ABC):
    """Converts lists in brackets, dictionaries in braces, strings and words.

    Args:
      source: The text.
      emit: Receives the JSON. Strings are passed on as they arrive.
    """

    def __init__(self, source: Source, emit: Callable[[str], None]) -> None:
        self.source = source
        self.emit = emit

    def read_value(self, depth: int = 0) -> Reading[None]:
        """Pass on one value.

        Raises:
          NotACall: It is malformed or truncated.
        """
        if (yield from self.read_string()):
            return
        character = yield from self.source.peek_past_space()
        if character == "[":
            yield from self._read_items("[]", self.read_value, depth)
        elif character == "{":
            yield from self._read_items("{}", self._read_entry, depth)
        else:
            self.emit((yield from self.read_word()))

    def _read_items(self, brackets: str, read_item: Callable[[int], Reading[None]], depth: int) -> Reading[None]:
        """Read a list or a dictionary."""
        if depth == MAX_DEPTH - 1:
            raise NotACall
        source = self.source
        source.advance(1)
        self.emit(brackets[0])
        is_first = True
        while (yield from source.peek_past_space()) != brackets[1]:
            if not is_first:
                yield from source.expect(",")
                if (yield from source.peek_past_space()) == brackets[1]:
                    break
                self.emit(", ")
            is_first = False
            yield from read_item(depth + 1)
        source.advance(1)
        self.emit(brackets[1])

    def _read_entry(self, depth: int) -> Reading[None]:
        """Read a key and its value; JSON's keys are strings."""
        if not (yield from self.read_string()):
            yield from self.read_bare_key()
        yield from self.source.expect(":")
        self.emit(": ")
        yield from self.read_value(depth)

    def read_word(self) -> Reading[str]:
        """Read a number or a name, and return it as JSON; the beginning of a string if the end may cut it off."""
        source = self.source
        source.hold()
        word = yield from self.read_bare_word()
        if not word:
            raise NotACall
        source.release()
        text = json.dumps(word, ensure_ascii=False)
        return _WORDS.get(word) or _number(word) or (text[:-1] if source.is_at_end else text)

    @abstractmethod
    def read_string(self) -> Reading[bool]:
        """Pass on a string, if one follows; return whether one did."""

    @abstractmethod
    def read_bare_key(self) -> Reading[None]:
        """Pass on a key without quotes."""

    @abstractmethod
    def read_bare_word(self) -> Reading[str]:
        """Take and return what is neither a string nor in brackets; it becomes a string unless it is a number."""


def _number(word: str) -> str:
    """Return a number as JSON; "" if it is not one that JSON has."""
    if whole_json(word):
        return word
    if not re.match(r"[+-]?\.?[0-9]", word):
        return ""
    try:
        return str(int(word, 0))
    except ValueError:
        with contextlib.suppress(ValueError):
            return json.dumps(float(word), allow_nan=False)
    return ""
