"""Formats of tool calls. Each reads a whole completion: calls, and the content around them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxserve.parsers.call_object import CallReader
from jaxserve.parsers.content_reader import Spellings
from jaxserve.parsers.function_tags import FUNCTION_START, Schemas, TagCallReader
from jaxserve.parsers.harmony import CALL_END, CALL_START, FUNCTIONS, MESSAGE
from jaxserve.parsers.json_scanner import JsonScanner
from jaxserve.parsers.python_calls import PythonCallReader
from jaxserve.parsers.source import NotACall, Reading

_CALL_START = "<tool_call>"
_CALL_ENDS = ("</tool_call>",)
_CALLS = "[TOOL_CALLS]"
_CALL_KEYS = frozenset(["name", "type", "id"])
_PYTHON_TAG, _PYTHON_START, _PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def _deepseek_spellings(*markers: str) -> Spellings:
    """Return markers as DeepSeek models write them, whose special tokens also come apart into ordinary ones."""
    spaced = [marker.replace("▁", space) for marker in markers for space in ("▁", "_", " ", "\\_")]
    return (*spaced, *(marker.replace("｜", "|") for marker in spaced))


class ToolFormat(ABC):
    """A format of tool calls.

    Args:
      schemas: The parameters of the offered tools; JSON formats ignore them, because JSON has types.
    """

    id_length: ClassVar[int | None] = None
    """Length of the alphanumeric ids that the model's template requires; None for vLLM's usual ids."""
    reasoning: ClassVar[str | None] = None
    """Name of the reasoning format that has to read the text first; None if any or none may."""
    starts: ClassVar[Spellings] = ()
    """Markers that begin calls."""
    leading_starts: ClassVar[Spellings] = ()
    """Markers that begin calls only where no content comes first."""

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas

    @abstractmethod
    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""


class TextFormat(ToolFormat):
    """Content alone."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from reader.read_content([])


class HermesFormat(ToolFormat):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times: Hermes, Qwen 2.5 and 3."""

    starts: ClassVar[Spellings] = (_CALL_START,)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content(self.starts)):
            yield from reader.source.skip_all(self.starts)  # small models repeat it
            yield from reader.read_block(_read_object(reader), [_CALL_ENDS])


class Qwen3Format(ToolFormat):
    """Hermes' form, or the tags of Qwen 3 Coder instead of the JSON object (`TagCallReader`).

    As in vLLM the tags are also recognized without the outer <tool_call>.
    """

    starts: ClassVar[Spellings] = (_CALL_START, FUNCTION_START)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        tags, source = TagCallReader(reader, self.schemas), reader.source
        while marker := (yield from reader.read_content(self.starts)):
            if marker == _CALL_START:
                yield from source.skip_all([_CALL_START])
                marker = yield from source.match([FUNCTION_START, "{"])
            if not marker:
                marker = yield from reader.read_lead([FUNCTION_START], ends=[_CALL_START, *_CALL_ENDS])
            if marker == "{":
                yield from reader.read_block(reader.read_call(), [_CALL_ENDS])
            elif marker:
                yield from reader.read_block(tags.read_function(), [_CALL_ENDS])


class Llama3JsonFormat(ToolFormat):
    """{"name": …, "parameters": {…}}, several separated by semicolons: Llama 3.1 on.

    They may follow <|python_tag|>, or <|python_start|> and <|python_end|> of Llama 4. Other JSON objects are content,
    including everything nested in them.
    """

    starts: ClassVar[Spellings] = (_PYTHON_TAG, _PYTHON_START, "{")

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while marker := (yield from reader.read_content(self.starts, separator=";")):
            num_calls = reader.message.num_calls
            if marker == "{":
                yield from _read_bare_object(reader)
            else:
                yield from _read_python_block(reader, marker)
            if reader.message.num_calls > num_calls:
                yield from reader.close((_PYTHON_END,))


class MistralFormat(ToolFormat):
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or from tokenizer v11 on [TOOL_CALLS]name[ARGS]{…} for each call.

    The newer form may leave [ARGS] out, or have [CALL_ID]… before it.
    """

    id_length: ClassVar[int | None] = 9
    starts: ClassVar[Spellings] = (_CALLS,)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        source = reader.source
        while (yield from reader.read_content(self.starts)):
            yield from source.skip_all(self.starts)
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

    section_starts: ClassVar[Spellings]
    section_ends: ClassVar[Spellings]
    call_starts: ClassVar[Spellings]
    call_ends: ClassVar[Spellings]
    bare_starts: ClassVar[Spellings]
    """Texts that begin the first call of a section without a marker of its own."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while marker := (yield from reader.read_content(self.starts)):
            closings, outer = [self.call_ends], [self.section_ends]
            if marker in self.section_starts:
                closings, outer = [*closings, *outer], []
                marker = yield from reader.source.match(self.bare_starts)
                if not marker:
                    marker = yield from reader.read_lead(self.call_starts, self.section_starts, self.section_ends)
            if marker:
                yield from reader.read_block(self.read_call(reader, marker), closings, outer)

    @abstractmethod
    def read_call(self, reader: CallReader, marker: str) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""


class DeepSeekFormat(SectionFormat):
    """<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜> of DeepSeek V3.1, or V3's and R1's longer form.

    The longer form has a type before the name, and the arguments in a block of Markdown; line breaks are spaces here:
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name ```json {…} ```<｜tool▁call▁end｜>
    """

    section_starts: ClassVar[Spellings] = _deepseek_spellings("<｜tool▁calls▁begin｜>", "<｜tool▁calls｜>")
    section_ends: ClassVar[Spellings] = _deepseek_spellings("<｜tool▁calls▁end｜>")
    call_starts: ClassVar[Spellings] = _deepseek_spellings("<｜tool▁call▁begin｜>")
    call_ends: ClassVar[Spellings] = (
        *(end for one in _deepseek_spellings("<｜tool▁call▁end｜>") for end in (one, f"```{one}", f"```\n{one}")),
    )
    separators: ClassVar[Spellings] = _deepseek_spellings("<｜tool▁sep｜>")
    bare_starts: ClassVar[Spellings] = tuple(f"function{one}" for one in separators)
    starts: ClassVar[Spellings] = (*section_starts, *call_starts)

    def read_call(self, reader: CallReader, marker: str) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""
        source, is_fenced = reader.source, False
        name = yield from source.read_identifier()
        if marker not in self.bare_starts:
            yield from source.take(*self.separators)
        if (yield from source.peek_past_space()) != "{":
            if marker not in self.bare_starts:
                name = yield from source.read_identifier()
            is_fenced = bool((yield from source.match(["```"])))
            yield from source.match(["json"] if is_fenced else [])
        yield from _read_named_call(reader, name)
        if is_fenced:
            yield from source.match(["```"])


class KimiK2Format(SectionFormat):
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>: Kimi K2.

    The text before the arguments is the call's id.
    """

    section_starts: ClassVar[Spellings] = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    section_ends: ClassVar[Spellings] = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call_starts: ClassVar[Spellings] = ("<|tool_call_begin|>",)
    call_ends: ClassVar[Spellings] = ("<|tool_call_end|>",)
    bare_starts: ClassVar[Spellings] = (FUNCTIONS,)
    starts: ClassVar[Spellings] = (*section_starts, *call_starts)

    def read_call(self, reader: CallReader, marker: str) -> Reading[None]:
        """Read one call, whose opening marker was already taken, up to the end of its arguments."""
        call_id = yield from reader.source.read_identifier()
        if marker in self.bare_starts:
            call_id = marker + call_id
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
            yield from reader.read_block(self._read(reader), [(CALL_END,)])

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
    """[name(key="value", …), …] at the beginning of the completion: Gemma 3, Llama 3.2 and 4.

    Also anywhere between <|python_start|> and <|python_end|>.
    """

    starts: ClassVar[Spellings] = (_PYTHON_START,)
    leading_starts: ClassVar[Spellings] = ("[",)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_leading_list(reader, PythonCallReader(reader).read_call)
        while marker := (yield from reader.read_content(self.starts)):
            num_calls = reader.message.num_calls
            yield from _read_python_block(reader, marker)
            if reader.message.num_calls > num_calls:
                yield from reader.close((_PYTHON_END,))


class RequiredFormat(ToolFormat):
    """[{"name": …, "parameters": {…}}, …]: the output that `tool_choice="required"` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_leading_list(reader, lambda: _read_object(reader))
        yield from reader.read_content([])


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
    "llama4_json": Llama3JsonFormat,
    "llama4_pythonic": PythonicFormat,
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
    """Read a list of calls at the beginning of the text, if there is one."""
    source = reader.source
    source.hold()
    if (yield from source.match(["["])):
        yield from _read_list(reader, read_call)
        if reader.message.num_calls:
            yield from reader.close((_PYTHON_END,))
    else:
        source.release()


def _read_list(reader: CallReader, read_call: Callable[[], Reading[None]]) -> Reading[None]:
    """Read calls up to the closing bracket, whose opening one was already taken; stop at anything that is not a
    call."""
    source = reader.source
    while (yield from reader.attempt(read_call())):
        if not (yield from source.match([","])):
            yield from source.match(["]"])
            return
        if (yield from source.match(["]"])):
            return
        yield from source.peek_past_space()
        source.hold()


def _read_python_block(reader: CallReader, marker: str) -> Reading[None]:
    """Read calls after Llama's markers of code: JSON objects, or a list of them or of Python calls.

    Llama 4's template writes text between <|python_start|> and <|python_end|>, and the calls after them.
    """
    source = reader.source
    markers = [_PYTHON_TAG, _PYTHON_START, _PYTHON_END]
    yield from source.skip_all(markers)
    start = yield from source.match(["{", "["])
    if not start and marker == _PYTHON_START:
        if not (yield from reader.read_lead([_PYTHON_END], [_PYTHON_START, _PYTHON_TAG])):
            return
        start = yield from source.match(["{", "["])
    if start == "{":
        yield from _read_bare_object(reader)
    elif start:
        yield from _read_list(reader, lambda: _read_listed(reader))
    else:
        reader.release()


def _read_listed(reader: CallReader) -> Reading[None]:
    if (yield from reader.source.peek_past_space()) == "{":
        yield from _read_object(reader)
    else:
        yield from PythonCallReader(reader).read_call()


def _read_bare_object(reader: CallReader) -> Reading[None]:
    """Read a call whose opening brace was already taken, or pass a JSON object on as content."""
    num_calls = reader.message.num_calls
    try:
        yield from reader.read_call(keys=_CALL_KEYS, needs_arguments=True)
    except NotACall:
        if reader.message.num_calls == num_calls:
            yield from _pass_object(reader)
        elif reader.message.is_call_open:
            reader.message.close_call(is_complete=False)


def _pass_object(reader: CallReader) -> Reading[None]:
    """Pass a JSON object on as content, from its held beginning to its end or its first error."""
    source, scanner = reader.source, JsonScanner()
    text = reader.release()
    scanner.take(text[text.index("{") :])
    while not (scanner.is_done or scanner.is_broken) and (yield from source.peek()):
        rest = source.rest()
        count, _ = scanner.take(rest)
        reader.add_content(rest[:count])
        source.advance(count)
