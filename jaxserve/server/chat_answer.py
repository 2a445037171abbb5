"""Answers of a conversation as every surface gives them: reasoning, content and tool calls, streamed or whole."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.parsers import (
    MessageDelta,
    MessageParser,
    ParsedMessage,
    leading_reasoning,
    starts_in_reasoning,
    tool_choice_schema,
)
from jaxserve.parsers.tool_choice import chosen_function, parameter_schemas
from jaxserve.server.frontend import ParserNames

ToolChoice = str | Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """What a request says of tools, checked.

    Attributes:
        tools: In OpenAI's form; None where there are none.
        choice: ``none``, ``auto``, ``required`` or the function's object.
        schema: The JSON schema that the answer must keep to (``structured_outputs.json``); None where it is free.
        can_be_parallel: Whether the model may call several functions at once.
    """

    tools: tuple[Mapping[str, Any], ...] | None = None
    choice: str | Mapping[str, Any] = "none"
    schema: Mapping[str, Any] | None = None
    can_be_parallel: bool = True

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are read from the text, in which their marks may be special tokens."""
        return self.choice == "auto"


def check_tools(
    names: ParserNames,
    is_auto_enabled: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: ToolChoice,
    can_be_parallel: bool | None = None,
) -> ToolUse:
    """Reads the tools of a request and its choice among them.

    Args:
        names: The server's parsers.
        is_auto_enabled: ``ServerConfig.enable_auto_tool_choice``.
        tools: In OpenAI's form; None or empty where there are none.
        choice: ``tool_choice``; None is ``auto`` where there are tools.
        can_be_parallel: ``parallel_tool_calls``; None is True.

    Raises:
        RequestError: A wrong form, a choice without tools, or ``auto`` on a server that cannot read calls.
    """
    schemas = parameter_schemas(tools or ())
    if not tools:
        if choice not in (None, "none"):
            message = "When using `tool_choice`, `tools` must be set."
            raise RequestError(message, parameter="tool_choice", value=choice)
        return ToolUse()
    chosen = "auto" if choice is None else choice
    if isinstance(chosen, str) and chosen not in ("none", "auto", "required"):
        message = 'Invalid value for `tool_choice`: only a named tool, "none", "auto" or "required" are supported.'
        raise RequestError(message, parameter="tool_choice", value=chosen)
    chosen_function(chosen, schemas)
    if chosen == "auto" and not (is_auto_enabled and names.tools):
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise RequestError(message, parameter="tool_choice", value=chosen)
    schema = tool_choice_schema(tools, chosen, can_be_parallel)
    return ToolUse(tuple(tools), chosen, schema, can_be_parallel is not False)


class ChatAnswer:
    """The texts of a conversation's answers, taken apart as they come.

    Call ``begin`` once, before the first ``feed``.

    Args:
        names: The server's parsers.
        use: The request's tools.
        include_reasoning: Whether reasoning is given; it is taken out of the content all the same.
        is_constrained: Whether the answer keeps to a grammar, so that it reasons before it alone.
    """

    def __init__(
        self,
        names: ParserNames,
        use: ToolUse | None = None,
        *,
        include_reasoning: bool = True,
        is_constrained: bool = False,
    ):
        self._names = names
        self._use = use or ToolUse()
        self._include_reasoning = include_reasoning
        self._reasoning = names.reasoning
        if is_constrained and names.reasoning is not None:
            self._reasoning = leading_reasoning(names.reasoning)
        self._starts_inside: bool | None = None
        self._readers: dict[int, MessageParser] = {}
        self._is_plain = self._reasoning is None and self._use.choice == "none"
        self._plain_texts: dict[int, list[str]] = {}

    def begin(self, prompt: str | None) -> None:
        """Takes the prompt's text, in which the template may have opened or closed the reasoning."""
        if self._reasoning is not None and prompt is not None:
            self._starts_inside = starts_in_reasoning(prompt, self._reasoning)

    def feed(self, index: int, text: str, is_end: bool = False) -> MessageDelta:
        """Takes the newest piece of the text at ``index``; returns what it adds to that answer.

        Args:
            index: Which of the n texts.
            text: What is new of it; may be empty.
            is_end: Whether nothing follows.
        """
        if self._is_plain:
            self._plain_texts.setdefault(index, []).append(text)
            return MessageDelta(text or None)
        reader = self._reader(index)
        delta = reader.finish(text) if is_end else reader.feed(text)
        calls = delta.tool_calls
        if not self._use.can_be_parallel:
            calls = tuple(call for call in calls if call.index == 0)
        return MessageDelta(delta.content, delta.reasoning if self._include_reasoning else None, calls)

    def message(self, index: int) -> ParsedMessage:
        """All that came at ``index`` so far."""
        if self._is_plain:
            return ParsedMessage("".join(self._plain_texts.get(index, ())) or None)
        whole = self._reader(index).message()
        calls = whole.tool_calls if self._use.can_be_parallel else whole.tool_calls[:1]
        return ParsedMessage(whole.content, whole.reasoning if self._include_reasoning else None, calls)

    def finish_reason(self, index: int, reason: str) -> str:
        """``tool_calls`` for an answer that ended by itself and called some; else the engine's reason."""
        is_call = reason == "stop" and not self._is_plain and bool(self.message(index).tool_calls)
        return "tool_calls" if is_call else reason

    def _reader(self, index: int) -> MessageParser:
        if index not in self._readers:
            self._readers[index] = MessageParser(
                self._reasoning,
                self._names.tools,
                schemas=self._use.tools,
                tool_choice=self._use.choice,
                prompt_ends_in_reasoning=self._starts_inside,
            )
        return self._readers[index]
