"""Formats of tool calls. Each reads a whole completion: calls, and the content around them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from jaxserve.parsers.call_object import CallReader
from jaxserve.parsers.function_tags import FUNCTION_START, Schemas, TagCallReader
from jaxserve.parsers.json_scanner import JsonScanner
from jaxserve.parsers.source import NotACall, Reading

_CALL_START = "<tool_call>"
_CALL_END = "</tool_call>"
_CALL_KEYS = frozenset(["name", "type", "id"])


class ToolFormat(ABC):
    """A format of tool calls.

    Args:
      schemas: The parameters of the offered tools; JSON formats ignore them, because JSON has types.
    """

    id_length: ClassVar[int | None] = None
    """Length of the alphanumeric ids that the model's template requires; None for vLLM's usual ids."""

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas

    @abstractmethod
    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""


class HermesFormat(ToolFormat):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times: Hermes, Qwen 2.5 and 3."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content([_CALL_START])):
            if (yield from reader.attempt(_read_object(reader))):
                yield from reader.source.skip_closing(_CALL_END)


class Qwen3Format(ToolFormat):
    """Hermes' form, or the tags of Qwen 3 Coder instead of the JSON object (`TagCallReader`).

    As in vLLM the tags are also recognized without the outer <tool_call>.
    """

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        tags = TagCallReader(reader, self.schemas)
        while marker := (yield from reader.read_content([_CALL_START, FUNCTION_START])):
            if marker == _CALL_START and not (yield from reader.source.match([FUNCTION_START])):
                is_call = yield from reader.attempt(_read_object(reader))
            else:
                is_call = yield from reader.attempt(tags.read_function())
            if is_call:
                yield from reader.source.skip_closing(_CALL_END)


class Llama3JsonFormat(ToolFormat):
    """{"name": …, "parameters": {…}}, with or without <|python_tag|>, several separated by semicolons: Llama 3.1 on.

    Other JSON objects are content, including everything nested in them.
    """

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while marker := (yield from reader.read_content(["<|python_tag|>", "{"], separator=";")):
            if marker != "{" and not (yield from reader.source.match(["{"])):
                reader.message.add_content(reader.source.release())
                continue
            num_calls = reader.message.num_calls
            try:
                yield from reader.read_call(keys=_CALL_KEYS, needs_arguments=True)
            except NotACall:
                if reader.message.num_calls == num_calls:
                    yield from _pass_object(reader)
                elif reader.message.is_call_open:
                    reader.message.close_call(is_complete=False)


class MistralFormat(ToolFormat):
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or from tokenizer v11 on [TOOL_CALLS]name[ARGS]{…} for each call.

    The newer form may leave [ARGS] out, or have [CALL_ID]… before it.
    """

    id_length: ClassVar[int | None] = 9

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        source = reader.source
        while (yield from reader.read_content(["[TOOL_CALLS]"])):
            if (yield from source.match(["["])):
                yield from _read_list(reader)
            elif (yield from source.peek_past_space()) == "{":
                yield from reader.attempt(_read_object(reader))
            else:
                yield from reader.attempt(self._read_named(reader))

    def _read_named(self, reader: CallReader) -> Reading[None]:
        source = reader.source
        name, call_id = "", None
        while (character := (yield from source.peek())) and (character.isalnum() or character in "_-./:"):
            source.advance(1)
            name += character
        if (yield from source.match(["[CALL_ID]"])):
            call_id = (yield from source.read_name("[ARGS]")).strip()
        else:
            yield from source.match(["[ARGS]"])
        if not name or (yield from source.peek_past_space()) != "{":
            raise NotACall
        reader.open(name, call_id)
        yield from reader.read_arguments()


class RequiredFormat(ToolFormat):
    """[{"name": …, "parameters": {…}}, …]: the output that `tool_choice="required"` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        reader.source.hold()
        if (yield from reader.source.match(["["])):
            yield from _read_list(reader)
        else:
            reader.message.add_content(reader.source.release())
        yield from reader.read_content([])


class NamedFormat(ToolFormat):
    """The arguments of one function and nothing else: the output that a named `tool_choice` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        reader.source.hold()
        yield from reader.attempt(self._read(reader))
        yield from reader.read_content([])

    def _read(self, reader: CallReader) -> Reading[None]:
        if (yield from reader.source.peek_past_space()) != "{":
            raise NotACall
        (name,) = self.schemas
        reader.open(name)
        yield from reader.read_arguments()


TOOL_FORMATS: Mapping[str, type[ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
    "qwen3": Qwen3Format,
    "qwen3_coder": Qwen3Format,
    "qwen3_xml": Qwen3Format,
}


def _read_object(reader: CallReader) -> Reading[None]:
    yield from reader.source.expect("{")
    yield from reader.read_call()


def _read_list(reader: CallReader) -> Reading[None]:
    """Read calls up to the closing bracket, whose opening one was already taken; stop at anything that is not a
    call."""
    source = reader.source
    while (yield from reader.attempt(_read_object(reader))):
        if not (yield from source.match([","])):
            yield from source.skip_closing("]")
            return
        yield from source.peek_past_space()
        source.hold()


def _pass_object(reader: CallReader) -> Reading[None]:
    """Pass a JSON object on as content, from its held beginning to its end or its first error."""
    source, scanner = reader.source, JsonScanner()
    text = source.release()
    reader.message.add_content(text)
    scanner.take(text[text.index("{") :])
    while not (scanner.is_done or scanner.is_broken) and (yield from source.peek()):
        rest = source.rest()
        count, _ = scanner.take(rest)
        reader.message.add_content(rest[:count])
        source.advance(count)
