"""Formats of tool calls. Each reads a whole completion: calls, and the content around them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxserve.parsers.call_object import CallReader
from jaxserve.parsers.function_tags import FUNCTION_START, Schemas, TagCallReader
from jaxserve.parsers.harmony import CALL_END, CALL_START, FUNCTIONS, MESSAGE
from jaxserve.parsers.json_scanner import JsonScanner
from jaxserve.parsers.python_calls import PythonCallReader
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
    reasoning: ClassVar[str | None] = None
    """Name of the reasoning format that has to read the text first; None if any or none may."""

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
                yield from _read_list(reader, lambda: _read_object(reader))
            elif (yield from source.peek_past_space()) == "{":
                yield from reader.attempt(_read_object(reader))
            else:
                yield from reader.attempt(self._read_named(reader))

    def _read_named(self, reader: CallReader) -> Reading[None]:
        source, call_id = reader.source, None
        name = yield from source.read_identifier()
        if (yield from source.match(["[CALL_ID]"])):
            call_id = (yield from source.read_name("[ARGS]")).strip()
        else:
            yield from source.match(["[ARGS]"])
        yield from _read_named_call(reader, name, call_id)


class SectionFormat(ToolFormat):
    """Calls between markers, all of them between the markers of a section, which may be missing."""

    section_start: ClassVar[str]
    call_start: ClassVar[str]
    closings: ClassVar[tuple[str, ...]]
    """Texts that may follow a call's arguments, in this order."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        source = reader.source
        while marker := (yield from reader.read_content([self.section_start, self.call_start])):
            if marker == self.section_start:
                yield from source.match([self.call_start])
            if (yield from reader.attempt(self.read_call(reader))):
                for closing in self.closings:
                    yield from source.skip_closing(closing)

    @abstractmethod
    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""


class DeepSeekFormat(SectionFormat):
    """<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜> of DeepSeek V3.1, or V3's and R1's longer form.

    The longer form has a type before the name, and the arguments in a block of Markdown; line breaks are spaces here:
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name ```json {…} ```<｜tool▁call▁end｜>
    """

    section_start: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    call_start: ClassVar[str] = "<｜tool▁call▁begin｜>"
    closings: ClassVar[tuple[str, ...]] = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""
        source = reader.source
        name = yield from source.read_identifier()
        yield from source.take("<｜tool▁sep｜>")
        if (yield from source.peek_past_space()) != "{":
            name = yield from source.read_identifier()
            if (yield from source.match(["```"])):
                yield from source.match(["json"])
        yield from _read_named_call(reader, name)


class KimiK2Format(SectionFormat):
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>: Kimi K2.

    The text before the arguments is the call's id.
    """

    section_start: ClassVar[str] = "<|tool_calls_section_begin|>"
    call_start: ClassVar[str] = "<|tool_call_begin|>"
    closings: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>", "<|tool_calls_section_end|>")

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""
        call_id = yield from reader.source.read_identifier()
        yield from reader.source.take("<|tool_call_argument_begin|>")
        name, _, number = call_id.rpartition(":")
        if name and number.isdecimal():
            yield from _read_named_call(reader, name.removeprefix(FUNCTIONS), call_id)
        else:
            yield from _read_named_call(reader, call_id.removeprefix(FUNCTIONS))


class OpenAIFormat(ToolFormat):
    """Harmony's messages to functions, as `HarmonyReasoning` leaves them in the content: GPT-OSS.

    A message without arguments is a call with none. The name of an offered function may lack "functions.".
    """

    reasoning: ClassVar[str | None] = "openai_gptoss"

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content([CALL_START])):
            if (yield from reader.attempt(self._read(reader))):
                yield from reader.source.skip_closing(CALL_END)

    def _read(self, reader: CallReader) -> Reading[None]:
        source = reader.source
        recipient = yield from source.read_identifier()
        yield from source.take(MESSAGE)
        name = recipient.removeprefix(FUNCTIONS)
        if name == recipient and name not in self.schemas:
            raise NotACall
        is_closed = bool((yield from source.match([CALL_END])))
        if not is_closed and (yield from source.peek_past_space()):
            yield from _read_named_call(reader, name)
            return
        reader.open(name)
        reader.message.add_arguments("{}")
        reader.message.close_call(is_complete=is_closed)


class PythonicFormat(ToolFormat):
    """[name(key="value", …), …] at the beginning of the completion: Gemma 3, Llama 3.2 and 4."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_leading_list(reader, PythonCallReader(reader).read_call)


class RequiredFormat(ToolFormat):
    """[{"name": …, "parameters": {…}}, …]: the output that `tool_choice="required"` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_leading_list(reader, lambda: _read_object(reader))


class NamedFormat(ToolFormat):
    """The arguments of one function and nothing else: the output that a named `tool_choice` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        reader.source.hold()
        (name,) = self.schemas
        yield from reader.attempt(_read_named_call(reader, name))
        yield from reader.read_content([])


TOOL_FORMATS: Mapping[str, type[ToolFormat]] = {
    "deepseek_v3": DeepSeekFormat,
    "deepseek_v31": DeepSeekFormat,
    "hermes": HermesFormat,
    "kimi_k2": KimiK2Format,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
    "openai": OpenAIFormat,
    "pythonic": PythonicFormat,
    "qwen3": Qwen3Format,
    "qwen3_coder": Qwen3Format,
    "qwen3_xml": Qwen3Format,
}


def _read_object(reader: CallReader) -> Reading[None]:
    yield from reader.source.expect("{")
    yield from reader.read_call()


def _read_named_call(reader: CallReader, name: str, call_id: str | None = None) -> Reading[None]:
    """Read the arguments of a function, an object, and open its call."""
    if (yield from reader.source.peek_past_space()) != "{":
        raise NotACall
    reader.open(name, call_id)
    yield from reader.read_arguments()


def _read_leading_list(reader: CallReader, read_call: Callable[[], Reading[None]]) -> Reading[None]:
    """Read a list of calls at the beginning of the text, and the content after it."""
    reader.source.hold()
    if (yield from reader.source.match(["["])):
        yield from _read_list(reader, read_call)
    else:
        reader.message.add_content(reader.source.release())
    yield from reader.read_content([])


def _read_list(reader: CallReader, read_call: Callable[[], Reading[None]]) -> Reading[None]:
    """Read calls up to the closing bracket, whose opening one was already taken; stop at anything that is not a
    call."""
    source = reader.source
    while (yield from reader.attempt(read_call())):
        if not (yield from source.match([","])):
            yield from source.skip_closing("]")
            return
        if (yield from source.match(["]"])):
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
