"""Tool calls in tags: <function=name><parameter=key>value</parameter></function>, with types from the schemas."""

import json
import re

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import escaped, whole_json
from jaxserve.parsers.schema_types import Schemas, value_types
from jaxserve.parsers.source import NotACall, Reading

FUNCTION_START = "<function="
_FUNCTION_END = "</function>"
_PARAMETER_START = "<parameter="
_PARAMETER_END = "</parameter>"
_CALL_END = "</tool_call>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER_START, _FUNCTION_END)
_INNER_ENDS = ((_PARAMETER_END,), (_FUNCTION_END,))
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class TagCallReader:
    """Converts calls in tags to JSON arguments.

    A value is a string unless the tool's schema allows another type that it can be parsed as. String values are passed
    on as they arrive, others when they are complete. A value ends at its closing tag, or at a tag that has to come
    after it.
    """

    def __init__(self, reader: CallReader, schemas: Schemas) -> None:
        self._reader = reader
        self._schemas = schemas

    def read_function(self) -> Reading[None]:
        """Read one function, whose opening marker was already taken; it ends at its own or the call's closing tag."""
        source = self._reader.source
        name = yield from source.read_name(">")
        is_opened = False
        try:
            while (yield from source.match([_PARAMETER_START])):
                yield from self._read_parameter(name, is_opened)
                is_opened = True
                source.hold()
            yield from self._read_end()
        except NotACall:
            if is_opened or self._reader.message.is_call_open:
                self._reader.drop(*_INNER_ENDS)
            raise
        if not is_opened:
            self._reader.open(name)
        source.release()
        self._reader.message.add_arguments("}" if is_opened else "{}")
        self._reader.message.close_call(is_complete=True)

    def _read_end(self) -> Reading[None]:
        """Take the closing tag of the function; that of the call stays unread."""
        source = self._reader.source
        tag = yield from source.match([_FUNCTION_END, _CALL_END])
        if tag == _CALL_END:
            source.rewind(len(source.held()) - len(_CALL_END))
        elif not tag:
            if self._reader.message.is_call_open:
                yield from source.skip_all([_PARAMETER_START, _FUNCTION_END, _CALL_END])  # one that the end cuts off
            raise NotACall

    def _read_parameter(self, name: str, is_opened: bool) -> Reading[None]:
        """Read a parameter, whose opening marker was already taken; the first one opens the call."""
        source, message = self._reader.source, self._reader.message
        separator = ", " if is_opened else "{"
        num_held = len(source.held())
        try:
            key = yield from source.read_name(">")
        except NotACall:
            cut = source.held()[num_held:]
            if is_opened and source.is_at_end and cut:
                message.add_arguments(f'{separator}"{escaped(cut)}')
            raise
        if is_opened:
            source.release()
        else:
            self._reader.open(name)
        message.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        types = value_types(self._schemas.get(name, {}), key)
        end = yield from self._read_value(types)
        if not end:
            raise NotACall
        source.advance(len(end) if end == _PARAMETER_END else 0)

    def _read_value(self, types: frozenset[str]) -> Reading[str]:
        """Pass a value on; return the tag that ends it, which stays unread, or "" at the end of the text."""
        source, message = self._reader.source, self._reader.message
        trimmed = _TrimmedValue()
        if types <= {"string"}:
            message.add_arguments('"')
            end = yield from source.read_to(
                _VALUE_ENDS, lambda text: message.add_arguments(escaped(trimmed.more(text)))
            )
            message.add_arguments('"' if end else escaped(trimmed.kept))
        else:
            parts: list[str] = []
            end = yield from source.read_to(_VALUE_ENDS, lambda text: parts.append(trimmed.more(text)))
            message.add_arguments(_typed("".join(parts), types))
        return end


class _TrimmedValue:
    """A value without the line break after its opening tag and the one before its closing tag."""

    def __init__(self) -> None:
        self._is_begun = False
        self.kept = ""

    def more(self, text: str) -> str:
        """Append text and return what is certainly part of the value."""
        if not self._is_begun and text:
            self._is_begun = True
            text = text.removeprefix("\n")
        text = self.kept + text
        self.kept = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")


def _typed(written: str, types: frozenset[str]) -> str:
    """Return a value as JSON of the first type that it can be parsed as, otherwise as a string."""
    text = written.strip()
    word = text.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if types & {"integer", "number"} and (match := _NUMBER.fullmatch(text)):
        if "number" in types or not (match[2] or match[3]):
            return text
    for name, start in (("object", "{"), ("array", "[")):
        if name in types and text.startswith(start) and (made := whole_json(text)):
            return made
    return json.dumps(written, ensure_ascii=False)
