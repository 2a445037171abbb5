"""Tool calls in every format: tables of answers, any grouping into pieces, cuts at every position."""

import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.cli_arguments import field_docs
from jaxserve.parsers import (
    MessageDelta,
    MessageParser,
    ParsedMessage,
    starts_in_reasoning,
    tool_choice_schema,
    tool_parser,
)
from jaxserve.parsers.json_scanner import MAX_DEPTH, JsonScanner, whole_json
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.schema_types import value_types
from jaxserve.parsers.source import MAX_HELD_LENGTH
from jaxserve.parsers.tool_formats import TOOL_FORMATS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "is_exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"$ref": "#/$defs/Options"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "unit": {"enum": ["C", "F"]},
                    "level": {"enum": [1, 2]},
                },
                "required": ["city"],
                "$defs": {"Options": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


class Case(NamedTuple):
    """An answer in a format, and what is in it. Calls: name and arguments' text, "…" behind one that broke off."""

    format: str
    text: str
    content: str | None
    calls: list[tuple[str, str]]


WEATHER = '{"city": "Zürich", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {WEATHER}}}'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"
WITHOUT_ENDS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n<parameter=days>\n3\n</function>\n</tool_call>"
)
NASTY = '{"a": "</tool_call> {\\"x\\": [TOOL_CALLS]", "b": [{}, {"c": [1, -2.5e3, null]}], "d": "<tool_call>\\\\"}'


SEED = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
DSML_START = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
DSML = (
    f'{DSML_START}string="true">2</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="x" string="false">{"a": 1}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
WEATHER_CALL, BOTH = ("get_weather", WEATHER), [("get_weather", WEATHER), ("now", "{}")]
PLAIN = f'{{"name": "get_weather", "arguments": {WEATHER}}}'
COHERE = f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WEATHER}}}'
OLMO, OLMO_WORDS = 'get_weather(city="Zürich", days=2)', '{"a": null, "b": true, "c": null, "d": "x"}'
GEMMA = '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
GEMMA_NESTED = '{a:{b:[<|"|>x, y<|"|>,{c:null}],d:{}},e:[],f:-2.5,g:true,h:bare word }'
GEMMA_AS_JSON = '{"a": {"b": ["x, y", {"c": null}], "d": {}}, "e": [], "f": -2.5, "g": true, "h": "bare word"}'


def coder(*parameters: tuple[str, str]) -> str:
    """A call of get_weather as Qwen 3 Coder writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=get_weather>\n{written}</function>\n</tool_call>"


def v3(name: str, arguments: str) -> str:
    """A call as DeepSeek V3 and R1 write it."""
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    """A call as DeepSeek V3.1 writes it."""
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


SECTION = "<｜tool▁calls▁begin｜>"


def deepseek(*calls: str, separator: str = "") -> str:
    """All calls of a completion."""
    return f"{SECTION}{separator.join(calls)}<｜tool▁calls▁end｜>"


KIMI_END = "<|tool_call_end|><|tool_calls_section_end|>"


KIMI = "<|tool_calls_section_begin|>"


def kimi(call_id: str, arguments: str, lead: str = "") -> str:
    """A call of Kimi K2; lead: text before it in its section."""
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}"
    return f"{KIMI}{lead}{call}{KIMI_END}"


CASES = [
    # ---- Hermes
    Case("hermes", "Just text with <b>tags</b>. \n", "Just text with <b>tags</b>. \n", []),
    Case("hermes", HERMES, None, [("get_weather", WEATHER)]),
    Case("hermes", f"Let me look.\n\n{HERMES}\n{NOW}\n", "Let me look.", [("get_weather", WEATHER), ("now", "{}")]),
    Case("hermes", f"A {NOW} and\n{NOW}\n\nB\n", "A and\n\nB\n", [("now", "{}")] * 2),
    Case("hermes", f'<tool_call>{{"name":"f","arguments":{NASTY}}}</tool_call>', None, [("f", NASTY)]),
    Case("hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "f"}}</tool_call>', None, [("f", WEATHER)]),
    Case("hermes", '<tool_call>{"id": [1, {"name": "x"}], "name": "f"}</tool_call>', None, [("f", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "1"}</tool_call>', None, [("f", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, [("f", '{"a": 1}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', None, [("f", '{"a": "x\\ny"}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {}} more</tool_call>', " more", [("f", "{}")]),
    # No calls: all of it is content.
    Case("hermes", "a <tool_call>no call</tool_call> b", "a <tool_call>no call</tool_call> b", []),
    Case("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    Case("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    Case("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    Case("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    Case("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    Case("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    Case(
        "hermes", f'<tool_call>{{"name": "f</tool_call>\n{NOW}', '<tool_call>{"name": "f</tool_call>', [("now", "{}")]
    ),
    # Broken after the call opened: it ends there, the rest is content.
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}', "oops}}", [("f", '{"a": …')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', None, [("f", '{"a": "b…')]),
    Case(
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a":</tool_call>{NOW}',
        None,
        [("f", '{"a":…'), ("now", "{}")],
    ),
    # Closing markers after a call are never content; those of a block that is no call are.
    Case("hermes", f"{NOW}</tool_call>\n</tool_call> A", " A", [("now", "{}")]),
    Case("hermes", f"<tool_call>\n{NOW}", None, [("now", "{}")]),
    Case("hermes", f"{NOW} <tool_call>no</tool_call> A", " <tool_call>no</tool_call> A", [("now", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": !}}</tool_call> A', "!}} A", [("f", '{"a": …')]),
    Case("hermes", f"</tool_call> A {NOW}", "</tool_call> A", [("now", "{}")]),
    # ---- Llama 3
    Case("llama3_json", LLAMA, None, [("get_weather", WEATHER)]),
    Case("llama3_json", f"<|python_tag|>{LLAMA}", None, [("get_weather", WEATHER)]),
    Case("llama3_json", f"<|python_tag|> {LLAMA}; {LLAMA} ;\n{LLAMA};", None, [("get_weather", WEATHER)] * 3),
    Case("llama3_json", f"Sure: {LLAMA}\nDone; {{x}}", "Sure:\nDone; {x}", [("get_weather", WEATHER)]),
    Case("llama3_json", f'{{"type": "function", "name": "f", "arguments": {NASTY}}}', None, [("f", NASTY)]),
    Case("llama3_json", f"{LLAMA}; and", "; and", [("get_weather", WEATHER)]),
    Case("llama3_json", '<|python_tag|>search.call(query="a")', '<|python_tag|>search.call(query="a")', []),
    Case("llama3_json", f'{{"steps": [{LLAMA}], "n": 1}} .', f'{{"steps": [{LLAMA}], "n": 1}} .', []),
    Case("llama3_json", '{"name": "Bob Smith", "age": 4}', '{"name": "Bob Smith", "age": 4}', []),
    Case("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
    Case("llama3_json", "void f() { return {}; }", "void f() { return {}; }", []),
    Case("llama3_json", '{"name": "f", "parameters": {"a": 1', None, [("f", '{"a": 1…')]),
    Case("llama3_json", '{"name": "f", "parameters": {"a": !} x', "!} x", [("f", '{"a": …')]),
    Case("llama3_json", f"<|python_start|>{LLAMA}<|python_end|>", None, [("get_weather", WEATHER)]),
    Case(
        "llama3_json", f"A <|python_start|>\n{LLAMA}; {LLAMA}\n<|python_end|> B", "A B", [("get_weather", WEATHER)] * 2
    ),
    Case("llama3_json", f"<|python_start|>Sure.<|python_end|>{LLAMA}", "Sure.", [("get_weather", WEATHER)]),
    Case("llama3_json", f"<|python_start|><|python_end|>{LLAMA}", None, [("get_weather", WEATHER)]),
    Case("llama3_json", "<|python_start|>[now()]<|python_end|>", None, [("now", "{}")]),
    Case("llama3_json", f"<|python_start|>[{LLAMA}, {LLAMA}]<|python_end|>", None, [("get_weather", WEATHER)] * 2),
    Case("llama4_json", f"<|python_tag|>[{LLAMA}]", None, [("get_weather", WEATHER)]),
    Case("llama3_json", "<|python_start|>1 + 1<|python_end|> A", "<|python_start|>1 + 1<|python_end|> A", []),
    Case("llama3_json", '<|python_start|>{"a": 1}<|python_end|>', '<|python_start|>{"a": 1}<|python_end|>', []),
    Case("llama3_json", "<|python_start|>[1]<|python_end|>", "<|python_start|>[1]<|python_end|>", []),
    Case(
        "llama3_json",
        '<|python_start|>{"name": "f", "parameters": {"a": !}}<|python_end|> A',
        "!}} A",
        [("f", '{"a": …')],
    ),
    # ---- Mistral
    Case("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {NASTY}}}]', None, [("f", NASTY)]),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}, {"arguments": {"a": 1}, "name": "g"}]',
        None,
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    Case("mistral", 'Hi[TOOL_CALLS]{"name": "f", "arguments": {}}', "Hi", [("f", "{}")]),
    Case("mistral", f"Hi\n[TOOL_CALLS]get_weather[ARGS]{WEATHER}", "Hi", [("get_weather", WEATHER)]),
    Case("mistral", '[TOOL_CALLS]a{"x": 1}[TOOL_CALLS]b {}', None, [("a", '{"x": 1}'), ("b", "{}")]),
    Case("mistral", "[TOOL_CALLS]a.b-c[CALL_ID]abcdefghi[ARGS]{}", None, [("a.b-c", "{}")]),
    Case("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    Case("mistral", "[TOOL_CALLS] [] x", "[TOOL_CALLS] [] x", []),
    Case("mistral", "[TOOL_CALLS] what is it", "[TOOL_CALLS] what is it", []),
    Case("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na', '{"na', [("f", "{}")]),
    Case("mistral", '[TOOL_CALLS]f[ARGS]{"a": tru', None, [("f", '{"a": tru…')]),
    # ---- Qwen 3
    Case("qwen3", f"Look:\n{HERMES}\n{NOW}", "Look:", [("get_weather", WEATHER), ("now", "{}")]),
    Case("qwen3_coder", f"Look:\n{CODER}\n", "Look:", [("get_weather", '{"city": "Zürich"}')]),
    Case("qwen3_xml", "<tool_call><function=now></function></tool_call>", None, [("now", "{}")]),
    Case("qwen3", "<function=now>\n</function>\n</tool_call> x", " x", [("now", "{}")]),
    Case("qwen3", "<tool_call>\n<function=now>\n</tool_call>", None, [("now", "{}")]),
    Case(
        "qwen3",
        coder(("city", 'a\n\n<b>"q"\n'), ("days", "3"), ("ratio", "2.5"), ("is_exact", "True")),
        None,
        [("get_weather", '{"city": "a\\n\\n<b>\\"q\\"\\n", "days": 3, "ratio": 2.5, "is_exact": true}')],
    ),
    Case(
        "qwen3",
        coder(("tags", '["a", "b"]'), ("options", '{"a": {"b": 1}}'), ("note", "null"), ("unit", "1"), ("level", "2")),
        None,
        [("get_weather", '{"tags": ["a", "b"], "options": {"a": {"b": 1}}, "note": null, "unit": "1", "level": 2}')],
    ),
    Case(
        "qwen3",
        coder(("days", "three"), ("tags", "a, b"), ("note", "so"), ("unknown", "7")),
        None,
        [("get_weather", '{"days": "three", "tags": "a, b", "note": "so", "unknown": "7"}')],
    ),
    Case("qwen3", "<tool_call><function=f>oops</function>", "<tool_call><function=f>oops</function>", []),
    Case("qwen3", "a <function=b c", "a <function=b c", []),
    Case("qwen3", "<tool_call>\n<function=f>\n<parameter=a>\nbc", None, [("f", '{"a": "bc…')]),
    Case("qwen3", f"{CODER[:-24]}oops", "\noops", [("get_weather", '{"city": "Zürich"…')]),
    Case("qwen3", f"<tool_call>\nI look.\n{CODER[12:]}", "\nI look.", [("get_weather", '{"city": "Zürich"}')]),
    Case("qwen3", "<tool_call> no </tool_call> A", "<tool_call> no </tool_call> A", []),
    Case("qwen3", f"<tool_call> no {CODER}", "<tool_call> no", [("get_weather", '{"city": "Zürich"}')]),
    Case("qwen3", "<tool_call>\n<function=now>\n</tool_call></tool_call> A", " A", [("now", "{}")]),
    Case("qwen3", "<function=now></function> </function> A", " </function> A", [("now", "{}")]),
    # A value ends at its own tag or at one that comes after it.
    Case("qwen3", WITHOUT_ENDS, None, [("get_weather", '{"city": "Bern", "days": 3}')]),
    Case("qwen3", WITHOUT_ENDS[:-25], None, [("get_weather", '{"city": "Bern", "days": 3…')]),
    Case(
        "qwen3",
        "<function=f><parameter=a>x</parameter>oops</parameter></function></tool_call> A",
        "oops A",
        [("f", '{"a": "x"…')],
    ),
    Case("qwen3", "<function=f><parameter=a>x</parameter><parameter=ke", None, [("f", '{"a": "x", "ke…')]),
    # ---- Qwen's tags in other spellings
    Case("seed_oss", SEED, None, [("get_weather", '{"city": "Zürich", "days": 2}')]),
    Case("seed_oss", f"A {SEED}\n{SEED} B", "A B", [("get_weather", '{"city": "Zürich", "days": 2}')] * 2),
    Case("seed_oss", "<seed:tool_call> no </seed:tool_call> A", "<seed:tool_call> no </seed:tool_call> A", []),
    Case("minimax_m2", MINIMAX, None, [("get_weather", '{"city": "Zürich", "days": 2}'), ("now", "{}")]),
    Case("minimax_m2", f"A {MINIMAX} B", "A B", [("get_weather", '{"city": "Zürich", "days": 2}'), ("now", "{}")]),
    Case("minimax_m2", '<invoke name="f">x</invoke>', '<invoke name="f">x</invoke>', []),
    Case("glm45", GLM, None, [("get_weather", '{"city": "Zürich", "days": 2}')]),
    Case("glm45", f"A\n{GLM}\n{GLM}\nB", "A\nB", [("get_weather", '{"city": "Zürich", "days": 2}')] * 2),
    Case("glm47", GLM.replace("\n", ""), None, [("get_weather", '{"city": "Zürich", "days": 2}')]),
    Case("glm47", "<tool_call>now</tool_call>", None, [("now", "{}")]),
    Case("glm45", "<tool_call>now oops</tool_call>", "<tool_call>now oops</tool_call>", []),
    Case("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>bc", None, [("f", '{"a": "bc…')]),
    Case(
        "hy_v3",
        "<tool_calls><tool_call>now<tool_sep></tool_call><tool_call>f<tool_sep><arg_key>a</arg_key>"
        "<arg_value>x</arg_value></tool_call></tool_calls>",
        None,
        [("now", "{}"), ("f", '{"a": "x"}')],
    ),
    Case("ernie45", HERMES, None, [("get_weather", WEATHER)]),
    # ---- DeepSeek V3.2
    Case(
        "deepseek_v32", f"A\n\n{DSML}", "A", [("get_weather", '{"city": "2", "days": 2, "x": {"a": 1}}'), ("now", "{}")]
    ),
    Case("deepseek_v32", DSML[:165], None, [("get_weather", '{"city": "2", "days": 2…')]),
    Case("deepseek_v32", DSML_START[:60], DSML_START[:60], []),
    # ---- Lists between markers
    Case("hunyuan_a13b", f"A <tool_calls>{PLAIN}</tool_calls> B", "A B", [("get_weather", WEATHER)]),
    Case("apertus", f'A <|tools_prefix|>[{{"get_weather": {WEATHER}}}, {{"now": {{}}}}]<|tools_suffix|>', "A", BOTH),
    Case("apertus", '<|tools_prefix|>[{"now": null}]<|tools_suffix|> B', " B", [("now", "{}")]),
    Case("apertus", "<|tools_prefix|>[no]<|tools_suffix|>", "<|tools_prefix|>[no]<|tools_suffix|>", []),
    Case("apertus", '<|tools_prefix|>[{"now": {"a": 1', None, [("now", '{"a": 1…')]),
    Case(
        "cohere_command3", f"A <|START_ACTION|>[\n    {COHERE},\n    {COHERE}\n]<|END_ACTION|>", "A", [WEATHER_CALL] * 2
    ),
    Case("cohere_command4", f"<|START_ACTION|>{COHERE}<|END_ACTION|>", None, [WEATHER_CALL]),
    Case("cohere_command3", f"<|START_ACTION|>[{PLAIN}]", f"<|START_ACTION|>[{PLAIN}]", []),
    Case("granite", f"<|tool_call|>[{PLAIN}, {PLAIN}]", None, [WEATHER_CALL] * 2),
    Case("granite", f"[{PLAIN}]", None, [WEATHER_CALL]),
    Case("granite", "[1, 2]", "[1, 2]", []),
    Case(
        "granite4",
        f"A\n<tool_call>\n{PLAIN}\n</tool_call>\n<tool_call>{PLAIN}</tool_call> B",
        "A B",
        [WEATHER_CALL] * 2,
    ),
    Case(
        "granite4",
        f"<tool_call>{PLAIN}</tool_call> <tool_call>no</tool_call>",
        " <tool_call>no</tool_call>",
        [WEATHER_CALL],
    ),
    Case("phi4_mini_json", f"functools[{PLAIN}, {PLAIN}]", None, [WEATHER_CALL] * 2),
    Case("phi4_mini_json", f"<|tool_call|>[{PLAIN}]<|/tool_call|>", None, [WEATHER_CALL]),
    Case("phi4_mini_json", "import functools [x]", "import functools [x]", []),
    Case("poolside_v1", GLM, None, [WEATHER_CALL]),
    # ---- OLMo 3
    Case("olmo3", f"A\n<function_calls>\n{OLMO}\nnow()\n</function_calls>\n", "A", BOTH),
    Case("olmo3", "<function_calls>f(a=null, b=true, c=None, d='x')</function_calls> B", " B", [("f", OLMO_WORDS)]),
    Case("olmo3", f"<function_calls>{OLMO}\nand", "\nand", [WEATHER_CALL]),
    Case("olmo3", "<function_calls>no</function_calls>", "<function_calls>no</function_calls>", []),
    Case("olmo3", f"<function_calls>{OLMO}\nnow(a=[1", None, [WEATHER_CALL, ("now", '{"a": [1…')]),
    # ---- Gemma 4
    Case("gemma4", f"A {GEMMA}<|tool_call>call:now{{}}<tool_call|>", "A", BOTH),
    Case("gemma4", f"<|tool_call>call:f{GEMMA_NESTED}<tool_call|> B", " B", [("f", GEMMA_AS_JSON)]),
    Case(
        "gemma4",
        '<|tool_call>call:f{<|"|>a b<|"|>:1,c-d:<|"|>}<|"|>}<tool_call|>',
        None,
        [("f", '{"a b": 1, "c-d": "}"}')],
    ),
    Case("gemma4", "<|tool_call>call:f{a:1<tool_call|> B", " B", [("f", '{"a": 1…')]),
    Case("gemma4", "<|tool_call>call:f{oops} B", "oops} B", [("f", "{…")]),
    Case("gemma4", '<|tool_call>call:f{a:<|"|>b "c', None, [("f", '{"a": "b \\"c…')]),
    Case("gemma4", "<|tool_call>call:f{ab", None, [("f", '{"ab…')]),
    Case("gemma4", "<|tool_call>what<tool_call|>", "<|tool_call>what<tool_call|>", []),
    Case(
        "hunyuan_a13b",
        f'A <tool_calls>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]'
        "</tool_calls> B",
        "A B",
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    Case("hunyuan_a13b", "<tool_calls>no</tool_calls>", "<tool_calls>no</tool_calls>", []),
    # ---- DeepSeek
    Case("deepseek_v3", deepseek(v3("get_weather", WEATHER)), None, [("get_weather", WEATHER)]),
    Case(
        "deepseek_v3",
        "Ok.\n" + deepseek(v3("f", NASTY), v3("now", "{}"), separator="\n") + "\n",
        "Ok.",
        [("f", NASTY), ("now", "{}")],
    ),
    Case("deepseek_v3", v3("f", '{"a": "```"}'), None, [("f", '{"a": "```"}')]),
    Case("deepseek_v3", f"{SECTION}no call", f"{SECTION}no call", []),
    Case("deepseek_v3", f"<{SECTION[1:6]} x", f"<{SECTION[1:6]} x", []),
    Case("deepseek_v3", deepseek(v3("a b", "{}")), deepseek(v3("a b", "{}")), []),
    Case("deepseek_v3", deepseek(v3("f", "[1]")), deepseek(v3("f", "[1]")), []),
    Case(
        "deepseek_v3",
        deepseek(v3("f", '{"a": !}')),
        "!}\n",
        [("f", '{"a": …')],
    ),
    Case("deepseek_v3", deepseek(v3("f", '{"a": 1}'))[:-30], None, [("f", '{"a": 1}')]),
    Case("deepseek_v31", deepseek(v31("get_weather", WEATHER)), None, [("get_weather", WEATHER)]),
    Case("deepseek_v31", deepseek(v31("f", NASTY), v31("now", "{}")), None, [("f", NASTY), ("now", "{}")]),
    Case("deepseek_v31", f"A{deepseek(v31('now', '{}'))}B", "AB", [("now", "{}")]),
    Case("deepseek_v31", deepseek("f<｜tool▁sep｜>"), deepseek("f<｜tool▁sep｜>"), []),
    Case("deepseek_v31", f'{SECTION}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"a": "b', None, [("f", '{"a": "b…')]),
    Case("deepseek_v3", f"A {SECTION} B {v3('now', '{}')} C<｜tool▁calls▁end｜> D", "A  B C D", [("now", "{}")]),
    Case("deepseek_v3", deepseek(v3("now", "{}"), v3("f", "[1]")), v3("f", "[1]"), [("now", "{}")]),
    Case("deepseek_v3", deepseek(v3("now", "{}")).replace("▁", "_"), None, [("now", "{}")]),
    Case("deepseek_v31", deepseek(v31("now", "{}")).replace("▁", " "), None, [("now", "{}")]),
    Case("deepseek_v31", deepseek(v31("now", "{}")).replace("▁", "\\_"), None, [("now", "{}")]),
    Case("deepseek_v31", deepseek(v31("now", "{}")).replace("｜", "|"), None, [("now", "{}")]),
    Case("deepseek_v3", deepseek(v3("now", "{}")[len("<｜tool▁call▁begin｜>") :]), None, [("now", "{}")]),
    # ---- Kimi K2
    Case("kimi_k2", kimi("functions.get_weather:0", WEATHER), None, [("get_weather", WEATHER)]),
    Case("kimi_k2", f"Hm. {kimi('functions.a.b:12', NASTY)}\n", "Hm.", [("a.b", NASTY)]),
    Case("kimi_k2", kimi("functions.f:0", "{}") * 2, None, [("f", "{}")] * 2),
    Case("kimi_k2", kimi("f", "{}").removeprefix("<|tool_calls_section_begin|>"), None, [("f", "{}")]),
    Case("kimi_k2", kimi("functions.f:0", "oops"), kimi("functions.f:0", "oops"), []),
    Case("kimi_k2", kimi("", "{}"), kimi("", "{}"), []),
    Case("kimi_k2", kimi("functions.f:0", '{"a": tru').removesuffix(KIMI_END), None, [("f", '{"a": tru…')]),
    Case("kimi_k2", kimi("functions.f:0", '{"a": 1] b'), "] b", [("f", '{"a": 1…')]),
    Case("kimi_k2", f"A {kimi('functions.f:0', '{}', ' B ')} C", "A  B C", [("f", "{}")]),
    Case("kimi_k2", f"A {kimi('functions.f:0', 'oops', ' B ')} C", f"A {kimi('functions.f:0', 'oops', ' B ')} C", []),
    Case("kimi_k2", f"{KIMI} B {kimi('functions.f:0', '{}')}", " B", [("f", "{}")]),
    Case("kimi_k2", f"{KIMI} B <|tool_calls_section_end|>", f"{KIMI} B <|tool_calls_section_end|>", []),
    Case("kimi_k2", f"{KIMI} B", f"{KIMI} B", []),
    Case("kimi_k2", kimi("functions.f:0", "{}").replace("calls_section", "call_section"), None, [("f", "{}")]),
    Case("kimi_k2", kimi("functions.f:0", "{}").replace("<|tool_call_begin|>", ""), None, [("f", "{}")]),
    Case("kimi_k2", f"{kimi('functions.f:0', '{}')} A <|tool_calls_section_end|>", " A ", [("f", "{}")]),
    # ---- Python
    Case("pythonic", '[get_weather(city="Zürich", days=2)]', None, [("get_weather", WEATHER)]),
    Case("pythonic", "\n[now(), f(a=1,), ]\n", None, [("now", "{}"), ("f", '{"a": 1}')]),
    Case(
        "pythonic",
        """[f(a='it\\'s "x"', b="(]", c=[True, None, {'k': -2.5, 3: [],}], d=.5, e=1_000, f=0x1F, g=true, h=1e-7)]""",
        None,
        [
            (
                "f",
                '{"a": "it\'s \\"x\\"", "b": "(]", "c": [true, null, {"k": -2.5, "3": []}], "d": 0.5, "e": 1000,'
                ' "f": 31, "g": true, "h": 1e-7}',
            )
        ],
    ),
    Case(
        "pythonic",
        r"""[f(a='''x'"\ny''', b="", c="\x41\u00e9\U0001F600\d\\\t", d='', e="\ud83d\ude00")]""".replace(r"\'", "'"),
        None,
        [("f", r"""{"a": "x'\"\ny", "b": "", "c": "A\u00e9\ud83d\ude00\\d\\\t", "d": "", "e": "\ud83d\ude00"}""")],
    ),
    Case("pythonic", '[f(a="line\nbreak")] so', " so", [("f", '{"a": "line\\nbreak"}')]),
    Case("pythonic", "Sure: [now()]", "Sure: [now()]", []),
    Case("pythonic", "[link](https://x.org)", "[link](https://x.org)", []),
    Case("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    Case("pythonic", "[] x", "[] x", []),
    Case("pythonic", '[f("positional")]', '[f("positional")]', []),
    Case("pythonic", "[f(x) for x in y]", "[f(x) for x in y]", []),
    Case("pythonic", "[f(a", "[f(a", []),
    Case("pythonic", '[f(a=1, "b")]', ', "b")]', [("f", '{"a": 1…')]),
    Case(
        "pythonic",
        "[f(a=b, c={d: inf, 1: 2024-01-01})]",
        None,
        [("f", '{"a": "b", "c": {"d": "inf", "1": "2024-01-01"}}')],
    ),
    Case("pythonic", "[f(a=1e999j)]", None, [("f", '{"a": "1e999j"}')]),
    Case("pythonic", "[f(a=b c)]", " c)]", [("f", '{"a": "b"…')]),
    Case("pythonic", "[f(a=Zür", None, [("f", '{"a": "Zür…')]),
    Case("pythonic", "[f(a=1, ke", None, [("f", '{"a": 1, "ke…')]),
    Case("pythonic", "<|python_start|>[now(), f(a=1)]<|python_end|>", None, [("now", "{}"), ("f", '{"a": 1}')]),
    Case("pythonic", "Sure. <|python_start|>[now()]<|python_end|> A", "Sure. A", [("now", "{}")]),
    Case("llama4_pythonic", f"<|python_start|>{LLAMA}<|python_end|>", None, [("get_weather", WEATHER)]),
    Case("pythonic", "<|python_start|>1 + 1<|python_end|>", "<|python_start|>1 + 1<|python_end|>", []),
    Case("pythonic", "[now()]<|python_end|>", None, [("now", "{}")]),
    Case("pythonic", r'[f(a="\xZ1")]', 'Z1")]', [("f", '{"a": "…')]),
    Case("pythonic", '[f(a=[1, {"b": "c', None, [("f", '{"a": [1, {"b": "c…')]),
    Case("pythonic", "[now(), oops", "oops", [("now", "{}")]),
]
IDS = [f"{case.format}-{index}" for index, case in enumerate(CASES)]


def make_parser(name: str | None, reasoning: str | None = None, **arguments: Any) -> MessageParser:
    """A parser that gives calls the ids 0, 1, …"""
    numbers = count()
    return MessageParser(reasoning, name, schemas=TOOLS, make_id=lambda: str(next(numbers)), **arguments)


def groupings(text: str, seed: int) -> list[str]:
    """The text in random pieces, some of them empty."""
    chance = random.Random(seed)
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, max(1, len(text)))))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


class Joined(NamedTuple):
    """Content, reasoning, and calls as id, name and arguments."""

    content: str | None
    reasoning: str | None
    calls: list[list[str]]


def joined(deltas: Sequence[MessageDelta]) -> Joined:
    """What a client makes of the deltas; arguments' completeness is not in them."""
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call.index == len(calls):
                assert call.id is not None
                assert call.name
                calls.append([call.id, call.name, ""])
            else:
                assert call.id is None
                assert call.name is None
            calls[call.index][2] += call.arguments
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning or "" for delta in deltas)
    return Joined(content or None, reasoning or None, calls)


def comparable(message: ParsedMessage) -> Joined:
    """A parsed message in the form of `joined`."""
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return Joined(message.content, message.reasoning, calls)


def check_stream(make: Callable[[], MessageParser], pieces: Sequence[str]) -> ParsedMessage:
    """Feeds the pieces, compares the deltas with the whole, and returns the message."""
    parser = make()
    deltas = [parser.feed(piece) for piece in pieces]
    deltas.append(parser.finish())
    assert joined(deltas) == comparable(parser.message())
    assert parser.message() == make().parse("".join(pieces))
    return parser.message()


def shown(message: ParsedMessage) -> list[tuple[str, str]]:
    """Calls in the form of the tables."""
    return [(call.name, call.arguments + ("" if call.is_complete else "…")) for call in message.tool_calls]


# ------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_answers(case: Case) -> None:
    message = make_parser(case.format).parse(case.text)
    assert shown(message) == case.calls
    assert message.content == case.content
    assert message.reasoning is None
    for call in message.tool_calls:
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_any_grouping_gives_the_same(case: Case) -> None:
    check_stream(lambda: make_parser(case.format), list(case.text))
    for seed in range(8):
        check_stream(lambda: make_parser(case.format), groupings(case.text, seed))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_cut_anywhere(case: Case) -> None:
    """A cut answer has the beginning of the whole one's calls, and its content but for the unfinished end."""
    whole = make_parser(case.format).parse(case.text)
    for length in range(len(case.text)):
        text = case.text[:length]
        message = make_parser(case.format).parse(text)
        assert len(message.tool_calls) <= max(1, len(whole.tool_calls))
        for cut, full in zip(message.tool_calls, whole.tool_calls, strict=False):
            assert cut.name == full.name
            if cut.is_complete:
                assert cut.arguments == full.arguments
            json.loads(whole_json_after(cut.arguments) if not cut.is_complete else cut.arguments)
        if not message.tool_calls:
            assert message.content == (text or None)
            continue
        content, full = message.content or "", whole.content or ""
        shared = next(end for end in range(len(content), -1, -1) if full.startswith(content[:end]))
        assert text.endswith(content[shared:])


def whole_json_after(prefix: str) -> str:
    """Completes the beginning of a JSON object: closes what is open. Shows that the beginning is well-formed."""
    for literal in ("true", "false", "null"):
        for length in range(1, len(literal)):
            if re.search(rf"[\s:,\[]{literal[:length]}$", prefix) and (made := _closed(prefix + literal[length:])):
                return made
    for ending in ("", "0", "null", '"k": null', '": null', ": null", 'k": null', '\\"', '"', "n", "0000", "000", "00"):
        if made := _closed(prefix + ending):
            return made
    raise AssertionError(prefix)


def _closed(text: str) -> str:
    closers: list[str] = []
    is_string = False
    plain = re.sub(r"\\.", "__", text)
    for character in plain:
        if character == '"':
            is_string = not is_string
        elif not is_string and character in "{[":
            closers.append("}" if character == "{" else "]")
        elif not is_string and character in "}]":
            closers.pop()
    made = text + ('"' if is_string else "") + "".join(reversed(closers))
    try:
        json.loads(made)
    except ValueError:
        return ""
    return made


def test_arguments_come_as_they_are_written() -> None:
    parser = make_parser("hermes")
    assert not parser.feed('<tool_call>{"name": "f", "arguments": ')
    (call,) = parser.feed('{"a').tool_calls
    assert (call.index, call.id, call.name, call.arguments) == (0, "0", "f", '{"a')
    (call,) = parser.feed('": "b').tool_calls
    assert (call.index, call.id, call.name, call.arguments) == (0, None, None, '": "b')
    parser = make_parser("qwen3")
    (call,) = parser.feed("<tool_call><function=f><parameter=city>\nZür").tool_calls
    assert call.arguments == '{"city": "Zür'
    assert parser.feed("ich\n</para").tool_calls[0].arguments == "ich"
    parser = make_parser("pythonic")
    assert not parser.feed("[f(a")
    assert parser.feed("=").tool_calls[0].arguments == '{"a": '
    assert parser.feed("'b\\").tool_calls[0].arguments == '"b'
    assert parser.feed("n c").tool_calls[0].arguments == "\\n c"


def test_content_is_not_held_longer_than_needed() -> None:
    parser = make_parser("hermes")
    assert parser.feed("a < b").content == "a < b"
    assert parser.feed(" <tool").content is None
    assert parser.feed("s>").content == " <tools>"
    parser = make_parser("llama3_json")
    assert parser.feed('{"answer').content is None
    assert parser.feed('": 4, "x": ').content == '{"answer": 4, "x": '


def test_ids() -> None:
    first, second = MessageParser(tools="hermes").parse(NOW + NOW).tool_calls
    assert first.id != second.id
    assert re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", first.id)
    (call,) = MessageParser(tools="mistral").parse("[TOOL_CALLS]f{}").tool_calls
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    (call,) = (
        MessageParser(tools="mistral", tool_choice="required").parse('[{"name": "f", "parameters": {}}]').tool_calls
    )
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    (call,) = MessageParser(tools="mistral").parse("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}").tool_calls
    assert call.id == "abcdefghi"
    written = [kimi(call_id, "{}") for call_id in ("functions.f:0", "functions.f:1", "functions.f:1", "g")]
    ids = [call.id for call in MessageParser(tools="kimi_k2").parse("".join(written)).tool_calls]
    assert ids[:2] == ["functions.f:0", "functions.f:1"]
    assert all(re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", call_id) for call_id in ids[2:])
    assert len(set(ids)) == 4


def test_work_grows_with_the_text_alone() -> None:
    """Every character is taken at most a few times, whatever is held back and given up."""
    taken = 0

    class Counting(JsonScanner):
        def take(self, text: str) -> tuple[int, str]:
            nonlocal taken
            used, made = super().take(text)
            taken += used
            return used, made

    with pytest.MonkeyPatch.context() as patch:
        for module in ("call_object", "tool_formats"):
            patch.setattr(f"jaxserve.parsers.{module}.JsonScanner", Counting)
        for name, unit in [
            ("llama3_json", '{"name":'),
            ("llama3_json", '{"a":{"name":"f","x":'),
            ("hermes", HERMES[:20]),
        ]:
            taken = 0
            text = unit * 2000
            assert make_parser(name).parse(text).content == text
            assert taken <= 3 * len(text)


INTEGER, DEFINED = {"type": "integer"}, {"N": {"type": "integer"}, "A/B": {"$ref": "#/definitions/N"}}
LOOP: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/L"}, {"$ref": "#"}, {"type": "null"}] * 8}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": INTEGER}}, {"integer"}),
        ({"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": DEFINED}, {"integer"}),
        ({"properties": {"a": {"$ref": "#/definitions/N"}}, "definitions": DEFINED}, {"integer"}),
        ({"properties": {"a": {"$ref": "#/definitions/A~1B"}}, "definitions": DEFINED}, {"integer"}),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": INTEGER}}, {"integer"}),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/N"}], "default": 1}}, "$defs": DEFINED}, {"integer"}),
        (
            {"properties": {"a": {"anyOf": [{"allOf": [{"$ref": "#/$defs/N"}]}, {"type": "null"}]}}, "$defs": DEFINED},
            {"integer", "null"},
        ),
        ({"properties": {"a": {"oneOf": [INTEGER, {"const": "x"}]}}}, {"integer", "string"}),
        ({"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"a": INTEGER}}}}, {"integer"}),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": INTEGER}}]}, {"integer"}),
        ({"properties": {"b": {}}, "additionalProperties": INTEGER}, {"integer"}),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"integer", "null"}),
        ({"properties": {"a": {"type": "integer", "nullable": True}}}, {"integer", "null"}),
        ({"properties": {"a": {"items": {}}}}, {"array"}),
        ({"properties": {"a": LOOP}, "$defs": {"L": LOOP}}, {"null", "object"}),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, set()),
        ({"properties": {"a": {"$ref": "other.json#/N"}}}, set()),
        ({"properties": {"a": {"type": [{}, 5], "anyOf": 5, "enum": 5, "$ref": 5}}}, set()),
        ({"properties": 5, "additionalProperties": False}, set()),
        ({}, set()),
    ],
)
def test_types_are_found_wherever_the_schema_has_them(schema: dict[str, Any], expected: set[str]) -> None:
    assert value_types(schema, "a") == expected


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml"])
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("integer", "3", 3),
        ("integer", "3.5", "3.5"),
        ("integer", "three", "three"),
        ("number", "1e3", 1000.0),
        ("number", "NaN", "NaN"),
        ("boolean", "True", True),
        ("boolean", "yes", "yes"),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("object", "{'a': 1}", "{'a': 1}"),
        ("object", "[1]", "[1]"),
        ("array", '["a"]', ["a"]),
        ("array", "a, b", "a, b"),
        ("null", "none at all", "none at all"),
        ("string", "3", "3"),
    ],
)
def test_a_value_that_its_type_does_not_allow_is_text(name: str, kind: str, value: str, expected: Any) -> None:
    properties = {"v": {"anyOf": [{"$ref": "#/definitions/V"}]}}
    parameters = {"type": "object", "properties": properties, "definitions": {"V": {"type": kind}}}
    schemas = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = MessageParser(None, name, schemas=schemas).parse(text).tool_calls
    assert json.loads(call.arguments) == {"v": expected}


def test_public_reports(shared_data: Path) -> None:
    for case in json.loads((shared_data / "reports/parsers.json").read_text()):
        names = (case.get("reasoning"), case.get("tools"))
        is_inside = case.get("prompt_ends_in_reasoning")
        if "prompt" in case:
            is_inside = starts_in_reasoning(case["prompt"], case["reasoning"])
        options = {"schemas": case.get("schemas"), "prompt_ends_in_reasoning": is_inside, "make_id": lambda: "0"}
        message = MessageParser(*names, **options).parse(case["text"])
        expected, content = case["expected"], (message.content or "").strip()
        assert [[call.name, json.loads(call.arguments)] for call in message.tool_calls] == expected["calls"]
        assert (message.reasoning or "").strip() == expected.get("reasoning", "")
        assert content == (expected.get("content") or "") or "content_starts" in expected
        assert content.startswith(expected.get("content_starts", ""))
        assert expected.get("content_lacks", "<") not in content
        for cut in range(len(case["text"])):
            parser = MessageParser(*names, **options)
            parser.feed(case["text"][:cut])
            parser.finish(case["text"][cut:])
            assert parser.message() == message


def test_text_between_a_section_and_its_call_is_held_up_to_a_limit() -> None:
    parser = make_parser("kimi_k2")
    assert not parser.feed(f"{KIMI} B ")
    assert parser.feed("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{").content == " B"
    long = f"{KIMI}{'y' * MAX_HELD_LENGTH}"
    parser = make_parser("kimi_k2")
    assert not parser.feed(long)
    assert parser.feed("y").content == f"{long}y"
    for length in (MAX_HELD_LENGTH - 1, MAX_HELD_LENGTH, MAX_HELD_LENGTH + 1):
        text = kimi("functions.f:0", "{}", "y" * length)
        message = check_stream(lambda: make_parser("kimi_k2"), [text[:-60], *text[-60:]])
        assert shown(message) == [("f", "{}")]
        assert (message.content or "").startswith(KIMI) is (length > MAX_HELD_LENGTH)


# ------------------------------------------------------------------------------------------------ any JSON


SNIPPETS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁call▁end｜>",
    "```",
    "<|tool_call_end|>",
    "<|call|>",
    "<|channel|>",
    "{",
    "}",
    '"',
    "\\",
    "é",
    "\n",
    "; ",
]
TEXTS = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4)).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


def write(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as a model of the format writes them."""
    if name == "mistral":
        return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": json.loads(a)} for n, a in calls])
    if name == "mistral-named":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)
    if name == "deepseek_v3":
        return deepseek(*(v3(n, a) for n, a in calls), separator="\n")
    if name == "deepseek_v31":
        return deepseek(*(v31(n, a) for n, a in calls))
    if name == "kimi_k2":
        return "".join(kimi(f"functions.{n}:{index}", a) for index, (n, a) in enumerate(calls))
    if name == "openai":
        start = "<|start|>assistant<|channel|>commentary to=functions."
        return "".join(f"{start}{n} <|constrain|>json<|message|>{a}<|call|>" for n, a in calls)
    if name == "llama3_json":
        return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


@given(
    name=st.sampled_from(
        [
            "deepseek_v3",
            "deepseek_v31",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "mistral",
            "mistral-named",
            "openai",
            "qwen3",
        ]
    ),
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    is_ascii=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_arguments_survive(name: str, calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, seed: int) -> None:
    written = [(function, json.dumps(arguments, ensure_ascii=is_ascii)) for function, arguments in calls]
    text = "Well: " + write(name, written)
    message = check_stream(lambda: make_parser(name.split("-")[0]), groupings(text, seed))
    assert message.content == "Well:"
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    if name != "mistral":
        assert shown(message) == written


@given(
    values=st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), TEXTS.filter(lambda t: "</parameter>" not in t)
    ),
    seed=st.integers(0, 2**32),
)
def test_any_strings_survive_in_tags(values: dict[str, str], seed: int) -> None:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    (call,) = check_stream(lambda: make_parser("qwen3"), groupings(text, seed)).tool_calls
    assert json.loads(call.arguments) == values


@given(arguments=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES), seed=st.integers(0, 2**32))
def test_any_values_survive_in_python(arguments: dict[str, Any], seed: int) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    message = check_stream(lambda: make_parser("pythonic"), groupings(f"[f({written}), now()]", seed))
    first, second = message.tool_calls
    assert json.loads(first.arguments) == arguments
    assert (second.name, second.arguments, message.content) == ("now", "{}", None)


MARKED = [
    v3("f", "{}"),
    SECTION,
    v31("f", '{"a":'),
    "<｜tool▁sep｜>f",
    kimi("functions.f:0", "{}"),
    "<|tool_call_begin|>f",
]
PYTHON = ["[f(", "a=", "'x', ", '"""', "[1, {", ")]", "True"]


@given(
    name=st.sampled_from(["deepseek_v3", "hermes", "kimi_k2", "llama3_json", "mistral", "pythonic", "qwen3"]),
    parts=st.lists(
        st.sampled_from([*SNIPPETS, HERMES, LLAMA, CODER, '"name": "f"', '"arguments": {', "<function=f>"])
        | st.sampled_from([*MARKED, *PYTHON])
    ),
    seed=st.integers(0, 2**32),
)
def test_any_text_gives_the_same_in_any_grouping(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    message = check_stream(lambda: make_parser(name), groupings(text, seed))
    if not message.tool_calls:
        assert message.content == (text or None)


@given(value=VALUES, is_ascii=st.booleans())
def test_scanner_follows_json(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1) + " "
    scanner = JsonScanner()
    taken = "".join(scanner.take(character)[1] for character in text)
    assert scanner.is_done
    assert taken.rstrip() == text.rstrip()
    assert whole_json(text) == text.strip()


@given(text=st.text(alphabet='{}[]",:\\u01.eE+-tfn rueals\x01', max_size=12))
def test_scanner_agrees_with_json_module(text: str) -> None:
    try:
        json.loads(text, strict=False)
    except ValueError:
        assert not whole_json(text)
    else:
        assert json.loads(whole_json(text)) == json.loads(text, strict=False)


def test_scanner_limits_depth() -> None:
    assert whole_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not whole_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


# ------------------------------------------------------------------------------------------------ tool choice


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_schema_of_required_tools() -> None:
    schema = tool_choice_schema(TOOLS, "required")
    assert schema is not None
    weather = TOOLS[0]["function"]["parameters"]
    assert schema == {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["get_weather"]},
                        "parameters": {key: value for key, value in weather.items() if key != "$defs"},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                },
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["now"]},
                        "parameters": {"type": "object", "properties": {}},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                },
            ],
        },
        "$defs": {"Options": {"type": "object"}},
    }
    one = tool_choice_schema(TOOLS, "required", parallel_tool_calls=False)
    assert one == {**schema, "maxItems": 1}
    assert "$defs" in weather


def test_schema_of_other_choices() -> None:
    assert tool_choice_schema(TOOLS, NAMED) == TOOLS[0]["function"]["parameters"]
    for choice in ("auto", "none", None):
        assert tool_choice_schema(TOOLS, choice) is None


REQUIRED = f'[{{"name": "get_weather", "parameters": {WEATHER}}}, {{"name": "now", "parameters": {{}}}}]'


@pytest.mark.parametrize(
    ("choice", "text", "content", "calls"),
    [
        ("required", REQUIRED, None, [("get_weather", WEATHER), ("now", "{}")]),
        ("required", f"\n{REQUIRED}\n", None, [("get_weather", WEATHER), ("now", "{}")]),
        ("required", REQUIRED[:-40], None, [("get_weather", '{"city": "Zürich", "days":…')]),
        ("required", "I cannot.\n", "I cannot.\n", []),
        (NAMED, WEATHER, None, [("get_weather", WEATHER)]),
        (NAMED, f" {WEATHER[:-5]}", None, [("get_weather", f"{WEATHER[:-5]}…")]),
        (NAMED, "I cannot.", "I cannot.", []),
        ("none", HERMES, HERMES, []),
        ("auto", HERMES, None, [("get_weather", WEATHER)]),
    ],
)
def test_answers_to_tool_choices(choice: Any, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    for seed in range(10):
        message = check_stream(lambda: make_parser("hermes", tool_choice=choice), groupings(text, seed))
        assert shown(message) == calls
        assert message.content == content


CONFLICT = [
    {"type": "function", "function": {"name": name, "parameters": {"$defs": {"A": {"type": kind}}}}}
    for name, kind in [("f", "string"), ("g", "object")]
]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, "always", "tool_choice must be 'auto', 'none', 'required' or"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, {"function": {"name": "f"}}, "tool_choice names a function that is not in tools"),
        ([], "required", "tool_choice='required' needs tools"),
        ([{"name": "f"}], "required", "a tool must be"),
        ([{"function": {"name": "f", "parameters": []}}, {"function": {"name": "f"}}], "auto", "the same name"),
        ([{"function": {"name": "f", "parameters": 5}}], "auto", "a tool must be"),
        (CONFLICT, "required", r"two tools define this name differently in \$defs"),
    ],
)
def test_bad_tools_and_choices(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tool_choice_schema(tools, choice)


def test_names_of_formats() -> None:
    assert tool_parser("qwen3_coder") is tool_parser("qwen3")
    assert tool_parser("deepseek_v31") is tool_parser("deepseek_v3")
    with pytest.raises(
        ConfigError, match=r"tool_call_parser must be one of \['apertus', .*'; did you mean 'llama3_json'\?"
    ):
        tool_parser("llama3")
    with pytest.raises(ConfigError, match="got 'zzz'$"):
        MessageParser(tools="zzz")


def test_names_are_documented() -> None:
    documented = field_docs(EngineConfig)
    for setting, formats in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        assert set(formats) <= set(re.findall(r"\w+", documented[setting]))


def test_nothing_after_the_end() -> None:
    parser = make_parser("hermes")
    parser.parse("a")
    with pytest.raises(ValueError, match="feed after finish"):
        parser.feed("b")
