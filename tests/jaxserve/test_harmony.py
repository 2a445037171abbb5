"""GPT-OSS's Harmony format: channels, calls, malformed messages, and its markers as special tokens."""

import json
import random
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import EnginePlan
from jaxserve.engine.model_defaults import eos_token_ids, reasoning_markers
from jaxserve.parsers import (
    FamilyParsers,
    MessageDelta,
    MessageParser,
    ParsedMessage,
    ParserNames,
    chosen_reasoning,
    parser_names,
)
from jaxserve.structured_output.constraints import ThinkingBudget
from jaxserve.structured_output.reasoning import AfterReasoning, find_reasoning
from jaxserve.text.chat import render_chat
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.sequences import Taken

START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
LEFT = "<|channel|>commentary to=functions.f<|message|>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Case(NamedTuple):
    """A completion and its message. Calls: name and arguments, "…" after incomplete ones."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


CASES = [
    Case(f"{ANALYSIS}Hm.<|end|>{START}{FINAL}Yes.<|return|>", "Hm.", "Yes."),
    Case(f"{ANALYSIS}Hm.<|end|>{START}{FINAL}Yes.", "Hm.", "Yes."),
    Case(f"{FINAL}é\n\n<b> < |end|> <|x|>", None, "é\n\n<b> < |end|> <|x|>"),
    Case(f'{ANALYSIS}Hm.<|end|>{START}{CALL}{{"a": "}}"}}<|call|>', "Hm.", None, (("f", '{"a": "}"}'),)),
    Case(f'{CALL}{{"a": "<|end|> ü", "b": {{}}}}', None, None, (("f", '{"a": "<|end|> ü", "b": {}}'),)),
    Case(
        f"{ANALYSIS}Hm.<|end|>{START}{PREAMBLE}I look.<|end|>{START}{CALL}{{}}<|call|>{START}{CALL}{{}}<|call|>",
        "Hm.",
        "I look.",
        (("f", "{}"), ("f", "{}")),
    ),
    # The recipient before the channel, as the model's template writes it, and other forms of headers.
    Case(" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", None, None, (("f", "{}"),)),
    Case(
        f"{ANALYSIS}Hm.<|end|>{START} to=functions.f<|channel|>commentary json<|message|>{{}}",
        "Hm.",
        None,
        (("f", "{}"),),
    ),
    Case("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", None, None, (("f", "{}"),)),
    Case("<|channel|>commentary to=f<|message|>{}<|call|>", None, None, (("f", "{}"),)),
    Case("<|channel|> final <|constrain|>json<|message|>{}", None, "{}"),
    Case("<|channel|>final to=user<|message|>Yes.", None, "Yes."),
    Case(f"{START}<|message|>Yes.", None, "Yes."),
    Case("<|message|>Yes.", None, "Yes."),
    Case("<|channel|>other<|message|>Yes.", None, "Yes."),
    # Several messages of a kind; missing ends and starts.
    Case(f"{ANALYSIS}a<|end|>{START}{ANALYSIS}b<|end|>\n{START}{FINAL}c<|end|>{START}{FINAL}d", "a\nb", "c\nd"),
    Case(f"{ANALYSIS}a<|end|>{FINAL}b", "a", "b"),
    Case(f"{ANALYSIS}a{START}{FINAL}b", "a", "b"),
    Case(f"{ANALYSIS}a{FINAL}b", "a", "b"),
    Case(f"Text.{FINAL}b", None, "Text.\nb"),
    # Text without a channel, and malformed headers.
    Case("Just text.", None, "Just text."),
    Case(" \n Just text. ", None, " \n Just text. "),
    Case("to=5 is fine", None, "to=5 is fine"),
    Case("", None, None),
    Case("<|end|>", None, None),
    Case("a<|end|>b<|return|>", None, "a<|end|>b"),
    Case("<|channel|>The sum is 4.", None, "<|channel|>The sum is 4."),
    Case("<|channel|>final: 4", None, "<|channel|>final: 4"),
    Case("<|channel|>Yes", None, "<|channel|>Yes"),
    Case(f"{ANALYSIS}Hm. <|channel|>final\nYes.<|end|>", "Hm. <|channel|>final\nYes.", None),
    Case("<|channel|>" + "x" * 500 + "<|message|>", None, "<|channel|>" + "x" * 500 + "<|message|>"),
    # Truncated.
    Case(f"{ANALYSIS}Hm", "Hm", None),
    Case(f"{ANALYSIS}Hm.<|end|>{START}<|channel|>fin", "Hm.", None),
    Case("<|channel|>", None, None),
    Case(f'{CALL}{{"a": "b', None, None, (("f", '{"a": "b…'),)),
    # Calls without arguments, malformed arguments, other recipients.
    Case(f"{CALL}<|call|>", None, None, (("f", "{}"),)),
    Case(f"{CALL}", None, None, (("f", "{}…"),)),
    Case(f"{CALL}print(1)<|call|>", None, f"{LEFT}print(1)<|call|>"),
    Case(f'{CALL}{{"a": !}}<|call|>', None, "!}", (("f", '{"a": …'),)),
    Case(f"{CALL}{{}} so<|call|>", None, " so", (("f", "{}"),)),
    Case(
        "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
        None,
        "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
    ),
    Case("<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", None),
]


def make_parser(tools: str | None = "openai", is_inside: bool | None = None, **arguments: Any) -> MessageParser:
    """A parser that gives calls the ids 0, 1, …"""
    numbers = count()
    return MessageParser(
        "openai_gptoss",
        tools,
        schemas=TOOLS,
        prompt_ends_in_reasoning=is_inside,
        make_id=lambda: str(next(numbers)),
        **arguments,
    )


def groupings(text: str, seed: int) -> list[str]:
    """The text in random pieces, some of them empty."""
    chance = random.Random(seed)
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, max(1, len(text)))))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def streamed(parser: MessageParser, pieces: list[str]) -> ParsedMessage:
    """The message, after a comparison with the joined deltas."""
    deltas: list[MessageDelta] = [*map(parser.feed, pieces), parser.finish()]
    message = parser.message()
    assert ("".join(delta.reasoning or "" for delta in deltas) or None) == message.reasoning
    assert ("".join(delta.content or "" for delta in deltas) or None) == message.content
    for index, call in enumerate(message.tool_calls):
        parts = [part for delta in deltas for part in delta.tool_calls if part.index == index]
        assert [part.name for part in parts][0] == call.name
        assert "".join(part.arguments for part in parts) == call.arguments
    return message


def shown(message: ParsedMessage) -> tuple[tuple[str, str], ...]:
    """Calls in the form of the table."""
    return tuple((call.name, call.arguments + ("" if call.is_complete else "…")) for call in message.tool_calls)


@pytest.mark.parametrize("case", CASES)
def test_completions(case: Case) -> None:
    message = make_parser().parse(case.text)
    assert (message.reasoning, message.content, shown(message)) == case[1:]
    for pieces in [list(case.text), *(groupings(case.text, seed) for seed in range(8))]:
        assert streamed(make_parser(), pieces) == message


@pytest.mark.parametrize("case", [case for case in CASES if case.reasoning and case.text.endswith("|>")])
def test_a_truncated_completion_has_the_beginning_of_each_part(case: Case) -> None:
    for length in range(len(case.text)):
        message = make_parser().parse(case.text[:length])
        if (case.reasoning or "").startswith(message.reasoning or ""):
            continue
        rest = (message.reasoning or "").removeprefix(case.reasoning or "")
        assert rest and case.text[:length].endswith(rest), "only the beginning of a marker is added"


def test_calls_stay_in_the_content_without_a_tool_parser() -> None:
    text = f"{ANALYSIS}Hm.<|end|>{START} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"
    for parser in (make_parser(None), make_parser(tool_choice="none")):
        message = parser.parse(text)
        assert (message.reasoning, message.content, message.tool_calls) == ("Hm.", f"{LEFT}{{}}<|call|>", ())


def test_a_prompt_may_open_a_channel() -> None:
    message = make_parser(is_inside=True).parse(f"Hm.<|end|>{START}{FINAL}Yes.")
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")
    message = make_parser(is_inside=False).parse("to=x: yes<|return|>")
    assert (message.reasoning, message.content) == (None, "to=x: yes")


def test_deltas_come_at_once() -> None:
    parser = make_parser()
    assert not parser.feed("<|channel|>")
    assert not parser.feed("analysis<|message|>")
    assert parser.feed("Hm").reasoning == "Hm"
    assert not parser.feed("<|end|>")
    assert not parser.feed(f"{START}{CALL}")
    (call,) = parser.feed('{"a').tool_calls
    assert (call.index, call.id, call.name, call.arguments) == (0, "0", "f", '{"a')
    assert parser.feed('": 1').tool_calls[0].arguments == '": 1'


def test_a_forced_call_is_in_the_final_channel() -> None:
    text = (
        f'{ANALYSIS}Hm.<|end|>{START}<|channel|>final <|constrain|>json<|message|>[{{"name": "f", "parameters": {{}}}}]'
    )
    message = streamed(make_parser(tool_choice="required"), list(text))
    assert (message.reasoning, message.content, shown(message)) == ("Hm.", None, (("f", "{}"),))
    named = {"type": "function", "function": {"name": "f"}}
    message = make_parser(tool_choice=named).parse(f'{ANALYSIS}Hm.<|end|>{START}{FINAL}{{"a": 1}}')
    assert (message.reasoning, message.content, shown(message)) == ("Hm.", None, (("f", '{"a": 1}'),))


PARTS = [
    START,
    ANALYSIS,
    FINAL,
    PREAMBLE,
    CALL,
    LEFT,
    "<|end|>",
    "<|call|>",
    "<|channel|>",
    "<|start|>",
    "to=",
    "{",
    "\n",
]


@given(
    parts=st.lists(st.sampled_from(PARTS) | st.just("WORD") | st.text(max_size=3)),
    is_inside=st.sampled_from([None, True, False]),
    tools=st.sampled_from([None, "openai"]),
    seed=st.integers(0, 2**32),
)
def test_no_text_is_lost_in_any_grouping(
    parts: list[str], is_inside: bool | None, tools: str | None, seed: int
) -> None:
    marked = [f"<{index}!>" if part == "WORD" else part for index, part in enumerate(parts)]
    text = "".join(marked)
    message = streamed(make_parser(tools, is_inside), groupings(text, seed))
    assert message == make_parser(tools, is_inside).parse(text)
    kept = (message.reasoning or "") + (message.content or "")
    for part, written in zip(parts, marked, strict=True):
        assert part != "WORD" or written in kept


def test_names_of_both_parsers() -> None:
    assert chosen_reasoning(None, "openai") == "openai_gptoss"
    assert chosen_reasoning("openai_gptoss", "openai") == "openai_gptoss"
    assert chosen_reasoning("openai_gptoss", "hermes") == "openai_gptoss"
    assert chosen_reasoning(None, "hermes") is None
    expected = (
        "tool_call_parser='openai' requires reasoning_parser='openai_gptoss', got 'qwen3'; leave reasoning_parser out"
    )
    with pytest.raises(ConfigError, match=expected):
        parser_names(ParserNames("qwen3", "openai"), FamilyParsers(), "", "")
    with pytest.raises(ConfigError, match="tool_call_parser must be one of"):
        parser_names(ParserNames(tools="gpt"), FamilyParsers(), "", "")


# ------------------------------------------------------------------------------------------------ special tokens


SPECIAL = ["start", "end", "message", "channel", "constrain", "return", "call"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and the markers as special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({one: index for index, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    directory: Path = tmp_path_factory.mktemp("harmony")
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return load_tokenizer(directory)


def test_markers_reach_the_parser_as_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f'{ANALYSIS}Hm.<|end|>{START}{CALL}{{"a": "é"}}', add_special_tokens=False)
    assert len(set(ids) & tokenizer.all_special_ids) == 5
    detokenizer = Detokenizer(tokenizer.pieces(skip_special_tokens=False))
    parser = make_parser()
    for token in ids:
        detokenizer.push_tokens([token])
        parser.feed(detokenizer.take())
    parser.finish(detokenizer.flush())
    message = parser.message()
    assert (message.reasoning, message.content, shown(message)) == ("Hm.", None, (("f", '{"a": "é"}'),))


class Rule(Taken):
    """A grammar that notes tokens."""

    def mask(self) -> bytes:
        """No token is allowed."""
        return bytes(64)

    def accept(self, token: int) -> bool:
        """Note a token."""
        self.taken.append(token)
        return False


@pytest.mark.parametrize("header", [FINAL, "<|channel|>final <|constrain|>json<|message|>"])
def test_a_grammar_holds_in_the_final_channel(tokenizer: Tokenizer, header: str) -> None:
    markers = reasoning_markers("openai_gptoss", tokenizer)
    assert markers is not None and markers.name == "openai_gptoss"
    reasoning = find_reasoning(markers, tokenizer, tokenizer.encode(START), is_chat=True)
    assert reasoning is not None
    rule = Rule()
    constraint = AfterReasoning(rule, reasoning, tokenizer.pieces(skip_special_tokens=False).shown)
    for token in tokenizer.encode(f"{ANALYSIS}<final>.<|end|>{START}{PREAMBLE}So.<|end|>{START}{header}"):
        assert constraint.mask() is None
        assert constraint.accept(token) is False
    assert constraint.mask() == bytes(64)
    assert constraint.accept(7) is False
    assert rule.taken == [7]
    opened = tokenizer.encode(f"{START}{FINAL}")
    assert find_reasoning(markers, tokenizer, opened, is_chat=True) is None


def test_a_thinking_budget_ends_the_analysis(tokenizer: Tokenizer) -> None:
    markers = reasoning_markers("openai_gptoss", tokenizer)
    assert markers is not None
    prompt = tokenizer.encode(f"{START}{ANALYSIS}old<|end|>{START}{FINAL}x<|end|>{START}")
    text_of = tokenizer.pieces(skip_special_tokens=False).shown
    budget = ThinkingBudget(markers.texts, markers.end_ids, 2, prompt, 512, text_of)
    for token in tokenizer.encode(f"{ANALYSIS}ab"):
        assert budget.mask() is None
        budget.accept(token)
    (end,) = tokenizer.encode("<|end|>")
    assert budget.mask() == bytes(1 << (end & 7) if index == end >> 3 else 0 for index in range(64))
    budget.accept(end)
    assert budget.mask() is None


def test_ends_of_turns_are_those_of_the_generation_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """GPT-OSS ends calls with <|call|>, Gemma turns with <end_of_turn>: both are listed there only."""
    call, end = (tokenizer.encode(f"<|{name}|>")[0] for name in ("call", "return"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, call]}))
    plan = Mock(spec=EnginePlan)
    plan.config = SimpleNamespace(eos_token_ids=(end,), has_default_eos=False, vocab_size=512)
    plan.directory = tmp_path
    assert eos_token_ids(EngineConfig(model="m"), plan, tokenizer) == (end, call)


TEMPLATE = """
{%- for message in messages -%}
{%- if message.tool_calls -%}
  {%- if message.content and message.thinking -%}{{ raise_exception("both") }}{%- endif -%}
  {%- if message.thinking or message.content -%}
    {{ "<|start|>assistant<|channel|>analysis<|message|>" + (message.thinking or message.content) + "<|end|>" }}
  {%- endif -%}
  {%- set function = message.tool_calls[0].function -%}
  {{ "<|start|>assistant to=functions." + function.name + "<|channel|>commentary json<|message|>" }}
  {{- function.arguments | tojson + "<|call|>" }}
{%- elif message.role == "assistant" -%}
  {{ "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- else -%}
  {{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|start|>assistant" }}{%- endif -%}
"""


def test_a_parsed_message_returns_to_the_prompt() -> None:
    """A template in the shape of GPT-OSS's gets the reasoning of calls as "thinking"."""
    text = f'{ANALYSIS}Hm.<|end|>{START} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    message = make_parser().parse(text)
    call = {"function": {"name": message.tool_calls[0].name, "arguments": message.tool_calls[0].arguments}}
    turn = {"role": "assistant", "content": None, "reasoning": message.reasoning, "tool_calls": [call]}
    conversation = [{"role": "user", "content": "?"}, turn, {"role": "tool", "content": "2"}]
    prompt = render_chat(conversation, TEMPLATE, variables={})
    assert prompt == f"<|start|>user<|message|>?<|end|>{START}{text}<|start|>tool<|message|>2<|end|>{START}"
    preamble = render_chat([{**turn, "content": "I look."}], TEMPLATE, variables={})
    assert f"{ANALYSIS}I look.<|end|>" in preamble
