"""Any reasoning format with any format of tool calls: any cut gives the same message, and no text is lost."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.parsers import MessageParser, ParsedMessage, chosen_reasoning
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.tool_formats import TOOL_FORMATS

PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}
]
TAGS = "<function=f>\n<parameter=a>\nWORD\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>"
JSON = '{"name": "f", "arguments": {"a": "WORD", "n": 2}}'
PARAMETERS = '{"name": "f", "parameters": {"a": "WORD", "n": 2}}'
COHERE = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "WORD", "n": 2}}'
ARGUMENTS = '{"a": "WORD", "n": 2}'
PYTHON = '[f(a="WORD", n=2)]'
CALLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepseek_v3": (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            f"<｜tool_calls_begin｜><｜tool_call_begin｜>f<｜tool_sep｜>{ARGUMENTS}<｜tool_call_end｜><｜tool_calls_end｜>",
            f"<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        "hermes": (f"<tool_call>\n{JSON}\n</tool_call>", f"<tool_call>\n<tool_call>{JSON}</tool_call></tool_call>"),
        "kimi_k2": (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            f"<|tool_call_section_begin|>\n<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}"
            "<|tool_call_end|><|tool_call_section_end|>",
        ),
        "llama3_json": (
            PARAMETERS,
            f"<|python_tag|>{PARAMETERS}",
            f"<|python_start|>{PARAMETERS}<|python_end|>",
            f"<|python_start|><|python_end|>{PARAMETERS}",
            f"<|python_start|>{PYTHON}<|python_end|>",
        ),
        "mistral": (f"[TOOL_CALLS][{JSON}]", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"),
        "glm45": (
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>WORD</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>WORD</arg_value><arg_key>n</arg_key>"
            "<arg_value>2</arg_value></tool_call></tool_calls>",
        ),
        "apertus": (f'<|tools_prefix|>[{{"f": {ARGUMENTS}}}]<|tools_suffix|>',),
        "cohere_command3": (f"<|START_ACTION|>[{COHERE}]<|END_ACTION|>",),
        "deepseek_v32": (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">WORD'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        "gemma4": ('<|tool_call>call:f{a:<|"|>WORD<|"|>,n:2}<tool_call|>',),
        "granite": (f"<|tool_call|>[{JSON}]", f"<tool_call>\n{JSON}\n</tool_call>", f"[{JSON}]"),
        "hunyuan_a13b": (f"<tool_calls>[{JSON}]</tool_calls>",),
        "olmo3": ('<function_calls>\nf(a="WORD", n=2)\n</function_calls>',),
        "phi4_mini_json": (f"functools[{JSON}]", f"<|tool_call|>[{JSON}]<|/tool_call|>"),
        "minimax_m2": (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">WORD</parameter>\n<parameter name="n">2'
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        "seed_oss": (f"<seed:tool_call>\n{TAGS}\n</seed:tool_call>",),
        "openai": (f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>",),
        "pythonic": (
            PYTHON,
            f"<|python_start|>{PYTHON}<|python_end|>",
            f"<|python_start|>[{PARAMETERS}]<|python_end|>",
        ),
        "qwen3": (
            f"<tool_call>\n{TAGS}\n</tool_call>",
            TAGS,
            TAGS.replace("</parameter>\n", ""),
            f"<tool_call>\n{JSON}\n</tool_call>",
        ),
    }
)
REASONING = (None, "deepseek_r1", "openai_gptoss", "qwen3", "think")
OWN_TOOLS = {
    "apertus": "apertus",
    "cohere_command3": "cohere_command3",
    "ernie45": "hermes",
    "gemma4": "gemma4",
    "granite": "granite",
    "hunyuan_a13b": "hunyuan_a13b",
    "mistral": "mistral",
    "seed_oss": "seed_oss",
}
"""Other spellings of tags, each with its model's tool calls."""


def pairs() -> Iterator[tuple[str | None, str]]:
    """Pairs of formats that the configuration allows."""
    yield from OWN_TOOLS.items()
    for reasoning, tools in itertools.product(REASONING, CALLS):
        if TOOL_FORMATS[tools].reasoning in (None, reasoning) or reasoning is None:
            yield reasoning, tools


def make_parser(reasoning: str | None, tools: str, **options: Any) -> MessageParser:
    """A parser that gives calls the ids 0, 1, …"""
    numbers = count()
    options = {"schemas": TOOLS, "make_id": lambda: str(next(numbers)), **options}
    return MessageParser(reasoning, tools, **options)


def streamed(parser: MessageParser, pieces: list[str]) -> ParsedMessage:
    """The message, after a comparison with the joined deltas."""
    deltas = [*map(parser.feed, pieces), parser.finish()]
    message = parser.message()
    assert ("".join(delta.reasoning or "" for delta in deltas) or None) == message.reasoning
    assert ("".join(delta.content or "" for delta in deltas) or None) == message.content
    for index, call in enumerate(message.tool_calls):
        parts = [part for delta in deltas for part in delta.tool_calls if part.index == index]
        assert (parts[0].name, "".join(part.arguments for part in parts)) == (call.name, call.arguments)
    return message


def kept_text(message: ParsedMessage) -> str:
    """All texts of a message."""
    arguments = (call.name + call.arguments for call in message.tool_calls)
    return "\n".join([message.reasoning or "", message.content or "", *arguments])


def numbered(text: str) -> tuple[str, list[str]]:
    """A text with its words WORD made different, and these words."""
    numbers = count()
    made = re.sub("WORD", lambda _: f"w{next(numbers)}w", text)
    return made, re.findall(r"w\d+w", made)


def opened(reasoning: str | None, text: str) -> str:
    """A text inside reasoning, which does not end."""
    if reasoning is None:
        return text
    start = REASONING_FORMATS[reasoning].start_text
    return f"<|channel|>analysis<|message|>{text}" if reasoning == "openai_gptoss" else f"{start}{text}"


@pytest.mark.parametrize(("reasoning", "tools"), [pair for pair in pairs() if pair[0] is not None])
def test_a_call_in_open_reasoning_is_a_call_however_it_is_cut(reasoning: str, tools: str) -> None:
    end = "<|end|>" if reasoning == "openai_gptoss" else REASONING_FORMATS[reasoning].end_text
    end = "<|start|>assistant<|channel|>final<|message|>" if tools == "openai" else end
    for written in CALLS[tools]:
        text, words = numbered(opened(reasoning, f"I call WORD.\n{written}\n{end}\n\nDone WORD."))
        whole = make_parser(reasoning, tools).parse(text)
        assert (whole.reasoning or "").strip() == f"I call {words[0]}.", text
        assert (whole.content or "").strip() == f"Done {words[2]}."
        assert [(call.name, call.arguments) for call in whole.tool_calls] == [("f", f'{{"a": "{words[1]}", "n": 2}}')]
        for cut in range(0, len(text) + 1, 4):
            assert streamed(make_parser(reasoning, tools), [text[:cut], text[cut:]]) == whole
        assert streamed(make_parser(reasoning, tools), list(text)) == whole


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [pair for pair in pairs() if pair[1] != "openai" and pair not in (("apertus",) * 2, ("gemma4",) * 2) and pair[0]],
)
def test_other_markers_in_reasoning_are_reasoning(reasoning: str, tools: str) -> None:
    for written in CALLS[tools]:
        for text, options in [
            (f"I could call {written} or", {}),
            (f"Hm.\n{written} or", {"schemas": [{"type": "function", "function": {"name": "g"}}]}),
            (f"Hm.\n{written} or", {"schemas": None}),
            (f"Hm.\n{written} or", {"tool_choice": "none"}),
            (f"Hm.\n{written[: len(written) // 4]} or", {}),
        ]:
            whole = make_parser(reasoning, tools, **options).parse(opened(reasoning, text))
            assert (whole.reasoning, whole.content, whole.tool_calls) == (text, None, ()), text
            assert streamed(make_parser(reasoning, tools, **options), list(opened(reasoning, text))) == whole


@pytest.mark.parametrize(("reasoning", "tools"), list(pairs()))
def test_every_prefix_keeps_every_word(reasoning: str | None, tools: str) -> None:
    for written in CALLS[tools]:
        text, _ = numbered(opened(reasoning, f"WORD.\n{written}") if reasoning else f"{written} WORD")
        for length in range(len(text)):
            kept = kept_text(make_parser(reasoning, tools).parse(text[:length]))
            assert all(word in kept for word in re.findall(r"w\d+w", text[:length])), text[:length]


PARTS = ["WORD", "\n", " ", "{", "}", '"', "</parameter>", "</tool_call>", "<think>", "</think>", "<|end|>", "f(a="]
WRAPPERS = ("<answer>", "</answer>", "<response>", "</response>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "thought\n")
PARTS += [*WRAPPERS, "Here is my response:", "<|channel>", "<channel|>", "<|START_THINKING|>", "<|END_THINKING|>"]
PARTS += ["<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<|python_end|>", "<tool_call>", "<function=f>"]


@settings(max_examples=150, deadline=None)
@given(
    pair=st.sampled_from(list(pairs())),
    is_inside=st.sampled_from([None, True, False]),
    parts=st.lists(st.integers(0, 99), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_any_text_gives_the_same_in_any_cut(
    pair: tuple[str | None, str], is_inside: bool | None, parts: list[int], seed: int
) -> None:
    reasoning, tools = pair
    chance = random.Random(seed)
    pool = [*PARTS, *(f"\n{call}" for call in CALLS[tools]), *CALLS[tools]]
    pool += [call[: len(call) // 2] for call in CALLS[tools]]
    text, words = numbered("".join(pool[part % len(pool)] for part in parts))
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, len(text) + 1)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    whole = make_parser(reasoning, tools, prompt_ends_in_reasoning=is_inside).parse(text)
    assert streamed(make_parser(reasoning, tools, prompt_ends_in_reasoning=is_inside), pieces) == whole
    kept = kept_text(whole)
    assert all(word in kept for word in words)
    chosen = chosen_reasoning(reasoning, tools)
    if not whole.tool_calls and chosen != "openai_gptoss":
        format = REASONING_FORMATS[chosen] if chosen else None
        spoken = (format.start_text, format.end_text, *WRAPPERS) if format else ()
        tags = [re.escape(tag) for tag in spoken]
        given = "".join(sorted(re.sub("|".join(tags), "", text) if tags else text))
        got = "".join(sorted(re.sub("|".join(tags), "", (whole.reasoning or "") + (whole.content or ""))))
        assert given.replace("\n", "").replace(" ", "") == got.replace("\n", "").replace(" ", "")


def test_every_format_is_tried() -> None:
    assert {TOOL_FORMATS[name] for name in CALLS} == set(TOOL_FORMATS.values())
    assert {REASONING_FORMATS[name] for name in (*REASONING, *OWN_TOOLS) if name} == set(REASONING_FORMATS.values())
