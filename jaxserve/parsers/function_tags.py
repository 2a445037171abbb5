"""Tool calls in tags, with types from the schemas: <function=name><parameter=key>value</parameter></function> of Qwen 3
Coder, and other models' spellings of the same."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import escaped, whole_json
from jaxserve.parsers.schema_types import Schemas, value_types
from jaxserve.parsers.source import NotACall, Reading, partial_length

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Tags(NamedTuple):
    """How a model spells calls in tags.

    Attributes:
        block: Tags around calls; the first may be missing.
        function: Begins a function, before its name.
        name_end: Ends the name; None: the name ends at the first character that no name has.
        separator: May follow such a name.
        parameter: Begins a parameter, before its key.
        key_end: Ends the key.
        values: What begins the value, after a key of letters, digits and "_-./:", and the value's JSON types, None for
            those of the schema; empty: the end of the key begins it.
        parameter_end: Ends the value.
        function_end: Ends the function.
    """

    block: tuple[str, str]
    function: str
    name_end: str | None
    parameter: str
    key_end: str
    parameter_end: str
    function_end: str
    separator: str = ""
    values: Mapping[str, frozenset[str] | None] = MappingProxyType({})

    @property
    def value_ends(self) -> tuple[str, ...]:
        """What may end a value."""
        return (self.parameter_end, self.parameter, self.function_end)


QWEN = Tags(
    block=("<tool_call>", "</tool_call>"),
    function="<function=",
    name_end=">",
    parameter="<parameter=",
    key_end=">",
    parameter_end="</parameter>",
    function_end="</function>",
)
SEED = QWEN._replace(block=("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX = QWEN._replace(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    function='<invoke name="',
    name_end='">',
    parameter='<parameter name="',
    key_end='">',
    function_end="</invoke>",
)
DSML = QWEN._replace(
    block=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    function='<｜DSML｜invoke name="',
    name_end='">',
    parameter='<｜DSML｜parameter name="',
    key_end='"',
    values={
        'string="true">': frozenset({"string"}),
        'string="false">': frozenset({"null", "boolean", "integer", "number", "object", "array"}),
    },
    parameter_end="</｜DSML｜parameter>",
    function_end="</｜DSML｜invoke>",
)
GLM = Tags(
    block=("<tool_calls>", "</tool_calls>"),
    function="<tool_call>",
    name_end=None,
    parameter="<arg_key>",
    key_end="</arg_key>",
    values={"<arg_value>": None},
    parameter_end="</arg_value>",
    function_end="</tool_call>",
    separator="<tool_sep>",
)
"""GLM's, without the block and the separator, and Hy3's, with both."""


class TagCallReader:
    """Converts calls in tags to JSON arguments.

    A value is a string unless the tool's schema allows another type that it can be parsed as. String values are passed
    on as they arrive, others when they are complete. A value ends at its closing tag, or at a tag that has to come
    after it.
    """

    def __init__(self, reader: CallReader, schemas: Schemas, tags: Tags) -> None:
        self._reader = reader
        self._schemas = schemas
        self._tags = tags

    def read_function(self) -> Reading[None]:
        """Read one function, whose opening marker was already taken; it ends at its own or the call's closing tag."""
        source, tags = self._reader.source, self._tags
        name = yield from self._read_function_name()
        is_opened = False
        try:
            while (yield from source.match([tags.parameter])):
                yield from self._read_parameter(name, is_opened)
                is_opened = True
                source.hold()
            yield from self._read_end()
        except NotACall:
            if is_opened or self._reader.message.is_call_open:
                self._reader.drop((tags.parameter_end,), (tags.function_end,))
            raise
        if not is_opened:
            self._reader.open(name)
        source.release()
        self._reader.message.add_arguments("}" if is_opened else "{}")
        self._reader.message.close_call(is_complete=True)

    def _read_function_name(self) -> Reading[str]:
        source, tags = self._reader.source, self._tags
        if tags.name_end is not None:
            return (yield from source.read_name(tags.name_end))
        name = yield from source.read_identifier()
        yield from source.match([tags.separator])
        return name

    def _read_end(self) -> Reading[None]:
        """Take the closing tag of the function; that of the block stays unread."""
        source, tags = self._reader.source, self._tags
        block_end = tags.block[1]
        tag = yield from source.match([tags.function_end, block_end])
        if tag == block_end:
            source.rewind(len(source.held()) - len(block_end))
        elif not tag:
            if self._reader.message.is_call_open:
                yield from source.skip_all([tags.parameter, tags.function_end, block_end])  # one that the end cuts off
            raise NotACall

    def _read_parameter(self, name: str, is_opened: bool) -> Reading[None]:
        """Read a parameter, whose opening marker was already taken; the first one opens the call."""
        source, message = self._reader.source, self._reader.message
        separator = ", " if is_opened else "{"
        num_held = len(source.held())
        try:
            key = yield from self._read_key()
        except NotACall:
            cut = source.held()[num_held:]
            cut = cut[: len(cut) - partial_length(cut, [self._tags.key_end])]
            if is_opened and source.is_at_end and cut:
                message.add_arguments(f'{separator}"{escaped(cut)}')
            raise
        if is_opened:
            source.release()
        else:
            self._reader.open(name)
        message.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        types = None
        if self._tags.values:
            start = yield from source.match([*self._tags.values])
            if not start:
                raise NotACall
            types = self._tags.values[start]
        end = yield from self._read_value(value_types(self._schemas.get(name, {}), key) if types is None else types)
        if not end:
            raise NotACall
        source.advance(len(end) if end == self._tags.parameter_end else 0)

    def _read_key(self) -> Reading[str]:
        source, end = self._reader.source, self._tags.key_end
        if not self._tags.values:
            return (yield from source.read_name(end))
        key = yield from source.read_identifier()
        if not (yield from source.match([end])):
            rest = source.rest()
            source.advance(len(rest) if source.is_ended and end.startswith(rest) else 0)  # one that the end cuts off
            raise NotACall
        return key

    def _read_value(self, types: frozenset[str]) -> Reading[str]:
        """Pass a value on; return the tag that ends it, which stays unread, or "" at the end of the text."""
        source, message = self._reader.source, self._reader.message
        trimmed = _TrimmedValue()
        if types <= {"string"}:
            message.add_arguments('"')
            end = yield from source.read_to(
                self._tags.value_ends, lambda text: message.add_arguments(escaped(trimmed.more(text)))
            )
            message.add_arguments('"' if end else escaped(trimmed.kept))
        else:
            parts: list[str] = []
            end = yield from source.read_to(self._tags.value_ends, lambda text: parts.append(trimmed.more(text)))
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
