"""Formats of tool calls. Each reads a whole completion: calls, and the content around them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxserve.parsers.call_object import CallObjectReader
from jaxserve.parsers.call_reader import CallReader, Spellings
from jaxserve.parsers.function_tags import DSML, GLM, MINIMAX, QWEN, SEED, TagCallReader, Tags
from jaxserve.parsers.gemma_calls import read_gemma_call
from jaxserve.parsers.harmony import CALL_END, CALL_START, FUNCTIONS, MESSAGE
from jaxserve.parsers.json_scanner import JsonScanner
from jaxserve.parsers.list_formats import (
    ApertusFormat,
    CohereFormat,
    GraniteFormat,
    HunyuanFormat,
    Olmo3Format,
    Phi4MiniFormat,
    read_leading_list,
    read_list,
)
from jaxserve.parsers.python_calls import PythonCallReader
from jaxserve.parsers.schema_types import Schemas
from jaxserve.parsers.section_formats import DeepSeekFormat, KimiK2Format
from jaxserve.parsers.source import NotACall, Reading
from jaxserve.parsers.tool_format import ToolFormat

_CALL_START = "<tool_call>"
_CALL_ENDS = ("</tool_call>",)
_CALLS = "[TOOL_CALLS]"
_CALL_KEYS = frozenset(["name", "type", "id"])
_PYTHON_TAG, _PYTHON_START, _PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class HermesFormat(ToolFormat):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times: Hermes, Qwen 2.5 and 3."""

    starts: ClassVar[Spellings] = (_CALL_START,)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content(self.starts)):
            yield from reader.source.skip_all(self.starts)  # small models repeat it
            yield from reader.read_block(CallObjectReader(reader).read_object(), [_CALL_ENDS])


class Qwen3Format(ToolFormat):
    """Hermes' form, or the tags of Qwen 3 Coder instead of the JSON object (`TagCallReader`).

    As in vLLM the tags are also recognized without the outer <tool_call>.
    """

    starts: ClassVar[Spellings] = (_CALL_START, QWEN.function)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_tagged(reader, self.schemas, QWEN, others=["{"])


class SeedFormat(ToolFormat):
    """Qwen 3 Coder's tags between <seed:tool_call> and </seed:tool_call>: Seed-OSS."""

    starts: ClassVar[Spellings] = (SEED.block[0], SEED.function)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_tagged(reader, self.schemas, SEED)


class MiniMaxFormat(ToolFormat):
    """<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke></minimax:tool_call>: MiniMax M2.

    A block may have several functions.
    """

    starts: ClassVar[Spellings] = (MINIMAX.block[0], MINIMAX.function)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_tagged(reader, self.schemas, MINIMAX)


class DeepSeekTagsFormat(ToolFormat):
    """<｜DSML｜function_calls>, functions as MiniMax M2's, and parameters that say if they are strings: DeepSeek V3.2.

    A parameter is <｜DSML｜parameter name="…" string="true">…</｜DSML｜parameter>.
    """

    starts: ClassVar[Spellings] = (DSML.block[0], DSML.function)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_tagged(reader, self.schemas, DSML)


class GlmFormat(ToolFormat):
    """<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>: GLM-4.5 to 4.7.

    Laguna writes the same, and Hy3 <tool_sep> after the name, and <tool_calls> and </tool_calls> around all calls.
    """

    starts: ClassVar[Spellings] = (GLM.block[0], GLM.function)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from _read_tagged(reader, self.schemas, GLM)


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
                yield from read_list(reader, CallObjectReader(reader).read_object)
            elif (yield from source.peek_past_space()) == "{":
                yield from reader.attempt(CallObjectReader(reader).read_object())
            else:
                yield from reader.attempt(self._read_named(reader))

    def _read_named(self, reader: CallReader) -> Reading[None]:
        source, call_id = reader.source, None
        name = yield from source.read_identifier()
        if (yield from source.match(["[CALL_ID]"])):
            call_id = (yield from source.read_name("[ARGS]")).strip()
        else:
            yield from source.match(["[ARGS]"])
        yield from CallObjectReader(reader).read_named(name, call_id)


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
            yield from CallObjectReader(reader).read_named(name)
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
        yield from read_leading_list(reader, PythonCallReader(reader).read_call, (_PYTHON_END,))
        while marker := (yield from reader.read_content(self.starts)):
            num_calls = reader.message.num_calls
            yield from _read_python_block(reader, marker)
            if reader.message.num_calls > num_calls:
                yield from reader.close((_PYTHON_END,))


class Gemma4Format(ToolFormat):
    """<|tool_call>call:name{key:<|"|>value<|"|>, …}<tool_call|>, any number of times: Gemma 4."""

    starts: ClassVar[Spellings] = ("<|tool_call>",)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content(self.starts)):
            yield from reader.read_block(read_gemma_call(reader), [("<tool_call|>",)])


class RequiredFormat(ToolFormat):
    """[{"name": …, "parameters": {…}}, …]: the output that `tool_choice="required"` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from read_leading_list(reader, CallObjectReader(reader).read_object, (_PYTHON_END,))
        yield from reader.read_content([])


class NamedFormat(ToolFormat):
    """The arguments of one function and nothing else: the output that a named `tool_choice` constrains."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        reader.source.hold()
        (name,) = self.schemas
        yield from reader.attempt(CallObjectReader(reader).read_named(name))
        yield from reader.read_content([])


TOOL_FORMATS: Mapping[str, type[ToolFormat]] = {
    "apertus": ApertusFormat,
    "cohere_command3": CohereFormat,
    "cohere_command4": CohereFormat,
    "deepseek_v3": DeepSeekFormat,
    "deepseek_v31": DeepSeekFormat,
    "deepseek_v32": DeepSeekTagsFormat,
    "ernie45": HermesFormat,
    "gemma4": Gemma4Format,
    "glm45": GlmFormat,
    "glm47": GlmFormat,
    "granite": GraniteFormat,
    "granite4": GraniteFormat,
    "hermes": HermesFormat,
    "hunyuan_a13b": HunyuanFormat,
    "hy_v3": GlmFormat,
    "kimi_k2": KimiK2Format,
    "llama3_json": Llama3JsonFormat,
    "llama4_json": Llama3JsonFormat,
    "llama4_pythonic": PythonicFormat,
    "minimax_m2": MiniMaxFormat,
    "mistral": MistralFormat,
    "olmo3": Olmo3Format,
    "openai": OpenAIFormat,
    "phi4_mini_json": Phi4MiniFormat,
    "poolside_v1": GlmFormat,
    "pythonic": PythonicFormat,
    "qwen3": Qwen3Format,
    "qwen3_coder": Qwen3Format,
    "qwen3_xml": Qwen3Format,
    "seed_oss": SeedFormat,
}


def _read_tagged(reader: CallReader, schemas: Schemas, tags: Tags, others: Sequence[str] = ()) -> Reading[None]:
    """Read calls in tags to the end of the text.

    Args:
        reader: The reader.
        schemas: The parameters of the offered tools.
        tags: The tags.
        others: Texts that begin a call in a block, besides the tag of a function: the brace of a JSON object.
    """
    source, (start, end), functions = reader.source, tags.block, TagCallReader(reader, schemas, tags)
    while marker := (yield from reader.read_content([start, tags.function])):
        if marker == start:
            yield from source.skip_all([start])
            marker = yield from source.match([tags.function, *others])
        if not marker:
            marker = yield from reader.read_lead([tags.function], ends=[start, end])
        if marker in others:
            yield from reader.read_block(CallObjectReader(reader).read_call(), [(end,)])
        elif marker:
            yield from reader.read_block(functions.read_function(), [(end,)])


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
        yield from read_list(reader, lambda: _read_listed(reader))
    else:
        reader.release()


def _read_listed(reader: CallReader) -> Reading[None]:
    if (yield from reader.source.peek_past_space()) == "{":
        yield from CallObjectReader(reader).read_object()
    else:
        yield from PythonCallReader(reader).read_call()


def _read_bare_object(reader: CallReader) -> Reading[None]:
    """Read a call whose opening brace was already taken, or pass a JSON object on as content."""
    num_calls = reader.message.num_calls
    try:
        yield from CallObjectReader(reader).read_call(keys=_CALL_KEYS, needs_arguments=True)
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
