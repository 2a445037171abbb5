"""Conversations of the protocol in OpenAI's form, which the engine takes, and parsed answers as messages."""

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.parsers import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from jaxserve.server.chat_answer import ToolUse, check_tools
from jaxserve.server.frontend import Frontend
from jaxserve.server.proto.jaxserve.v1 import chat_pb2
from jaxserve.server.sampling_codec import read_json
from jaxserve.server.template_variables import check_variables


def read_tools(frontend: Frontend, conversation: chat_pb2.Conversation) -> ToolUse:
    """The tools that a conversation offers, and the choice among them.

    Raises:
        RequestError: A tool or a choice that is wrong.
    """
    choice: Any = conversation.tool_choice if conversation.HasField("tool_choice") else None
    if choice not in (None, "auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    parallel = conversation.parallel_tool_calls if conversation.HasField("parallel_tool_calls") else None
    tools = [_tool(tool) for tool in conversation.tools]
    return check_tools(frontend.parsers, frontend.config.enable_auto_tool_choice, tools, choice, parallel)


def chat_arguments(frontend: Frontend, conversation: chat_pb2.Conversation, use: ToolUse) -> dict[str, Any]:
    """What ``EngineRequest.chat`` is for a conversation.

    Raises:
        RequestError: No messages, or variables that are wrong.
    """
    if not conversation.messages:
        raise RequestError("a conversation needs at least one message", parameter="messages", value=[])
    continues = conversation.continue_final_message
    has_choice = conversation.HasField("add_generation_prompt")
    found: dict[str, Any] = {
        "messages": [_message(message) for message in conversation.messages],
        "add_generation_prompt": conversation.add_generation_prompt if has_choice else not continues,
        "continue_final_message": continues,
    }
    if use.tools is not None:
        found["tools"] = [dict(tool) for tool in use.tools]
    variables = {**(frontend.config.default_chat_template_kwargs or {}), **_variables(conversation)}
    if variables:
        found["chat_template_kwargs"] = variables
    return found


def answer_message(answer: ParsedMessage | MessageDelta) -> chat_pb2.ParsedMessage:
    """An answer, or what is new of one."""
    made = chat_pb2.ParsedMessage(content=answer.content, reasoning=answer.reasoning)
    calls: Sequence[ToolCall | ToolCallDelta] = answer.tool_calls
    for place, call in enumerate(calls):
        index = call.index if isinstance(call, ToolCallDelta) else place
        made.tool_calls.add(index=index, id=call.id, name=call.name, arguments=call.arguments)
    return made


def _message(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role}
    for name in ("content", "name", "tool_call_id", "reasoning"):
        if message.HasField(name):
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def _tool(tool: chat_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = read_json("tools", tool.parameters_json)
    return {"type": "function", "function": function}


def _variables(conversation: chat_pb2.Conversation) -> dict[str, Any]:
    if not conversation.HasField("chat_template_kwargs_json"):
        return {}
    name = "chat_template_kwargs"
    return check_variables(name, read_json(name, conversation.chat_template_kwargs_json))
