"""Reasoning in every format, alone and before tool calls, in any grouping of the answer."""

import random
from itertools import count, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.parsers import MessageParser, ParsedMessage, reasoning_parser, starts_in_reasoning

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'


class Case(NamedTuple):
    """An answer, whether its prompt ends in reasoning, and what is in it."""

    format: str
    text: str
    is_inside: bool | None
    reasoning: str | None
    content: str | None


CASES = [
    Case("qwen3", "<think>\nHm.\n</think>\n\nYes.\n", None, "\nHm.\n", "\n\nYes.\n"),
    Case("qwen3", "\n<think>Hm.</think>Yes.", None, "Hm.", "Yes."),
    Case("qwen3", "<think>\n\n</think>\n\nYes.", None, "\n\n", "\n\nYes."),
    Case("qwen3", "<think></think>Yes.", None, None, "Yes."),
    Case("qwen3", "Yes. <think>no</think>", None, None, "Yes. <think>no</think>"),
    Case("qwen3", "Yes.", None, None, "Yes."),
    Case("qwen3", "Yes.", False, None, "Yes."),
    Case("qwen3", "Hm.\n</think>\n\nYes.", True, "Hm.\n", "\n\nYes."),
    Case("qwen3", "<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
    Case("qwen3", "<think>Hm", None, "Hm", None),
    Case("qwen3", "<think>a < b </thin k> </think></think>", None, "a < b </thin k> ", "</think>"),
    Case("qwen3", "<", None, None, "<"),
    Case("qwen3", " <thi", None, None, " <thi"),
    Case("qwen3", "", None, None, None),
    Case("deepseek_r1", "Hm.\n</think>\n\nYes.", None, "Hm.\n", "\n\nYes."),
    Case("deepseek_r1", "<think>\nHm.\n</think>Yes.", None, "\nHm.\n", "Yes."),
    Case("deepseek_r1", "<think>\nHm.\n</think>Yes.", False, "\nHm.\n", "Yes."),
    Case("deepseek_r1", "Hm.</thi", None, "Hm.</thi", None),
    Case("deepseek_r1", "Yes.", False, None, "Yes."),
    Case("deepseek_v3", "Hm.</think>Yes.", True, "Hm.", "Yes."),
    Case("deepseek_v3", "Yes.", False, None, "Yes."),
    Case("deepseek_v3", "It is 21 degrees.", None, None, "It is 21 degrees."),
    Case("think", "<think>a</think>B<think>c</think>D", None, "ac", "BD"),
    Case("think", "A <think>b", None, "b", "A "),
    Case("think", "a</think>B", True, "a", "B"),
    Case("think", "A</think>B", None, None, "A</think>B"),
]


def groupings(text: str, seed: int) -> list[str]:
    """The text in random pieces."""
    chance = random.Random(seed)
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, len(text) + 1)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def streamed(parser: MessageParser, pieces: list[str]) -> ParsedMessage:
    """The message, after a comparison with the joined deltas."""
    deltas = [*map(parser.feed, pieces), parser.finish()]
    message = parser.message()
    assert ("".join(delta.reasoning or "" for delta in deltas) or None) == message.reasoning
    assert ("".join(delta.content or "" for delta in deltas) or None) == message.content
    arguments = "".join(call.arguments for delta in deltas for call in delta.tool_calls)
    assert arguments == "".join(call.arguments for call in message.tool_calls)
    return message


@pytest.mark.parametrize("case", CASES)
def test_answers(case: Case) -> None:
    message = MessageParser(case.format, prompt_ends_in_reasoning=case.is_inside).parse(case.text)
    assert (message.reasoning, message.content) == (case.reasoning, case.content)
    for pieces in [list(case.text), *(groupings(case.text, seed) for seed in range(10))]:
        assert streamed(MessageParser(case.format, prompt_ends_in_reasoning=case.is_inside), pieces) == message


@given(
    name=st.sampled_from(["qwen3", "deepseek_r1", "think"]),
    is_inside=st.sampled_from([None, True, False]),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<think", "<", "\n", "a", CALL]) | st.text(max_size=3)),
    tools=st.sampled_from([None, "hermes", "qwen3"]),
    seed=st.integers(0, 2**32),
)
def test_any_text_gives_the_same_in_any_grouping(
    name: str, is_inside: bool | None, parts: list[str], tools: str | None, seed: int
) -> None:
    def make() -> MessageParser:
        numbers = count()
        return MessageParser(name, tools, prompt_ends_in_reasoning=is_inside, make_id=lambda: str(next(numbers)))

    text = "".join(parts)
    message = streamed(make(), groupings(text, seed))
    assert message == make().parse(text)
    without_tags = text.replace("<think>", "").replace("</think>", "")
    if tools is None and name == "think":
        given_back = "".join(sorted((message.reasoning or "") + (message.content or "")))
        for character in set(without_tags) - set("<>/think") - set(" \n"):
            assert given_back.count(character) == without_tags.count(character)


def test_calls_after_reasoning() -> None:
    text = f"<think>\nI could {CALL[:11]} it.\n</think>\n\n{CALL}\n"
    for seed in range(30):
        message = streamed(MessageParser("qwen3", "hermes"), groupings(text, seed))
        assert message.reasoning == "\nI could <tool_call> it.\n"
        assert message.content is None
        (call,) = message.tool_calls
        assert (call.name, call.arguments) == ("f", '{"a": "</think>"}')
    message = MessageParser(None, "hermes").parse(text)
    assert message.reasoning is None
    assert message.content == text.removesuffix(f"\n\n{CALL}\n")


def test_required_call_after_reasoning() -> None:
    parser = MessageParser("qwen3", schemas=[{"function": {"name": "f"}}], tool_choice="required")
    message = parser.parse('<think>Hm.</think>\n\n[{"name": "f", "parameters": {}}]')
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert message.tool_calls[0].name == "f"


def test_reasoning_comes_at_once() -> None:
    parser = MessageParser("qwen3", "hermes")
    assert not parser.feed("<thi")
    assert parser.feed("nk>a").reasoning == "a"
    assert parser.feed(" b </").reasoning == " b "
    delta = parser.feed("think> c")
    assert (delta.reasoning, delta.content) == (None, " c")


def test_where_prompts_end() -> None:
    assert starts_in_reasoning("<｜Assistant｜><think>\n", "deepseek_r1") is True
    assert starts_in_reasoning("<｜Assistant｜></think>", "deepseek_v3") is False
    assert starts_in_reasoning("<|start|>assistant", "openai_gptoss") is None
    assert starts_in_reasoning("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss") is True
    assert starts_in_reasoning("<|start|>assistant<|channel|>final<|message|>", "openai_gptoss") is False
    assert starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3") is False
    assert starts_in_reasoning("what is <think>?<|im_start|>assistant\n", "qwen3") is None


def test_names_and_tags() -> None:
    for name in ("deepseek_r1", "deepseek_v3", "qwen3", "think"):
        assert (reasoning_parser(name).start_text, reasoning_parser(name).end_text) == ("<think>", "</think>")
    names = r"\['deepseek_r1', 'deepseek_v3', 'openai_gptoss', 'qwen3', 'think'\]"
    expected = f"reasoning_parser must be one of {names}, got 'qwen'; did you mean 'qwen3'"
    with pytest.raises(ConfigError, match=expected):
        MessageParser("qwen")
