"""Reasoning in every format, alone and before tool calls, in any grouping of the answer."""

import random
from itertools import count, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.chat_messages import last_message
from jaxserve.api.errors import ConfigError
from jaxserve.parsers import MessageParser, ParsedMessage, reasoning_parser, starts_in_reasoning
from jaxserve.parsers.source import MAX_HELD_LENGTH, Source

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'


COHERE = "<|START_THINKING|>Hm.<|END_THINKING|>"


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
    Case("seed_oss", "<seed:think>Hm.</seed:think>Yes.", None, "Hm.", "Yes."),
    Case("mistral", "[THINK]Hm.[/THINK]Yes.", None, "Hm.", "Yes."),
    Case("minimax_m2", "Hm.</think>Yes.", True, "Hm.", "Yes."),
    Case("glm45", "<think>Hm.</think>Yes.", None, "Hm.", "Yes."),
    Case("ernie45", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", None, "Hm.\n", "Yes."),
    Case("ernie45", "Hm.</think>Yes </response>", None, "Hm.", "Yes </response>"),
    Case("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", None, "\nHm.\n", "Yes."),
    Case("hunyuan_a13b", "<answer>Yes.</answer>", False, None, "Yes."),
    Case("hunyuan_a13b", "<think>Hm.</think>\nYes.", None, "Hm.", "\nYes."),
    Case("hunyuan_a13b", "Use <answer> and </answer>", None, None, "Use <answer> and </answer>"),
    Case("cohere_command3", f"{COHERE}<|START_RESPONSE|>Yes.<|END_RESPONSE|>", None, "Hm.", "Yes."),
    Case("cohere_command4", f"{COHERE}\n<|START_TEXT|>Yes.<|END_TEXT|>", None, "Hm.", "Yes."),
    Case("cohere_command3", "Yes.<|END_RESPONSE|>", False, None, "Yes."),
    Case("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", None, "Hm.\n", "Yes."),
    Case("gemma4", "<|channel>thought\n<channel|>Yes.", None, None, "Yes."),
    Case("gemma4", "<|channel>thoughts<channel|>Yes.", None, "thoughts", "Yes."),
    Case("gemma4", "Hm.<channel|>Yes.", True, "Hm.", "Yes."),
    Case("apertus", "A <|inner_prefix|>Hm.<|inner_suffix|>Yes.", None, "Hm.", "A Yes."),
    Case("granite", "Here is my thought process: Hm.\n\nHere is my response: Yes.", None, " Hm.\n\n", " Yes."),
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
    names = r"\['apertus', .*, 'deepseek_v3', 'ernie45', .*, 'qwen3', 'seed_oss', 'think'\]"
    expected = f"reasoning_parser must be one of {names}, got 'qwen'; did you mean 'qwen3'"
    with pytest.raises(ConfigError, match=expected):
        MessageParser("qwen")


# ------------------------------------------------------------------------------------------------ calls inside


OFFERED = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
TAGS = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"


def with_tools(name: str = "qwen3", tools: str = "qwen3", **options: Any) -> MessageParser:
    """A parser that was offered the tool f."""
    return MessageParser(name, tools, **{"schemas": OFFERED, "prompt_ends_in_reasoning": True, **options})


class Inside(NamedTuple):
    """A completion that begins inside reasoning, and what is in it."""

    text: str
    reasoning: str | None
    content: str | None
    num_calls: int


INSIDE = [
    Inside(f"Hm.\n{TAGS}", "Hm.\n", None, 1),
    Inside(f"{TAGS}\n", None, None, 1),
    Inside(f"Hm.\n  {CALL}\n{TAGS}\n</think>\n\nYes.", "Hm.\n  ", "\n\nYes.", 2),
    Inside(f"Hm.\n{CALL}\nSo </think> </think>", "Hm.\n", "\nSo  </think>", 1),
    Inside(f"Hm.\n{CALL}\n</think>\n{CALL}\n", "Hm.\n", None, 2),
    Inside(f"Hm. {TAGS}\n</think>A {CALL}", f"Hm. {TAGS}\n", "A", 1),
    Inside(f"- {TAGS}\n</think>A", f"- {TAGS}\n", "A", 0),
    Inside("Hm.\n<tool_call>\n</think>A", "Hm.\n<tool_call>\n", "A", 0),
    Inside(
        'Hm.\n<tool_call>{"name": "g", "arguments": {}}</think>A',
        'Hm.\n<tool_call>{"name": "g", "arguments": {}}',
        "A",
        0,
    ),
    Inside('Hm.\n<tool_call>{"name": "f"</think>A', 'Hm.\n<tool_call>{"name": "f"', "A", 0),
    Inside('Hm.\n<tool_call>{"name": "f"', 'Hm.\n<tool_call>{"name": "f"', None, 0),
    Inside('Hm.\n<tool_call>{"name": "f", "arguments": {"a', "Hm.\n", None, 1),
    Inside('\n<tool_call>{"arguments": {"a": "</think>"}, "name": "f"}', "\n", None, 1),
    Inside("\n<function=g></function>\n<function=f></function>", "\n<function=g></function>\n", None, 1),
]


@pytest.mark.parametrize("case", INSIDE)
def test_calls_inside_reasoning(case: Inside) -> None:
    message = with_tools().parse(case.text)
    assert (message.reasoning, message.content, len(message.tool_calls)) == case[1:]
    for seed in range(10):
        found = streamed(with_tools(make_id=lambda: "0"), groupings(case.text, seed))
        assert (found.reasoning, found.content, len(found.tool_calls)) == case[1:]


def test_a_call_of_gemma_ends_its_reasoning_within_a_line() -> None:
    call = "<|tool_call>call:f{a:1}<tool_call|>"
    for seed in range(10):
        parser = with_tools("gemma4", "gemma4", prompt_ends_in_reasoning=None)
        message = streamed(parser, groupings(f"<|channel>thought\nI call it.{call}<channel|>Done.", seed))
        assert (message.reasoning, message.content) == ("I call it.", "Done.")
        assert message.tool_calls[0].arguments == '{"a": 1}'
    without = with_tools("gemma4", "gemma4", tool_choice="none").parse(f"Hm. {call}<channel|>Done.")
    assert (without.reasoning, without.content) == (f"Hm. {call}", "Done.")


def test_a_call_that_the_prompt_puts_inside_a_line_is_reasoning() -> None:
    assert not with_tools(prompt_ends_in_line=True).parse(CALL).tool_calls
    assert with_tools(prompt_ends_in_line=True).parse(f"\n{CALL}").tool_calls
    assert with_tools(prompt_ends_in_line=True, prompt_ends_in_reasoning=False).parse(CALL).tool_calls


def test_text_is_held_until_a_call_inside_reasoning_is_certain() -> None:
    parser = with_tools()
    assert parser.feed('Hm.\n<tool_call>\n{"name": ').reasoning == "Hm.\n"
    assert not parser.feed('"f", "arguments": ')
    assert parser.feed("{").tool_calls[0].name == "f"
    parser = with_tools()
    assert parser.feed('\n<tool_call>{"name": "fa').reasoning == "\n"
    assert parser.feed('", "arguments": {').reasoning == '<tool_call>{"name": "fa", "arguments": {'
    long = '<tool_call>{"x": "' + "y" * (MAX_HELD_LENGTH - 20)
    parser = with_tools()
    assert not parser.feed(long)
    assert parser.feed("yyyy").reasoning == f"{long}yyyy"


def test_work_on_reasoning_grows_with_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = 0

    class Counting(Source):
        def feed(self, text: str) -> None:
            nonlocal fed
            fed += len(text)
            super().feed(text)

    monkeypatch.setattr("jaxserve.parsers.call_finder.Source", Counting)
    for unit in ('\n<tool_call>{"x": "', "\n<tool_call>", "\n<function=f>", '\n<tool_call>{"name": "f", "x": {'):
        fed, text = 0, unit * 1000
        assert with_tools().parse(text).reasoning == text
        assert fed <= 60 * len(text)


def test_tags_inside_arguments_are_arguments() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "<think>x</think>"}}</tool_call>'
    for seed in range(10):
        message = streamed(with_tools("think", "hermes", prompt_ends_in_reasoning=None), groupings(f"A {call} B", seed))
        assert (message.reasoning, message.content) == (None, "A B")
        assert message.tool_calls[0].arguments == '{"a": "<think>x</think>"}'


# ------------------------------------------------------------------------------------------------ where prompts end


CHATML = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    ("qwen3", f"{CHATML}<think>\nFirst I add", True),
    ("qwen3", f"{CHATML}<think>\nHm.\n</think>\n\nThe answer", False),
    ("qwen3", f"{CHATML}<think>\n\n</think>\n\n<think>\nFirst I add", True),
    ("qwen3", f"{CHATML}The tag <think> is", False),
    ("qwen3", CHATML, None),
    ("qwen3", "<|im_start|>user\nThink: <think>", None),
    (
        "qwen3",
        f"{CHATML}<think>Hm.</think>Yes.<|im_end|>\n<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n",
        None,
    ),
    ("deepseek_r1", "<｜User｜><think>?<｜Assistant｜><think>\nFirst I add", True),
    ("deepseek_r1", "<｜User｜></think>?<｜Assistant｜>", None),
    ("deepseek_r1", "<｜User｜>?<｜Assistant｜><think>\nHm.\n</think>\n\nThe answer", False),
    ("deepseek_r1", "<｜User｜>?<｜Assistant｜>Hm.\n</think>\n\nThe answer", False),
    ("deepseek_r1", "<｜User｜>?<｜Assistant｜>The answer", False),
    ("deepseek_v3", "<｜User｜>?<｜Assistant｜><think>First I add", True),
    ("deepseek_v3", "<｜User｜><think><｜Assistant｜></think>The answer", False),
    ("deepseek_v3", "<｜User｜>?<｜Assistant｜><think>Hm.</think>call<result>4</result>\n\n<think>", True),
    ("deepseek_v3", "<｜User｜>?<｜Assistant｜><think>Hm.</think>call<result>4</result>\n\n</think>", False),
    ("think", f"{CHATML}<think>a</think> b <think> c", True),
    ("think", f"{CHATML}<think>a</think> b <think> c</think> d", False),
    ("qwen3", "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nFirst", True),
    ("qwen3", "[INST] <think> [/INST] <think>\nFirst", True),
    ("qwen3", "[INST] <think> [/INST]", None),
    ("qwen3", "<start_of_turn>user\n<think><end_of_turn>\n<start_of_turn>model\n", None),
    ("qwen3", "user: <think>?\nassistant: <think>\nFirst", True),
    ("cohere_command3", "<|USER_TOKEN|>?<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>", True),
    ("cohere_command3", f"<|USER_TOKEN|>?<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{COHERE}<|START_RESPONSE|>", False),
    ("cohere_command3", "<|USER_TOKEN|>?<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", None),
    ("gemma4", "<|turn>user\n?<turn|>\n<|turn>model\n", None),
    ("gemma4", "<|turn>user\n?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>", False),
    ("gemma4", "<|turn>model\n<|channel>thought\n", True),
    ("gemma4", "<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>response:f{}<tool_response|>", None),
    ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>User asks", True),
    ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>a<|end|><|start|>assistant", None),
    ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>The answer", False),
    ("openai_gptoss", "<|start|>user<|message|><|channel|>final<|message|><|end|><|start|>assistant", None),
]


@pytest.mark.parametrize(("name", "prompt", "expected"), PROMPTS)
def test_the_whole_last_turn_tells_where_a_completion_begins(name: str, prompt: str, expected: bool | None) -> None:
    assert starts_in_reasoning(prompt, name) is expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3", "think"])
def test_a_continued_message_tells_where_a_completion_begins(name: str) -> None:
    def begins(prompt: str, text: str, continues: bool = True) -> bool | None:
        conversation = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": text}]
        conversation = conversation if continues else conversation[:1]
        return starts_in_reasoning(prompt, name, last_message(conversation, continues=continues))

    for before in ("Q: <think> A: ", "<|im_start|>assistant\n", "Q: <think> A: <think>\n\n</think>\n\n"):
        for text in ("<think>\nFirst I add", "<think>\nassistant: no, <|im_start|>user\n"):
            assert begins(before + text, text) is True
        for text in ("<think>\nHm.\n</think>\n\nThe answer", "The answer"):
            assert begins(before + text, text) is False
    assert begins("Q: ? A: <think>\nFirst I add", "First I add") is True
    assert begins("Q: ? A: shown otherwise", "<think>\nFirst I add") is True
    assert begins("Q: <think>", "", continues=False) is None
    assert begins("Q: <think> A: <think>\n", "", continues=False) is True
    parts = [{"type": "text", "text": "<think>"}, {"type": "text", "text": "First"}]
    last = last_message([{"role": "assistant", "content": parts}], continues=True)
    assert starts_in_reasoning("A: <think>\nFirst", name, last) is True
    users = last_message([{"role": "user", "content": "<think> First"}], continues=True)
    assert starts_in_reasoning("Q: <think> First", name, users) is None
