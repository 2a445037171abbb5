"""Structured outputs that begin behind the reasoning."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.api.chat_messages import LastMessage
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.structured_output.reasoning import (
    AfterReasoning,
    Reasoning,
    ReasoningMarkers,
    find_reasoning,
    open_section,
)
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.sequences import Taken

OPEN, CLOSE = (5,), (6, 7)
MARKS = ReasoningMarkers("qwen3", OPEN, CLOSE)
TEXTS = {5: "<think>", 6: "</", 7: "think>", 8: "think>\n\n"}
CHOICE = SamplingParams(
    temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
)


class Rule(Taken):
    """Allows 1 and 2, and is complete with 2."""

    def mask(self) -> bytes:
        """The bits."""
        return np.uint32(0b110).tobytes()

    def accept(self, token: int) -> bool:
        """Notes the token."""
        self.taken.append(token)
        return token == 2


def after(rule: Rule, is_open: bool | None) -> AfterReasoning:
    """The rule after the reasoning."""
    return AfterReasoning(rule, Reasoning(MARKS, is_open), lambda token: TEXTS.get(token, "x"))


def bits(mask: bytes | None) -> set[int] | None:
    """Ids whose bit is set; None where there is no mask."""
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def test_the_rule_waits_for_the_end_of_the_reasoning() -> None:
    rule = Rule()
    constraint = after(rule, True)
    for token in (1, 2, 6, 5, 7, 6, 6, 7):  # only 6 and then 7 end it
        assert constraint.mask() is None
        assert constraint.accept(token) is False
    assert rule.taken == []
    assert bits(constraint.mask()) == {1, 2}
    assert [constraint.accept(token) for token in (1, 2)] == [False, True]
    assert rule.taken == [1, 2]


def test_the_end_of_the_reasoning_may_share_a_token_with_what_follows() -> None:
    constraint = after(Rule(), True)
    for token in (1, 6, 8):
        assert constraint.mask() is None
        assert constraint.accept(token) is False
    assert bits(constraint.mask()) == {1, 2}


def test_the_first_token_says_whether_there_is_reasoning() -> None:
    constraint = after(Rule(), None)
    assert bits(constraint.mask()) == {1, 2, 5}
    assert constraint.accept(5) is False and constraint.mask() is None
    assert not any(constraint.accept(token) for token in (2, 6, 7)) and bits(constraint.mask()) == {1, 2}
    plain = after(Rule(), None)
    assert plain.accept(1) is False and bits(plain.mask()) == {1, 2}
    assert plain.accept(2) is True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo model's, which spells markers letter by letter."""
    return load_tokenizer(MODEL_DIRECTORY)


@pytest.mark.parametrize(
    ("name", "text", "is_chat", "expected"),
    [
        ("qwen3", "assistant:", True, None),
        ("qwen3", "assistant:", False, "none"),
        ("qwen3", "assistant:<think>\n", True, True),
        ("qwen3", "assistant:<think>\n", False, True),
        ("qwen3", "assistant:<think>\n\n</think>\n\n", True, "none"),
        ("deepseek_r1", "assistant:", True, True),
        ("deepseek_r1", "assistant:", False, "none"),
        ("deepseek_r1", "assistant:<think>\n\n</think>\n\n", True, "none"),
        ("think", "<think> " + "word " * 100, False, "none"),
        ("qwen3", "<|user|><think>?<|assistant|>", True, None),
        ("qwen3", "<|user|>?<|assistant|><think>\n" + "word " * 100, True, True),
        ("qwen3", "<|user|>?<|assistant|><think>\n" + "word " * 100, False, True),
        ("deepseek_r1", "<|user|>?<|assistant|><think>\n</think>" + "word " * 100, True, "none"),
        ("deepseek_r1", "<|user|>?<|assistant|>The answer", True, "none"),
    ],
)
def test_prompts_that_open_or_close_the_reasoning(
    tokenizer: Tokenizer, name: str, text: str, is_chat: bool, expected: bool | str | None
) -> None:
    found = find_reasoning(ReasoningMarkers(name, OPEN, CLOSE), tokenizer, tokenizer.encode(text), is_chat)
    assert ("none" if found is None else found.is_open) == expected


def test_a_budget_counts_the_section_of_the_last_turn_alone(tokenizer: Tokenizer) -> None:
    def section(text: str, is_chat: bool = True, last: LastMessage | None = None) -> bool:
        prompt = tokenizer.encode(text)
        found = open_section(ReasoningMarkers("qwen3", OPEN, CLOSE), tokenizer, prompt, is_chat, last)
        assert list(found) in ([], prompt)
        return bool(found)

    assert section("<|user|>?<|assistant|><think>\nHm")
    assert not section("<|user|><think>?<|assistant|>")
    assert not section("<|user|><think>?<|assistant|>", is_chat=False)
    assert not section("Q: <think>? A:", last=LastMessage("<think>?"))
    assert section("Q: ? A: <think> Hm", last=LastMessage("<think> Hm", is_continued=True))
    assert section("<think> word", is_chat=False)  # without turns, all of it counts


def test_a_mark_of_many_tokens_is_not_looked_for_in_the_answer(tokenizer: Tokenizer) -> None:
    markers = ReasoningMarkers("qwen3", (5, 6), CLOSE)
    assert find_reasoning(markers, tokenizer, tokenizer.encode("assistant:"), True) is None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model, as if it reasoned."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "compilation_cache_dir": ""}
    with LLM("demo", **settings, reasoning_parser="deepseek_r1") as made:
        yield made


@pytest.mark.parametrize("budget", [0, 5])
def test_an_answer_reasons_first_and_is_structured_then(llm: LLM, budget: int) -> None:
    params = CHOICE.clone(thinking_token_budget=budget, ignore_eos=True)
    template = "{{ messages[0].content }}<think>\n"
    answers = [
        llm.chat([{"role": "user", "content": "1+1="}], params, chat_template=template, use_tqdm=False)[0],
        llm.generate("1+1=<think>\n", params, use_tqdm=False)[0],
    ]
    for answer in answers:
        thoughts, mark, rest = answer.outputs[0].text.partition("</think>")
        assert mark and rest in ("yes", "no"), answer.outputs[0].text
        assert bool(thoughts) is bool(budget)
        assert answer.outputs[0].finish_reason == "stop"


def test_other_answers_are_structured_from_the_start(llm: LLM) -> None:
    closed = "1+1=<think>\n\n</think>\n\n"
    for prompt in ("1+1=", closed):
        assert llm.generate(prompt, CHOICE, use_tqdm=False)[0].outputs[0].text in ("yes", "no")
    template = "{{ messages[0].content }}" + closed
    answer = llm.chat([{"role": "user", "content": "1+1="}], CHOICE, chat_template=template, use_tqdm=False)[0]
    assert answer.outputs[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("started", "is_inside"), [("<think>\nFirst", True), ("<think>\nHm\n</think>\n\n", False), ("Say", False)]
)
def test_a_continued_answer_is_structured_after_its_reasoning(llm: LLM, started: str, is_inside: bool) -> None:
    conversation = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": started}]
    params = CHOICE.clone(thinking_token_budget=8, ignore_eos=True)
    output = llm.chat(conversation, params, continue_final_message=True, add_generation_prompt=False, use_tqdm=False)[0]
    thoughts, mark, rest = output.outputs[0].text.rpartition("</think>")
    assert (bool(mark), rest in ("yes", "no")) == (is_inside, True), output.outputs[0].text
    message = llm.parse_message(output.outputs[0].text, prompt=output.prompt or "")
    assert (message.reasoning or "", message.content) == (thoughts, rest)
