"""Parses completions into reasoning, content and tool calls, streamed or whole. Plain Python, no JAX.

parser = MessageParser("qwen3", "hermes")
for piece in pieces:
    delta = parser.feed(piece)
delta = parser.finish()
message = parser.message()
"""

from jaxserve.parsers.message import MessageDelta as MessageDelta
from jaxserve.parsers.message import ParsedMessage as ParsedMessage
from jaxserve.parsers.message import ToolCall as ToolCall
from jaxserve.parsers.message import ToolCallDelta as ToolCallDelta
from jaxserve.parsers.names import AUTO as AUTO
from jaxserve.parsers.names import FamilyParsers as FamilyParsers
from jaxserve.parsers.names import ParserNames as ParserNames
from jaxserve.parsers.names import parser_names as parser_names
from jaxserve.parsers.parser import MessageParser as MessageParser
from jaxserve.parsers.parser import chosen_reasoning as chosen_reasoning
from jaxserve.parsers.parser import leading_reasoning as leading_reasoning
from jaxserve.parsers.parser import reasoning_parser as reasoning_parser
from jaxserve.parsers.parser import tool_parser as tool_parser
from jaxserve.parsers.prompt_end import ends_in_line as ends_in_line
from jaxserve.parsers.prompt_end import last_turn as last_turn
from jaxserve.parsers.prompt_end import starts_in_reasoning as starts_in_reasoning
from jaxserve.parsers.tool_choice import tool_choice_schema as tool_choice_schema
