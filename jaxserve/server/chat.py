"""Conversations in the HTTP and gRPC APIs: tools, template variables, and completions parsed into messages."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import json_copy
from jaxserve.api.request import Request
from jaxserve.parsers import (
    MessageDelta,
    MessageParser,
    ParsedMessage,
    ParserNames,
    ends_in_line,
    leading_reasoning,
    reasoning_parser,
    starts_in_reasoning,
    tool_choice_schema,
)
from jaxserve.parsers.tool_choice import chosen_function, parameter_schemas
from jaxserve.server.frontend import Frontend, sampling_params
from jaxserve.server.settings import ServerConfig

MAX_VARIABLES = 64
MAX_VARIABLE_NESTING = 64
"""Deepest nesting of objects and arrays in the variables; the object that holds them is one level."""
MAX_VARIABLE_BYTES = 1 << 18
"""Most bytes of all variables, as JSON in UTF-8."""
_VARIABLE = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)
_RESERVED = frozenset(
    "messages conversation conversations tools documents template chat_template tokenize add_generation_prompt"
    " continue_final_message variables return_assistant_tokens_mask return_dict return_tensors template_kwargs"
    " tokenizer_kwargs self raise_exception strftime_now namespace".split()
)


def check_variables(name: str, value: Any) -> dict[str, Any]:
    """Check the variables that a request passes to its chat template.

    Args:
        name: Of the parameter.
        value: As the client sent it.

    Raises:
        RequestError: No object, too many variables, a name that templates reserve (such as ``messages`` and
            ``bos_token``), or a value that is not JSON, too long, or nested too deeply.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", parameter=name, value=value)
    if len(value) > MAX_VARIABLES:
        raise RequestError(f"{name} must have at most {MAX_VARIABLES} variables, got {len(value)}", parameter=name)
    for key in value:
        if not _VARIABLE.fullmatch(key) or key in _RESERVED or key.endswith("_token"):
            raise RequestError(f"{name} cannot have the variable {key[:100]!r}", parameter=name)
    return _bounded_json(name, value)


def _bounded_json(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of JSON values whose integers fit into messages to the engine process."""

    def whole(written: str) -> int:
        number = int(written) if len(written) <= 20 else 2**63
        if not -(2**63) <= number < 2**63:
            raise RequestError(f"{name}: integers must be from -2**63 to 2**63 - 1, got {written[:40]}", parameter=name)
        return number

    try:
        written = json.dumps(json_copy(name, value, MAX_VARIABLE_NESTING), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RequestError(f"{name} must hold JSON values: {error}", parameter=name) from error
    num_bytes = len(written.encode())
    if num_bytes > MAX_VARIABLE_BYTES:
        raise RequestError(f"{name} is {num_bytes} bytes long; the limit is {MAX_VARIABLE_BYTES}", parameter=name)
    return json.loads(written, parse_int=whole)


def chat_arguments(config: ServerConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Request.chat`` for the fields of a conversation, checked and in OpenAI's form.

    Raises:
        RequestError: No message, a template that the server does not accept, or two ways to end the prompt.
    """
    template = fields.get("chat_template")
    if template is not None:
        if not config.trust_request_chat_template:
            message = (
                "this server does not accept chat_template in requests; start it with --trust-request-chat-template"
            )
            raise RequestError(message, parameter="chat_template")
        if "{{" not in template and "{%" not in template:  # it would be read as a file's name
            raise RequestError("chat_template is not a Jinja template", parameter="chat_template")
    continues = fields.get("continue_final_message", False)
    if continues and fields.get("add_generation_prompt", False):
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise RequestError(message, parameter="continue_final_message")
    variables = {**(config.default_chat_template_kwargs or {}), **fields.get("chat_template_kwargs", {})}
    if "reasoning_effort" in fields:
        variables["reasoning_effort"] = fields["reasoning_effort"]
    given: dict[str, Any] = {
        "messages": fields["messages"],
        "tools": fields.get("tools") or None,
        "chat_template": template,
        "add_generation_prompt": fields.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def chat_request(
    frontend: Frontend, fields: Mapping[str, Any], given: Mapping[str, Any], **more: Any
) -> "tuple[Request, ChatParser | None]":
    """Return the request of a conversation, and the parser of its completions; None if all of their text is content.

    Args:
        frontend: Knows the server's settings, and the model's parsers and defaults.
        fields: The conversation, in OpenAI's form: messages, tools, how the prompt ends and what is returned.
        given: Fields of ``SamplingParams``; None counts as not given.
        **more: More arguments of ``Request``.

    Raises:
        RequestError: A wrong value.
        UnavailableError: The engine is not ready.
    """
    choice = _tool_choice(frontend, fields)
    if choice == "none" and frontend.info.parsers.reasoning is None:
        parser = None
    else:
        parser = ChatParser(frontend.info.parsers, fields, choice)
        given = {**given, **parser.sampling_fields(given)}
    params = sampling_params(frontend.info, given, is_chat=True)
    return Request(chat=chat_arguments(frontend.config, fields), params=params, **more), parser


def _tool_choice(frontend: Frontend, fields: Mapping[str, Any]) -> str | Mapping[str, Any]:
    """Check the tools, and return the choice among them: ``none``, ``auto``, ``required`` or a named function.

    Raises:
        RequestError: A wrong form, a choice without tools, or ``auto`` on a server that cannot parse calls.
    """
    choice = fields.get("tool_choice")
    if not fields.get("tools"):
        if choice not in (None, "none"):
            message = "When using `tool_choice`, `tools` must be set."
            raise RequestError(message, parameter="tool_choice", value=choice)
        return "none"
    schemas, chosen = parameter_schemas(fields["tools"]), "auto" if choice is None else choice
    if isinstance(chosen, str) and chosen not in ("none", "auto", "required"):
        message = 'Invalid value for `tool_choice`: only a named tool, "none", "auto" or "required" are supported.'
        raise RequestError(message, parameter="tool_choice", value=chosen)
    chosen_function(chosen, schemas)
    if chosen == "auto" and not (frontend.config.enable_auto_tool_choice and frontend.info.parsers.tools):
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise RequestError(message, parameter="tool_choice", value=chosen)
    return chosen


class ChatParser:
    """Parses the completions of a conversation into messages, streamed or whole.

    Call ``begin`` once, before the first ``feed``.

    Args:
        names: The server's parsers.
        fields: The conversation, in OpenAI's form.
        choice: The choice among its tools.
    """

    def __init__(self, names: ParserNames, fields: Mapping[str, Any], choice: str | Mapping[str, Any]):
        self._names = names
        self._tools: Sequence[Mapping[str, Any]] = fields.get("tools") or ()
        self._choice = choice
        self._can_be_parallel = fields.get("parallel_tool_calls") is not False
        self._include_reasoning = fields.get("include_reasoning", True)
        self._reasoning = names.reasoning
        self._starts_inside: bool | None = None
        self._starts_in_line = False
        self._parsers: dict[int, MessageParser] = {}

    def sampling_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that the tools and parsers ask for.

        Args:
            given: The request's own values of these fields.

        Raises:
            RequestError: The tool choice and the request both constrain the completion.
        """
        found: dict[str, Any] = {}
        reasoning = None if self._names.reasoning is None else reasoning_parser(self._names.reasoning)
        has_special_markers = reasoning is not None and reasoning.has_special_markers
        if has_special_markers or (self._choice == "auto" and given.get("skip_special_tokens") is None):
            found["skip_special_tokens"] = False  # the markers of calls may be special tokens
        schema = tool_choice_schema(self._tools, self._choice, self._can_be_parallel) if self._tools else None
        if schema is None:
            return found
        if given.get("structured_outputs") is not None:
            message = "a tool_choice that forces a call cannot be given together with structured_outputs or a format"
            raise RequestError(message, parameter="tool_choice", value=self._choice)
        found["structured_outputs"] = {"json": dict(schema)}
        if reasoning is not None and reasoning.call_texts:  # they start calls that the schema does not constrain
            found["bad_words"] = [*(given.get("bad_words") or ()), *reasoning.call_texts]
        return found

    def begin(self, request: Request, prompt: str | None) -> None:
        """Read from a request and its rendered prompt whether the completion begins inside reasoning."""
        if self._reasoning is None:
            return
        if request.params.structured_outputs is not None:
            self._reasoning = leading_reasoning(self._reasoning)
        if prompt is not None:
            self._starts_inside = starts_in_reasoning(prompt, self._reasoning, request.last_message)
            self._starts_in_line = ends_in_line(prompt, self._reasoning)

    def feed(self, index: int, text: str, is_end: bool = False) -> MessageDelta:
        """Parse the next piece of a completion; return what it adds to the message.

        Args:
            index: Which of the n completions.
            text: The new text; may be empty.
            is_end: Whether it is the last piece.
        """
        parser = self._parser(index)
        delta = parser.finish(text) if is_end else parser.feed(text)
        calls = delta.tool_calls
        if not self._can_be_parallel:
            calls = tuple(call for call in calls if call.index == 0)
        return MessageDelta(delta.content, delta.reasoning if self._include_reasoning else None, calls)

    def whole(self, index: int, text: str) -> ParsedMessage:
        """Parse a whole completion."""
        self._parser(index).finish(text)
        return self._message(index)

    def finish_reason(self, index: int, reason: str) -> str:
        """Return ``tool_calls`` for a completion that stopped by itself and has calls; else the engine's reason."""
        return "tool_calls" if reason == "stop" and self._message(index).tool_calls else reason

    def _message(self, index: int) -> ParsedMessage:
        whole = self._parser(index).message()
        calls = whole.tool_calls if self._can_be_parallel else whole.tool_calls[:1]
        return ParsedMessage(whole.content, whole.reasoning if self._include_reasoning else None, calls)

    def _parser(self, index: int) -> MessageParser:
        if index not in self._parsers:
            self._parsers[index] = MessageParser(
                self._reasoning,
                self._names.tools,
                schemas=self._tools or None,
                tool_choice=self._choice,
                prompt_ends_in_reasoning=self._starts_inside,
                prompt_ends_in_line=self._starts_in_line,
            )
        return self._parsers[index]
