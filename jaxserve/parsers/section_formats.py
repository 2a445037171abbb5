"""Formats of tool calls with markers around each call and around all of them."""

from abc import abstractmethod
from typing import ClassVar

from jaxserve.parsers.call_object import CallObjectReader
from jaxserve.parsers.call_reader import CallReader, Spellings
from jaxserve.parsers.harmony import FUNCTIONS
from jaxserve.parsers.source import Reading
from jaxserve.parsers.tool_format import ToolFormat


def _deepseek_spellings(*markers: str) -> Spellings:
    """Return markers as DeepSeek models write them, whose special tokens also come apart into ordinary ones."""
    spaced = [marker.replace("▁", space) for marker in markers for space in ("▁", "_", " ", "\\_")]
    return (*spaced, *(marker.replace("｜", "|") for marker in spaced))


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
        yield from CallObjectReader(reader).read_named(name)
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
            yield from CallObjectReader(reader).read_named(name.removeprefix(FUNCTIONS), call_id)
        else:
            yield from CallObjectReader(reader).read_named(call_id.removeprefix(FUNCTIONS))
