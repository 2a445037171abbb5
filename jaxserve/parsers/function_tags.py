"""Tool calls in tags: <function=name><parameter=key>value</parameter></function>, with types from the schemas."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from jaxserve.parsers.call_object import CallReader
from jaxserve.parsers.json_scanner import escaped, whole_json
from jaxserve.parsers.source import NotACall, Reading

FUNCTION_START = "<function="
_FUNCTION_END = "</function>"
_PARAMETER_START = "<parameter="
_PARAMETER_END = "</parameter>"
_CALL_END = "</tool_call>"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its parameters."""


class TagCallReader:
    """Converts calls in tags to JSON arguments.

    A value is a string unless the tool's schema allows another type that it can be parsed as. String values are passed
    on as they arrive, others when they are complete.
    """

    def __init__(self, reader: CallReader, schemas: Schemas) -> None:
        self._reader = reader
        self._schemas = schemas

    def read_function(self) -> Reading[None]:
        """Read one function, whose opening marker was already taken; it ends at its own or the call's closing tag."""
        source, message = self._reader.source, self._reader.message
        name = yield from source.read_name(">")
        is_opened = False
        while True:
            if is_opened:
                source.hold()
            tag = yield from source.match([_PARAMETER_START, _FUNCTION_END, _CALL_END])
            if not tag:
                yield from self._drop_cut_closing(is_opened)
                raise NotACall
            key = (yield from source.read_name(">")) if tag == _PARAMETER_START else ""
            if is_opened:
                source.release()
            else:
                self._reader.open(name)
            if not key:
                message.add_arguments("}" if is_opened else "{}")
                message.close_call(is_complete=True)
                return
            written_key = json.dumps(key, ensure_ascii=False)
            message.add_arguments(f"{', ' if is_opened else '{'}{written_key}: ")
            is_opened = True
            yield from self._read_parameter(value_types(self._schemas.get(name, {}), key))

    def _drop_cut_closing(self, is_opened: bool) -> Reading[None]:
        """Take the part of a closing tag that precedes the end of the text."""
        if is_opened:
            for tag in (_FUNCTION_END, _CALL_END):
                yield from self._reader.source.skip_closing(tag)
            self._reader.source.release()

    def _read_parameter(self, types: frozenset[str]) -> Reading[None]:
        source, message = self._reader.source, self._reader.message
        trimmed = _TrimmedValue()
        if types <= {"string"}:
            message.add_arguments('"')
            is_whole = yield from source.read_until(
                _PARAMETER_END, lambda text: message.add_arguments(escaped(trimmed.more(text)))
            )
            message.add_arguments('"' if is_whole else escaped(trimmed.kept))
        else:
            parts: list[str] = []
            is_whole = yield from source.read_until(_PARAMETER_END, lambda text: parts.append(trimmed.more(text)))
            message.add_arguments(_typed("".join(parts), types))
        if not is_whole:
            raise NotACall


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


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the schema allows for a parameter; empty if it does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return _types(cast("Mapping[str, Any]", properties).get(key), schema, 0)


def _types(described: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(described, Mapping) or depth > 8:
        return frozenset()
    schema = cast("Mapping[str, Any]", described)
    found: set[str] = set()
    named: Any = schema.get("type", [])
    found.update(cast("list[str]", named) if isinstance(named, list) else [str(named)])
    for choice in ("anyOf", "oneOf", "allOf"):
        for alternative in cast("list[Any]", schema.get(choice) or []):
            found |= _types(alternative, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        definitions = cast("Mapping[str, Any]", root.get("$defs") or {})
        found |= _types(definitions.get(reference.removeprefix("#/$defs/")), root, depth + 1)
    values = [schema["const"]] if "const" in schema else cast("list[Any]", schema.get("enum") or [])
    if not found:
        found.update(_type_of(value) for value in values)
    return frozenset(found)


def _type_of(value: Any) -> str:
    for name, kind in (("boolean", bool), ("integer", int), ("number", float), ("array", list), ("object", Mapping)):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "string"


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
