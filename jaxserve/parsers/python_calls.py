"""Tool calls written in Python, name(key="value", …), as JSON."""

import contextlib
import json
import re
from collections.abc import Callable

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import MAX_DEPTH, escaped, whole_json
from jaxserve.parsers.source import MAX_NAME_LENGTH, NotACall, Reading

_WORDS = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROLS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_ESCAPES = {**_CONTROLS, "\n": "", "'": "'", '"': '"', "\\": "\\"}


class PythonCallReader:
    """Converts calls written in Python to JSON arguments.

    Values are literals: strings without a prefix, numbers, lists, dictionaries, True, False and None, and JSON's names
    of these. Another word is a string without quotes. Strings are passed on as they arrive.
    """

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._source = reader.source
        self._emit = reader.message.add_arguments

    def read_call(self) -> Reading[None]:
        """Read one call. It opens after its first key."""
        source = self._source
        name = yield from source.read_identifier()
        yield from source.expect("(")
        separator = "{"
        while (yield from source.peek_past_space()) != ")":
            key = yield from source.read_identifier()
            if source.is_at_end and separator != "{":
                self._emit(f'{separator}"{escaped(key)}')
            yield from source.expect("=")
            if separator == "{":
                self._reader.open(name)
            source.release()
            self._emit(f'{separator}"{escaped(key)}": ')
            separator = ", "
            yield from self._read_value(0)
            source.hold()
            if not (yield from source.match([","])):
                break
        yield from source.expect(")")
        if separator == "{":
            self._reader.open(name)
        source.release()
        self._emit("{}" if separator == "{" else "}")
        self._reader.message.close_call(is_complete=True)

    def _read_value(self, depth: int) -> Reading[None]:
        character = yield from self._source.peek_past_space()
        if character in ("'", '"'):
            yield from self._read_string()
        elif character == "[":
            yield from self._read_items("[]", self._read_value, depth)
        elif character == "{":
            yield from self._read_items("{}", self._read_entry, depth)
        else:
            self._emit((yield from self._read_word()))

    def _read_items(self, brackets: str, read_item: Callable[[int], Reading[None]], depth: int) -> Reading[None]:
        """Read a list or a dictionary."""
        if depth == MAX_DEPTH - 1:
            raise NotACall
        source = self._source
        source.advance(1)
        self._emit(brackets[0])
        is_first = True
        while (yield from source.peek_past_space()) != brackets[1]:
            if not is_first:
                yield from source.expect(",")
                if (yield from source.peek_past_space()) == brackets[1]:
                    break
                self._emit(", ")
            is_first = False
            yield from read_item(depth + 1)
        source.advance(1)
        self._emit(brackets[1])

    def _read_entry(self, depth: int) -> Reading[None]:
        """Read a key and its value; JSON's keys are strings."""
        if (yield from self._source.peek_past_space()) in ("'", '"'):
            yield from self._read_string()
        else:
            word = yield from self._read_word()
            self._emit(word if word.startswith('"') else json.dumps(word))
        yield from self._source.expect(":")
        self._emit(": ")
        yield from self._read_value(depth)

    def _read_word(self) -> Reading[str]:
        """Read a number or a name, and return it as JSON; the beginning of a string if the end may cut it off."""
        source = self._source
        source.hold()
        word = ""
        while (character := (yield from source.peek())) and (character.isalnum() or character in "+-._"):
            if len(word) > MAX_NAME_LENGTH:
                raise NotACall
            source.advance(1)
            word += character
        if not word:
            raise NotACall
        source.release()
        text = json.dumps(word, ensure_ascii=False)
        return _WORDS.get(word) or _number(word) or (text[:-1] if source.is_at_end else text)

    def _read_string(self) -> Reading[None]:
        """Read a string; its quotes may be tripled."""
        source = self._source
        end = yield from source.peek()
        source.advance(1)
        self._emit('"')
        if (yield from source.peek()) == end:
            source.advance(1)
            if (yield from source.peek()) != end:
                self._emit('"')
                return
            source.advance(1)
            end *= 3
        yield from self._read_text(end)
        self._emit('"')

    def _read_text(self, end: str) -> Reading[None]:
        source = self._source
        while (marker := (yield from source.read_to([end, "\\"], lambda text: self._emit(escaped(text))))) != end:
            if not marker:
                raise NotACall
            self._emit((yield from self._read_escape()))
        source.advance(len(end))

    def _read_escape(self) -> Reading[str]:
        """Read an escape sequence, and return it as it is written in JSON. Unknown ones are text, as in Python."""
        source = self._source
        source.advance(1)
        letter = yield from source.peek()
        if not letter:
            raise NotACall
        source.advance(1)
        if letter not in _HEX_LENGTHS:
            return escaped(_ESCAPES.get(letter, f"\\{letter}"))
        digits = ""
        while len(digits) < _HEX_LENGTHS[letter]:
            if (digit := (yield from source.peek())) not in _HEX:
                raise NotACall
            source.advance(1)
            digits += digit
        if int(digits, 16) > 0x10FFFF:
            raise NotACall
        return json.dumps(chr(int(digits, 16)))[1:-1]


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
