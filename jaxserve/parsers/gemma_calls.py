"""Gemma 4's tool calls, call:name{key:<|"|>value<|"|>, …}, as JSON."""

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import escaped
from jaxserve.parsers.literals import LiteralReader
from jaxserve.parsers.source import NotACall, Reading

_QUOTE = '<|"|>'
_KEY_ENDS = (":", ",", "{", "}", "<")
_WORD_ENDS = (",", "}", "]", "<")


def read_gemma_call(reader: CallReader) -> Reading[None]:
    """Read one call, whose opening marker was already taken. It opens at its opening brace."""
    name = (yield from reader.source.read_identifier()).removeprefix("call:")
    if not name or (yield from reader.source.peek_past_space()) != "{":
        raise NotACall
    reader.open(name)
    yield from GemmaLiterals(reader.source, reader.message.add_arguments).read_value()
    reader.message.close_call(is_complete=True)


class GemmaLiterals(LiteralReader):
    """Converts Gemma 4's values: keys have no quotes, and those of strings are <|"|>, a token of its own.

    Strings have no escape sequences. Another word than true, false, null and a number is a string.
    """

    def read_string(self) -> Reading[bool]:
        """Pass on a string, if one follows; return whether one did."""
        source, emit = self.source, self.emit
        if not (yield from source.match([_QUOTE])):
            return False
        emit('"')
        if not (yield from source.read_to([_QUOTE], lambda text: emit(escaped(text)))):
            raise NotACall
        source.advance(len(_QUOTE))
        emit('"')
        return True

    def read_bare_key(self) -> Reading[None]:
        """Pass on the text up to a colon as a key."""
        self.source.hold()
        key, end = yield from self._read_text(_KEY_ENDS)
        if end != ":":
            if self.source.is_at_end and key:
                self.emit(f'"{escaped(key)}')
            raise NotACall
        self.source.release()
        self.emit(f'"{escaped(key)}"')

    def read_bare_word(self) -> Reading[str]:
        """Take and return the text up to a comma, a closing bracket or a marker."""
        return (yield from self._read_text(_WORD_ENDS))[0]

    def _read_text(self, ends: tuple[str, ...]) -> Reading[tuple[str, str]]:
        parts: list[str] = []
        end = yield from self.source.read_to(ends, parts.append)
        return "".join(parts).strip(), end
