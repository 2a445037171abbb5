"""Parsers do as much work late in a completion as early in it, whatever a model repeats."""

import tracemalloc

import pytest

from jaxserve.parsers import MessageParser
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.source import MAX_HELD_LENGTH
from jaxserve.parsers.tool_formats import TOOL_FORMATS
from tests.counted_lines import num_lines

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NUM_MEASURED = 20
LENGTH = 256
"""Of pieces, about; tokens are shorter."""
BEGINNINGS = {
    "deepseek_v3": "function<｜tool▁sep｜>f\n```json\n{",
    "deepseek_v32": '\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">',
    "gemma4": 'call:f{a:<|"|>x',
    "glm45": "f\n<arg_key>a</arg_key>\n<arg_value>x",
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "minimax_m2": '\n<invoke name="f">\n<parameter name="a">x',
    "mistral": "f[ARGS]{",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{",
    "pythonic": 'f(a="x',
    "qwen3": "\n<function=f>\n<parameter=a>\nx",
}
"""Of calls, after the marker; those of other formats are JSON."""


def formats() -> list[str]:
    """A name of each format of tool calls."""
    return sorted({form: name for name, form in TOOL_FORMATS.items()}.values())


def work(parser: MessageParser, text: str, num_pieces: int) -> tuple[int, int]:
    """The lines that run for the last of some pieces, and the most bytes that a usual one before them allocates."""
    for _ in range(num_pieces):
        parser.feed(text)
    peaks: list[int] = []
    tracemalloc.start()
    for _ in range(NUM_MEASURED):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        parser.feed(text)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    lines = num_lines(lambda: [parser.feed(text) for _ in range(NUM_MEASURED)])
    return lines, sorted(peaks)[NUM_MEASURED // 2]


def check(reasoning: str | None, tools: str | None, begin: str, text: str) -> None:
    """Compares the work after a completion that is longer than what is held back with that after three times it."""
    found = []
    text *= max(1, LENGTH // len(text))
    num_pieces = 2 * MAX_HELD_LENGTH // len(text)
    for factor in (1, 3):
        parser = MessageParser(reasoning, tools, schemas=TOOLS)
        parser.feed(begin)
        found.append(work(parser, text, factor * num_pieces))
    (lines, peak), (more_lines, more_peak) = found
    assert more_lines < 1.3 * lines + 200, (begin, text, found)
    assert more_peak < 1.3 * peak + MAX_HELD_LENGTH, (begin, text, found)
    assert more_lines < NUM_MEASURED * 40 * len(text), (begin, text, found)


@pytest.mark.parametrize("name", formats())
def test_what_formats_of_calls_hold_back(name: str) -> None:
    form = TOOL_FORMATS[name]
    marker = (*form.leading_starts, *form.starts, "<|start|>assistant")[0]
    begin = BEGINNINGS.get(name, '{"other": "')
    for prefix in ("", marker, f"{marker}{begin}"):
        for text in (" ", f"{marker}a", f"\n{marker}{' ' * 64}", "a", '{"a": ['):
            check(None, name, prefix, text)


@pytest.mark.parametrize("name", sorted({form: name for name, form in REASONING_FORMATS.items()}.values()))
def test_what_formats_of_reasoning_hold_back(name: str) -> None:
    form = REASONING_FORMATS[name]
    tools = "openai" if name == "openai_gptoss" else "qwen3"
    for prefix in ("", form.start_text, f"{form.start_text}a{form.end_text}"):
        for text in (" ", f"\n{form.start_text}", f"\n{form.end_text}", "\n<tool_call>\n{", "a"):
            check(name, tools, prefix, text)


@pytest.mark.parametrize("name", formats())
def test_long_white_space_is_content_but_for_its_end(name: str) -> None:
    """In whatever pieces it comes; what is held back at the end is dropped only right after a call."""
    text = f"a{' ' * (3 * MAX_HELD_LENGTH)}"
    for size in (1000, 7, len(text)):
        parser = MessageParser(None, name, schemas=TOOLS)
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        parser.finish()
        assert parser.message().content == text


def test_white_space_before_a_call() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for length in (MAX_HELD_LENGTH, MAX_HELD_LENGTH + 100):
        for size in (1000, 77):
            text = f"a{' ' * length}{call}{' ' * length}{call}"
            parser = MessageParser(None, "hermes", schemas=TOOLS)
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()
            message = parser.message()
            assert [each.name for each in message.tool_calls] == ["f", "f"]
            assert message.content == "a" + " " * 2 * (length - MAX_HELD_LENGTH)
