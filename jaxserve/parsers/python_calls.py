"""Tool calls written in Python, name(key="value", …), as JSON."""

import json

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import escaped
from jaxserve.parsers.literals import LiteralReader
from jaxserve.parsers.source import MAX_NAME_LENGTH, NotACall, Reading

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
        self._literals = PythonLiterals(reader.source, reader.message.add_arguments)

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
            yield from self._literals.read_value()
            source.hold()
            if not (yield from source.match([","])):
                break
        yield from source.expect(")")
        if separator == "{":
            self._reader.open(name)
        source.release()
        self._emit("{}" if separator == "{" else "}")
        self._reader.message.close_call(is_complete=True)


class PythonLiterals(LiteralReader):
    """Converts Python's literals."""

    def read_string(self) -> Reading[bool]:
        """Pass on a string, if one follows; return whether one did. Its quotes may be tripled."""
        source = self.source
        end = yield from source.peek_past_space()
        if end not in ("'", '"'):
            return False
        source.advance(1)
        self.emit('"')
        if (yield from source.peek()) == end:
            source.advance(1)
            if (yield from source.peek()) != end:
                self.emit('"')
                return True
            source.advance(1)
            end *= 3
        yield from self._read_text(end)
        self.emit('"')
        return True

    def read_bare_key(self) -> Reading[None]:
        """Pass on a number or a name as a key."""
        word = yield from self.read_word()
        self.emit(word if word.startswith('"') else json.dumps(word))

    def read_bare_word(self) -> Reading[str]:
        """Take and return a number or a name."""
        word = ""
        while (character := (yield from self.source.peek())) and (character.isalnum() or character in "+-._"):
            if len(word) > MAX_NAME_LENGTH:
                raise NotACall
            self.source.advance(1)
            word += character
        return word

    def _read_text(self, end: str) -> Reading[None]:
        source = self.source
        while (marker := (yield from source.read_to([end, "\\"], lambda text: self.emit(escaped(text))))) != end:
            if not marker:
                raise NotACall
            self.emit((yield from self._read_escape()))
        source.advance(len(end))

    def _read_escape(self) -> Reading[str]:
        """Read an escape sequence, and return it as it is written in JSON. Unknown ones are text, as in Python."""
        source = self.source
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
