"""Formats of tool calls that are lists, and those whose lists stand between markers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from jaxserve.parsers.call_object import CallObjectReader
from jaxserve.parsers.call_reader import CallReader, Spellings
from jaxserve.parsers.python_calls import PythonCallReader
from jaxserve.parsers.source import Reading
from jaxserve.parsers.tool_format import ToolFormat


class ListFormat(ToolFormat):
    """[call, …] between markers; a single call may lack the brackets, and a list that begins the text the markers."""

    ends: ClassVar[Spellings]

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        if self.leading_starts:
            yield from read_leading_list(reader, lambda: self.read_call(reader), self.ends)
        while (yield from reader.read_content(self.starts)):
            yield from reader.read_block(self._read_calls(reader), [self.ends])

    def _read_calls(self, reader: CallReader) -> Reading[None]:
        if (yield from reader.source.match(["["])):
            yield from read_list(reader, lambda: self.read_call(reader))
        else:
            yield from reader.attempt(self.read_call(reader))

    @abstractmethod
    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""


class HunyuanFormat(ListFormat):
    """<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>: Hunyuan-A13B."""

    starts: ClassVar[Spellings] = ("<tool_calls>",)
    ends: ClassVar[Spellings] = ("</tool_calls>",)

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""
        return CallObjectReader(reader).read_object()


class ApertusFormat(ListFormat):
    """<|tools_prefix|>[{name: {…}}, …]<|tools_suffix|>: Apertus."""

    starts: ClassVar[Spellings] = ("<|tools_prefix|>",)
    ends: ClassVar[Spellings] = ("<|tools_suffix|>",)

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""
        return CallObjectReader(reader).read_keyed()


class CohereFormat(ListFormat):
    """<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>: Command R7B and A.

    The model numbers the calls of a message from 0, so they get ids of their own.
    """

    reasoning: ClassVar[str | None] = "cohere_command3"
    starts: ClassVar[Spellings] = ("<|START_ACTION|>",)
    ends: ClassVar[Spellings] = ("<|END_ACTION|>",)

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""
        return CallObjectReader(reader, name_key="tool_name").read_object()


class Phi4MiniFormat(ListFormat):
    """functools[{"name": …, "arguments": {…}}, …], or the list between <|tool_call|> and <|/tool_call|>: Phi-4-mini."""

    starts: ClassVar[Spellings] = ("functools", "<|tool_call|>")
    ends: ClassVar[Spellings] = ("<|/tool_call|>",)

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""
        return CallObjectReader(reader).read_object()


class GraniteFormat(ListFormat):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call> of Granite 4, and <|tool_call|>[{…}, …] of Granite 3."""

    starts: ClassVar[Spellings] = ("<tool_call>", "<|tool_call|>")
    leading_starts: ClassVar[Spellings] = ("[",)
    ends: ClassVar[Spellings] = ("</tool_call>",)

    def read_call(self, reader: CallReader) -> Reading[None]:
        """Read one call."""
        return CallObjectReader(reader).read_object()


class Olmo3Format(ToolFormat):
    """<function_calls>, a call in Python on each line, and </function_calls>: OLMo 3."""

    starts: ClassVar[Spellings] = ("<function_calls>",)

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        while (yield from reader.read_content(self.starts)):
            yield from reader.read_block(self._read_lines(reader), [("</function_calls>",)])

    def _read_lines(self, reader: CallReader) -> Reading[None]:
        source = reader.source
        while (yield from reader.attempt(PythonCallReader(reader).read_call())):
            source.hold()
            end = yield from source.peek_past_space()
            if end in ("", "<"):
                source.rewind(0)
                source.release()
                return


def read_leading_list(reader: CallReader, read_call: Callable[[], Reading[None]], ends: Spellings) -> Reading[None]:
    """Read a list of calls at the beginning of the text, if there is one, and the markers that may follow it."""
    source = reader.source
    source.hold()
    if (yield from source.match(["["])):
        yield from read_list(reader, read_call)
        if reader.message.num_calls:
            yield from reader.close(ends)
    else:
        source.release()


def read_list(reader: CallReader, read_call: Callable[[], Reading[None]]) -> Reading[None]:
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
