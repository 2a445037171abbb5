"""Parses a completion into reasoning, content and tool calls, as a whole or incrementally."""

import difflib
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from jaxserve.api.errors import ConfigError
from jaxserve.parsers.call_finder import CallFinder
from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.harmony import HarmonyReasoning
from jaxserve.parsers.message import MessageBuilder, MessageDelta, ParsedMessage
from jaxserve.parsers.reasoning_format import ReasoningFormat
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.reasoning_reader import ReasoningReader
from jaxserve.parsers.source import Reading, Source
from jaxserve.parsers.tag_reasoning import TagReader, TagReasoning
from jaxserve.parsers.tool_choice import chosen_function, parameter_schemas
from jaxserve.parsers.tool_format import TextFormat, ToolFormat
from jaxserve.parsers.tool_formats import TOOL_FORMATS, NamedFormat, RequiredFormat

Format = TypeVar("Format")

PIECE_LENGTH = 1024
"""Longer pieces are read in parts, because the work per part may be quadratic in its length."""


def tool_parser(name: str) -> type[ToolFormat]:
    """Return the tool-call format with this vLLM name.

    Raises:
      ConfigError: The name is unknown.
    """
    return _named(TOOL_FORMATS, name, "tool_call_parser")


def reasoning_parser(name: str) -> type[ReasoningFormat]:
    """Return the reasoning format with this vLLM name, which declares its markers.

    Raises:
      ConfigError: The name is unknown.
    """
    return _named(REASONING_FORMATS, name, "reasoning_parser")


def chosen_reasoning(reasoning: str | None, tools: str | None) -> str | None:
    """Return the reasoning format to use: the named one, or the one that the format of tool calls needs.

    Args:
      reasoning: Name of a reasoning format, or None.
      tools: Name of a tool-call format, or None.

    Raises:
      ConfigError: A format is unknown, or the two do not match.
    """
    chosen = None if reasoning is None else reasoning_parser(reasoning)
    needed = None if tools is None else tool_parser(tools).reasoning
    if needed is None or chosen is reasoning_parser(needed):
        return reasoning
    if reasoning is not None:
        message = f"tool_call_parser={tools!r} requires reasoning_parser={needed!r}, got {reasoning!r}"
        raise ConfigError(f"{message}; leave reasoning_parser out to use it")
    return needed


def leading_reasoning(name: str) -> str:
    """Return the format of a completion that reasons like the named format, but only at its beginning.

    What follows is constrained by a grammar, and may contain the markers as ordinary text.
    """
    return "qwen3" if name == "think" else name


class MessageParser:
    """Parses one completion.

    The result depends only on the text, not on its division into pieces: concatenating the deltas gives the texts of
    `message()` and `parse()`. Nothing in a delta is ever retracted.

    Reasoning ends at its closing marker, or where a call of an offered tool begins a line in it; the closing marker is
    then dropped when it comes. The markers of calls are never content; a block that is no call is, as a whole.

    White space between content and a call after it, or between the last call and the end, belongs to the format and is
    dropped; all other text outside of calls is content, including text that only resembles a call. See `CallReader` for
    malformed calls.

    Args:
      reasoning: Name of a reasoning format, or None to leave reasoning in the content (unless `tools` needs a format).
      tools: Name of a tool-call format, or None to leave calls in the content. Its markers may be special tokens:
        generate with `skip_special_tokens=False`.
      schemas: The tools as offered to the model, in OpenAI's form.
      tool_choice: As in OpenAI's API. "none" leaves calls in the content. "required" and a named function parse the
        output that `tool_choice_schema` constrains, whatever `tools` is.
      prompt_ends_in_reasoning: The result of `starts_in_reasoning` for the prompt.
      prompt_ends_in_line: Whether the reasoning in the prompt ends within a line.
      make_id: Makes the ids of calls; by default in vLLM's form.

    Raises:
      ConfigError: An unknown format.
      RequestError: The tools or the tool choice are invalid.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        schemas: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = "auto",
        prompt_ends_in_reasoning: bool | None = None,
        prompt_ends_in_line: bool = False,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        self._message = message = MessageBuilder()
        self._is_finished = False
        self._begins_line = not (prompt_ends_in_line and prompt_ends_in_reasoning)
        self._format = _choose_format(tools, schemas, tool_choice)
        self._finder = CallFinder(self._format.run, self._format.schemas) if self._format.schemas else None
        reasoning = chosen_reasoning(reasoning, tools)
        thoughts = None if reasoning is None else reasoning_parser(reasoning)
        source, tags = Source(), None
        if thoughts is not None and issubclass(thoughts, TagReasoning):
            tags = TagReader(source, message, thoughts, self._finder)
        id_length = None if tools is None else tool_parser(tools).id_length
        reader = CallReader(source, message, make_id or partial(make_call_id, id_length), tags)
        is_inside = thoughts is not None and thoughts.begins_inside(prompt_ends_in_reasoning)
        self._drivers = [_Driver(source, self._read_all(reader, tags, is_inside))]
        if thoughts is HarmonyReasoning:
            messages, content = Source(), self._drivers[0].feed
            make_reader = partial(self._reasoning_reader, messages)
            reading = HarmonyReasoning.run(
                messages, prompt_ends_in_reasoning, message.add_reasoning, content, make_reader
            )
            self._drivers.insert(0, _Driver(messages, reading))

    def _read_all(self, reader: CallReader, tags: TagReader | None, is_inside: bool | None) -> Reading[None]:
        if tags is not None:
            starts = (*self._format.leading_starts, *self._format.starts)
            yield from tags.begin(is_inside, starts, begins_line=self._begins_line)
        yield from self._format.run(reader)

    def _reasoning_reader(self, source: Source, emit: Callable[[str], None]) -> ReasoningReader:
        """Return the reader of one of several messages of reasoning."""
        leading = self._format.leading_starts if self._message.is_empty else ()
        begins_line, self._begins_line = self._begins_line, True
        return ReasoningReader(source, emit, self._finder, (*leading, *self._format.starts), begins_line=begins_line)

    def feed(self, text: str) -> MessageDelta:
        """Read the next piece of the completion and return what it adds to the message."""
        self._read(text)
        return self._message.take_delta()

    def finish(self, text: str = "") -> MessageDelta:
        """Read the last piece of the completion and return what it and the held text add."""
        self._read(text)
        self._is_finished = True
        for driver in self._drivers:
            driver.finish()
        return self._message.take_delta()

    def message(self) -> ParsedMessage:
        """Return the message so far."""
        return self._message.message()

    def parse(self, text: str) -> ParsedMessage:
        """Parse a whole completion; the same as `finish` and `message`."""
        self.finish(text)
        return self.message()

    def _read(self, text: str) -> None:
        if self._is_finished:
            raise ValueError("feed after finish: a MessageParser reads one completion")
        for start in range(0, len(text), PIECE_LENGTH):
            self._drivers[0].feed(text[start : start + PIECE_LENGTH])


class _Driver:
    """A reading generator and its source."""

    def __init__(self, source: Source, reading: Reading[None]) -> None:
        self._source = source
        self._reading = reading
        self._resume()

    def feed(self, text: str) -> None:
        """Append text and continue reading."""
        self._source.feed(text)
        self._resume()

    def finish(self) -> None:
        """Read to the end."""
        self._source.end()
        self._resume()

    def _resume(self) -> None:
        next(self._reading, None)


def make_call_id(length: int | None = None) -> str:
    """Return a new call id: in vLLM's form, or a number of letters and digits."""
    if length is None:
        return f"chatcmpl-tool-{uuid.uuid4().hex}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def _choose_format(
    tools: str | None, schemas: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None
) -> ToolFormat:
    offered = parameter_schemas(schemas or [])
    chosen = None if tools is None else tool_parser(tools)
    if tool_choice == "required":
        return RequiredFormat(offered)
    if (name := chosen_function(tool_choice, offered)) is not None:
        return NamedFormat({name: offered[name]})
    return TextFormat(offered) if tool_choice == "none" or chosen is None else chosen(offered)


def _named(table: Mapping[str, type[Format]], name: str, setting: str) -> type[Format]:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{setting} must be one of {sorted(table)}, got {name!r}{hint}")
