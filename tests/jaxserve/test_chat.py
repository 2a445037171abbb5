"""Conversations with tools and reasoning through the published chat templates, and back through the parsers."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from jaxserve.api.chat_messages import check_messages
from jaxserve.api.errors import RequestError
from jaxserve.parsers import MessageParser, starts_in_reasoning
from jaxserve.text.chat import render_chat
from jaxserve.text.chat_templates import MAX_RENDERED_CHARACTERS, render_template
from jaxserve.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "days": {"type": "integer", "description": "How many"},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": 'Zü"rich', "days": 2}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
CONVERSATION = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "It is 21 degrees."},
    {"role": "user", "content": "Thanks!"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# File under configs/chat-templates, format of its calls, where the call begins and ends, whether it writes BOS.
TEMPLATES = [
    ("Qwen-Qwen2.5-7B-Instruct.jinja", "hermes", "<tool_call>", "<|im_end|>", False),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", "hermes", "<tool_call>", "<|im_end|>", True),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja", "hermes", "<tool_call>", "<|im_end|>", True),
    ("vllm/tool_chat_template_hermes.jinja", "hermes", "<tool_call>", "<|im_end|>", True),
    ("meta-llama-Llama-3.1-8B-Instruct.jinja", "llama3_json", '{"name"', "<|eot_id|>", True),
    ("meta-llama-Llama-3.2-3B-Instruct.jinja", "llama3_json", '{"name"', "<|eot_id|>", True),
    ("meta-llama-Llama-3.3-70B-Instruct.jinja", "llama3_json", '{"name"', "<|eot_id|>", True),
    ("vllm/tool_chat_template_llama3.1_json.jinja", "llama3_json", '{"name"', "<|eot_id|>", True),
    ("vllm/tool_chat_template_llama3.2_json.jinja", "llama3_json", '{"name"', "<|eot_id|>", True),
    ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "mistral", "[TOOL_CALLS]", "</s>", True),
    ("vllm/tool_chat_template_mistral.jinja", "mistral", "[TOOL_CALLS]", "</s>", True),
    ("vllm/tool_chat_template_mistral3.jinja", "mistral", "[TOOL_CALLS]", "</s>", True),
    ("vllm/tool_chat_template_qwen3coder.jinja", "qwen3_coder", "<tool_call>", "<|im_end|>", False),
    (
        "vllm/tool_chat_template_deepseekr1.jinja",
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        "<｜end▁of▁sentence｜>",
        True,
    ),
]


def render(template: str, conversation: list[dict[str, Any]], **arguments: Any) -> str:
    """Renders with the special tokens above."""
    checked = check_messages("messages", conversation)
    variables = {**SPECIAL, **arguments.pop("variables", {})}
    return render_chat(checked, template, variables=variables, **arguments)


@pytest.mark.parametrize(("file", "name", "start", "end", "has_bos"), TEMPLATES, ids=[row[0] for row in TEMPLATES])
def test_tool_conversations_render_and_parse_back(
    shared_data: Path, file: str, name: str, start: str, end: str, has_bos: bool
) -> None:
    template = (shared_data / "configs/chat-templates" / file).read_text()
    text = render(template, CONVERSATION, tools=TOOLS)
    assert text.count("<s>") == int(has_bos)
    assert text.startswith("<s>") == has_bos
    for shown in ("get_weather", "How many", "Weather in Zürich?", "celsius", "21 degrees.", "Thanks!"):
        assert shown in text
    after = text[text.rindex(start, 0, text.index("celsius")) :]
    message = MessageParser(tools=name, schemas=TOOLS).parse(after[: after.index(end)])
    (call,) = message.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == ARGUMENTS
    assert message.content is None
    # What the parser gives goes back into the conversation as it is, and gives the same prompt.
    again = {**CALL, "function": {"name": call.name, "arguments": call.arguments}}
    mapped = {**CALL, "function": {"name": call.name, "arguments": ARGUMENTS}}
    for one in (again, mapped):
        changed = [dict(turn, tool_calls=[one]) if turn.get("tool_calls") else turn for turn in CONVERSATION]
        assert render(template, changed, tools=TOOLS) == text


def test_reasoning_goes_into_the_prompt(real_tokenizer: Callable[[str], Tokenizer]) -> None:
    tokenizer = real_tokenizer("qwen")
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
    ]
    text = tokenizer.render_chat(conversation, tools=TOOLS)
    assert "<think>\nI add.\n</think>\n\n<tool_call>" in text
    conversation[1]["reasoning"] = conversation[1].pop("reasoning_content")
    assert tokenizer.render_chat(conversation, tools=TOOLS) == text
    # An earlier turn's reasoning is left out by the template.
    later = [*conversation, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3+3?"}]
    assert "I add." not in tokenizer.render_chat(later, tools=TOOLS)


def test_prompts_tell_whether_they_end_in_reasoning(
    real_tokenizer: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    tokenizer = real_tokenizer("qwen")
    conversation = [{"role": "user", "content": "Hi"}]
    assert starts_in_reasoning(tokenizer.render_chat(conversation), "qwen3") is None
    assert starts_in_reasoning(tokenizer.render_chat(conversation, enable_thinking=False), "qwen3") is False
    template = shared_data / "configs/chat-templates/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja"
    text = render(template.read_text(), conversation)
    assert starts_in_reasoning(text, "deepseek_r1") in (True, None)
    assert text.count("<s>") == 1


def test_a_template_that_appends_arguments_to_a_string_gets_json(
    real_tokenizer: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    """DeepSeek R1's own template: with a mapping, Jinja would raise a TypeError."""
    tokenizer = real_tokenizer("deepseek-r1")
    mapped = {**CALL, "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    for call in (CALL, mapped):
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        text = tokenizer.render_chat([CONVERSATION[0], turn, *CONVERSATION[2:]])
        after = text[text.index("<｜tool▁calls▁begin｜>") :]
        message = MessageParser(tools="deepseek_v3").parse(after[: after.index("<｜end▁of▁sentence｜>")])
        assert [json.loads(call.arguments) for call in message.tool_calls] == [ARGUMENTS]


@pytest.mark.parametrize(
    ("file", "name", "start", "end"),
    [
        ("deepseekv31", "deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜end▁of▁sentence｜>"),
        ("gemma3_pythonic", "pythonic", "[get_weather(", "<end_of_turn>"),
    ],
)
def test_calls_with_one_argument_parse_back(shared_data: Path, file: str, name: str, start: str, end: str) -> None:
    """vLLM's template for Gemma leaves out commas between arguments, and that for DeepSeek V3.1 begins with a space."""
    template = (shared_data / f"configs/chat-templates/vllm/tool_chat_template_{file}.jinja").read_text()
    arguments = {"city": 'Zü"rich'}
    call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    text = render(
        template, [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}, *CONVERSATION[2:]], tools=TOOLS
    )
    after = text[text.rindex(start, 0, text.index("celsius")) :]
    message = MessageParser(tools=name).parse(after[: after.index(end)])
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("get_weather", arguments)]
    assert message.content is None


def test_deepseek_reasons_if_its_template_was_asked_to(shared_data: Path) -> None:
    template = (shared_data / "configs/chat-templates/vllm/tool_chat_template_deepseekv31.jinja").read_text()
    question: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for thinking, expected in ((True, True), (False, False)):
        text = render(template, question, variables={"thinking": thinking})
        assert starts_in_reasoning(text, "deepseek_v3") is expected
    answered = [*question, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]
    text = render(template, answered, variables={"thinking": True})
    assert starts_in_reasoning(text, "deepseek_v3") is None
    message = MessageParser("deepseek_v3", prompt_ends_in_reasoning=None).parse("It is 1.")
    assert (message.reasoning, message.content) == (None, "It is 1.")


def test_gemma_has_no_system_messages(shared_data: Path) -> None:
    template = (shared_data / "configs/chat-templates/google-gemma-2-2b-it.jinja").read_text()
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="^the chat template failed: System role not supported$"):
        render(template, conversation)
    assert render(template, conversation[1:]) == "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"


def test_bos_of_tool_conversations_is_never_doubled(
    real_tokenizer: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    tokenizer = real_tokenizer("llama2")
    for file, _, _, _, has_bos in TEMPLATES:
        template = str(shared_data / "configs/chat-templates" / file)
        token_ids = tokenizer.apply_chat_template(CONVERSATION, template, tools=TOOLS)
        assert token_ids.count(1) == int(has_bos), file


@pytest.mark.parametrize(
    ("file", "has_order"),
    [
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", True),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", True),
        ("llama-cpp-deepseek-r1.jinja", True),
        ("vllm/tool_chat_template_deepseekr1.jinja", False),
        ("vllm/tool_chat_template_deepseekv3.jinja", False),
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_calls_of_a_message_without_content_are_in_the_prompt(
    shared_data: Path, file: str, has_order: bool, content: dict[str, Any]
) -> None:
    """These templates write calls only, or in another way, if the content is null; "" is an answer."""
    template = (shared_data / "configs/chat-templates" / file).read_text()
    turn = {"role": "assistant", **content, "tool_calls": [CALL]}
    text = render(template, [CONVERSATION[0], turn, CONVERSATION[2]])
    assert text.count("get_weather") == text.count(json.dumps(ARGUMENTS, ensure_ascii=False)) == 1
    assert "None" not in text
    empty = render(template, [CONVERSATION[0], {**turn, "content": ""}, CONVERSATION[2]])
    assert ("get_weather" not in empty) == has_order


DUMP = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


def shown_call(arguments: Any) -> dict[str, Any]:
    """What a template sees of a call with these arguments."""
    function = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return json.loads(render(DUMP, [message]))["tool_calls"][0]["function"]


def test_templates_see_mappings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert shown_call('{"a": [1]}') == {"name": "f", "arguments": {"a": [1]}}
        assert shown_call({"a": [1]}) == {"name": "f", "arguments": {"a": [1]}}
        assert shown_call("") == shown_call(None) == {"name": "f", "arguments": {}}
        assert not caplog.records
        for broken in ('{"a": ', "[1]", "[" * 100_000):
            assert shown_call(broken) == {"name": "f", "arguments": {}}
    assert [record.getMessage() for record in caplog.records] == [
        "the arguments of a call to 'f' are not a JSON object; the chat template gets {} instead"
    ] * 3


def seen(template: str, *messages: dict[str, Any], **options: Any) -> str:
    """What a template makes of messages."""
    return render(template, list(messages), **options)


def test_keys_that_were_not_sent_are_not_set() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for message in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": ""},
        {"role": "user"},
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "Hi", "own": {"key": [None]}},
    ):
        assert json.loads(seen(DUMP, message)) == message
    given = "{{ 'content' in messages[0] }} {{ messages[0].content is defined }} {{ messages[0]['content'] | trim }}."
    assert seen(given, {"role": "user"}) == "False False ."
    assert seen(given, {"role": "user", "content": ""}) == "True True ."


@pytest.mark.parametrize(
    "test",
    [
        "m.content is none",
        "m['content'] is none",
        "m.content is not none",
        "m.content == none",
        "m.get('content') != None",
        "x is none",
    ],
)
def test_null_stays_null_where_the_template_asks_for_it(test: str) -> None:
    template = "{% for m in messages %}{% set x = m.content %}{{ (TEST) == (m['content'] is not none) }} ".replace(
        "TEST", test
    )
    template += "{{ m.content }} {% endfor %}"
    negated = "not" in test or "!=" in test
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    null, text = {"role": "assistant", "content": None}, {"role": "assistant", "content": "Hi"}
    for message in (null, {**null, "tool_calls": [call]}, {"role": "assistant", "tool_calls": [call]}):
        assert seen(template, message) == f"{negated} None "
        assert seen(template, message, content_format="openai") == f"{negated} None "
    assert seen(template, text) == f"{negated} Hi "
    assert seen(template, {**null, "role": "user"}) == f"{negated}  ", "only the assistant's may be null"


def test_templates_that_cannot_do_without_a_content_get_an_empty_one() -> None:
    appending = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
    asking = "{% for m in messages %}{{ '' if m.content is none else '!' }}{{ m['content'] + '.' }}{% endfor %}"
    joining = "{% for m in messages %}{{ m.content | join(',') }}{{ m.content.strip() }}.{% endfor %}"
    for template in (appending, asking, joining):
        for message in ({"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "user"}):
            assert seen(template, message)[-1] == "."
            assert "None" not in seen(template, message)
    with pytest.raises(RequestError, match="the chat template failed: no"):
        seen("{{ raise_exception('no') }}", {"role": "user"})


def test_messages_are_not_changed() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    render(DUMP, [message])
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert call == {"function": {"name": "f", "arguments": '{"a": 1}'}}


def test_no_calls_are_no_tool_calls() -> None:
    for calls in ([], None):
        message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
        assert json.loads(render(DUMP, [message])) == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("f()", r"messages\[0\].tool_calls must be a list, got str"),
        (["f"], r"messages\[0\].tool_calls\[0\] must be .* got 'f'"),
        ([{"name": "f"}], r"tool_calls\[0\] must be"),
        ([{"function": {"name": 5}}], r"tool_calls\[0\] must be"),
        (
            [{"function": {"name": "f", "arguments": [1]}}],
            r"function.arguments must be an object or JSON text, got \[1\]",
        ),
    ],
)
def test_bad_tool_calls(calls: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(DUMP, [{"role": "assistant", "content": "", "tool_calls": calls}])


LONG = "{{ '" + "x" * 2000 + "' }}"
LOOP = "{% for i in range(90000) %}" + LONG + "{% endfor %}"


@pytest.mark.parametrize("template", [LOOP, "{% macro m() %}" + LOOP + "{% endmacro %}{{ m() }}"])
def test_a_runaway_template_is_stopped(template: str) -> None:
    expected = f"the chat template failed: its output exceeds {MAX_RENDERED_CHARACTERS} characters"
    with pytest.raises(RequestError, match=expected):
        render(template, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ range(100000000) | list }}",
        "{% for a in messages %}{{ a.append(1) }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{% include 'other' %}",
        "{{ messages[0].content + 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_templates_that_fail_are_request_errors(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template failed"):
        render(template, [{"role": "user", "content": "a"}])


class Rich(str):
    """A string with a method that templates must not reach."""

    def delete(self) -> str:
        """Do harm."""
        return "deleted"


def add(first: int, second: int = 2) -> int:
    """Add two numbers.

    Args:
        first: One.
        second: The other.
    """
    return first + second


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% for m in messages %}{% generation %}{% set x = m %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}", {}),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", {}),
        ("{% set ns = namespace(self=1, a='x') %}{% set ns.a = ns.a ~ 2 %}{{ ns.a }}{{ ns.self }}", {}),
        ("{{ dict(a=1) }}{{ dict.fromkeys(['b'], 2) }}{{ documents }}{{ tools }}{{ given | tojson(indent=1) }}", {}),
        ("{{ messages | tojson }}", {}),
        ("{{ strftime_now('%Y') }}{{ given }}", {"given": {"a": (1, np.float32(0.5), np.bool_(False), np.arange(2))}}),
        ("{{ given.delete }}.{{ given }}", {"given": Rich("text")}),
        ("{{ tools | tojson }}", {"tools": [add, TOOLS[0]]}),
        ("{% for m in messages %}{{ m.content }}.{% endfor %}", {"continue_final_message": True}),
        ("{% for m in messages %}{{ m.content | trim }}.{% endfor %}", {"continue_final_message": True}),
    ],
)
def test_templates_render_as_in_transformers(template: str, variables: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "ä <b>"},
        {"role": "assistant", "content": "c ", "reasoning_content": "r", "thinking": "r"},
    ]
    options = {"tools": None, "continue_final_message": False, "given": None, **variables}
    (wanted,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages], chat_template=template, **options
    )
    assert render_template(template, messages, **options) == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__class__.mro() }}",
        "{{ dict.update }}{{ dict.update({}) }}",
        "{{ raise_exception.__globals__.json }}",
    ],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template failed"):
        render(template, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].role }}{{ messages[0].content[:1] }}", "does not show the last message"),
        ("{{ messages[0].role }}", "does not read the content"),
    ],
)
def test_last_messages_that_cannot_be_continued(template: str, message: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(RequestError, match=f"the chat template failed: continue_final_message=True, but .*{message}"):
        render(template, [{"role": "assistant", "content": "abc"}], **options)
