"""``/v1/chat/completions``: messages, tools and reasoning, as a whole and as bytes of streams."""

import functools
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.request import Request
from jaxserve.parsers import ParserNames
from jaxserve.text.content_format import convert_content
from tests.jaxserve.server.http_fakes import CHAT, Answer, FakeEngine, make_server

PATH = "/v1/chat/completions"
HERMES = ParserNames("qwen3", "hermes")


def tool(name: str = "add") -> dict[str, Any]:
    """A function with one number."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat(**fields: Any) -> dict[str, Any]:
    """A request."""
    return {"messages": CHAT, **fields}


def joined(answer: Answer) -> dict[int, dict[str, Any]]:
    """The messages that the chunks of a stream make, with finish and stop reason."""
    found: dict[int, dict[str, Any]] = {}
    for event in answer.events:
        for choice in event["choices"]:
            message = found.setdefault(choice["index"], {"tool_calls": []})
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            assert "finish_reason" not in message, "a chunk behind the last"
            if choice["finish_reason"] is not None:
                message["finish_reason"], message["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return found


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls without their ids, which no two answers have in common."""
    assert len({call["id"] for call in calls}) == len(calls)
    return [{name: call[name] for name in call if name != "id"} for call in calls]


def test_a_conversation_is_answered_with_an_object() -> None:
    server = make_server()
    found = server.post(PATH, chat()).json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", found.pop("id"))
    assert found.pop("created") > 1.6e9
    assert found.pop("system_fingerprint").startswith("jaxserve-")
    assert found == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 19, "total_tokens": 24, "completion_tokens": 5},
    }
    assert server.engine.request.params.max_tokens is None
    assert server.engine.request.chat == {
        "messages": CHAT,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }


def test_a_stream_is_these_bytes() -> None:
    answer = make_server(FakeEngine(["Hé", "", "lo"], stop="x")).post(PATH, chat(stream=True))
    begin = answer.body.split(b',"choices"')[0]
    assert re.fullmatch(
        rb'data: \{"id":"chatcmpl-[0-9a-f]{32}","object":"chat.completion.chunk","created":\d+,"model":"tiny",'
        rb'"system_fingerprint":"jaxserve-[\w.]+-[0-9a-f]{8}"',
        begin,
    )
    middle = b'},"logprobs":null,"finish_reason":null}]}\n\n'
    assert answer.body == (
        begin + b',"choices":[{"index":0,"delta":{"role":"assistant","content":""' + middle
        + begin + b',"choices":[{"index":0,"delta":{"content":"H\xc3\xa9"' + middle
        + begin + b',"choices":[{"index":0,"delta":{"content":"lo"},"logprobs":null,"finish_reason":"stop",'
        b'"stop_reason":"x"}]}\n\ndata: [DONE]\n\n'
    )  # fmt: skip


def test_every_choice_has_a_role_first_and_one_finish() -> None:
    engine = FakeEngine(["a", "b"], ["c"], ["d", "", "e"])
    answer = make_server(engine).post(PATH, chat(stream=True, n=3, stream_options={"include_usage": True}))
    *events, last = answer.events
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    assert all(event["choices"][0]["delta"] == {"role": "assistant", "content": ""} for event in events[:3])
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 19, "total_tokens": 24, "completion_tokens": 5}
    assert {index: message["content"] for index, message in joined(answer).items()} == {0: "ab", 1: "c", 2: "de"}
    whole = make_server(engine).post(PATH, chat(n=3)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["ab", "c", "de"]


def test_usage_of_the_role_chunk_has_no_completion_tokens() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = make_server().post(PATH, chat(stream=True, stream_options=options)).events
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 3, 5, 5]
    events = make_server(FakeEngine(["ab"], ["c"])).post(PATH, chat(n=2, stream=True, stream_options=options)).events
    counts = [(event["choices"][0]["index"], event["usage"]["completion_tokens"]) for event in events[2:-1]]
    assert sorted(counts) == [(0, 2), (1, 1)]
    assert {event["usage"]["prompt_tokens"] for event in events} == {19}
    assert events[-1]["usage"]["completion_tokens"] == 3


def test_logprobs_are_of_the_likeliest_tokens() -> None:
    server = make_server(FakeEngine(["é"]))
    request = chat(logprobs=True, top_logprobs=2)
    choice = server.post(PATH, request).json()["choices"][0]
    own = {"token": "é", "logprob": -1.5, "bytes": [195, 169]}
    top = [{"token": "!", "logprob": -0.25, "bytes": [33]}, own]
    assert choice["logprobs"] == {"content": [{**own, "top_logprobs": top}]}
    last = server.post(PATH, {**request, "stream": True}).events[-1]
    assert last["choices"][0]["logprobs"] == choice["logprobs"]
    choice = server.post(PATH, chat(logprobs=True)).json()["choices"][0]
    assert choice["logprobs"] == {"content": [{**own, "top_logprobs": []}]}
    assert server.post(PATH, chat(logprobs=False, top_logprobs=0)).json()["choices"][0]["logprobs"] is None


def test_bytes_are_the_tokens_own_where_tokens_are_written_as_ids() -> None:
    server = make_server(FakeEngine(["é"]))
    request = chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    for answer in (server.post(PATH, request).json(), server.post(PATH, {**request, "stream": True}).events[-1]):
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        assert (entry["token"], entry["bytes"]) == ("token_id:233", [195, 169])
        assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [("token_id:33", [33])]
    (entry,) = server.post(PATH, chat(logprobs=True, detokenize=False)).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:233", None), "without text, nothing is known of a token"


def test_named_tokens_have_logprobs_too() -> None:
    server = make_server(FakeEngine(["a"]))
    answer = server.post(PATH, chat(logprobs=True, logprob_token_ids=[33]))
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["!"]


def test_token_ids_are_given_where_asked_for() -> None:
    server = make_server()
    found = server.post(PATH, chat(return_token_ids=True, prompt_logprobs=1)).json()
    assert found["choices"][0]["token_ids"] == [72, 101, 108, 108, 111]
    assert len(found["prompt_token_ids"]) == len(found["prompt_logprobs"]) == 19
    events = server.post(PATH, chat(return_token_ids=True, stream=True)).events
    assert len(events[0]["prompt_token_ids"]) == 19
    assert "prompt_token_ids" not in events[0]["choices"][0] and "prompt_token_ids" not in events[1]
    assert [event["choices"][0]["token_ids"] for event in events[1:]] == [[72, 101, 108], [108, 111]]


def test_contents_may_be_lists_of_texts_in_any_form() -> None:
    content = [
        "bare",
        {"type": "input_text", "text": "in"},
        {"type": "output_text", "text": "out"},
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "hm"},
    ]
    messages = [*CHAT, {"role": "assistant", "content": content}]
    found = make_server().post(PATH, {"messages": messages, "echo": True, "continue_final_message": True}).json()
    assert found["choices"][0]["message"]["content"] == "bare\nin\nout\nno\nhmHello"
    assert convert_content("user", content, "string") == "bare\nin\nout\nno\nhm"
    assert convert_content("user", content, "openai")[-1] == {"type": "text", "text": "hm"}


def test_the_last_message_is_echoed_where_it_is_the_assistants() -> None:
    messages = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "Oh. "}]}]
    request = {"messages": messages, "echo": True, "continue_final_message": True}
    server = make_server()
    assert server.post(PATH, request).json()["choices"][0]["message"]["content"] == "Oh. Hello"
    assert server.engine.request.chat is not None
    assert server.engine.request.chat["add_generation_prompt"] is False
    assert joined(server.post(PATH, {**request, "stream": True}))[0]["content"] == "Oh. Hello"
    assert server.post(PATH, chat(echo=True)).json()["choices"][0]["message"]["content"] == "Hello"


TEXTS = (
    "<think>Let me see</think>Plain.",
    'Fine: <tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>',
    '<think>x</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1',
    "no </think> at all <tool_call>",
    "",
)


@given(text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 120)), can_be_parallel=st.booleans())
def test_a_stream_joined_is_the_whole_answer(text: str, cuts: list[int], can_be_parallel: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)] or [""]
    server = make_server(FakeEngine(pieces), parsers=HERMES, enable_auto_tool_choice=True)
    request = chat(tools=[tool()], parallel_tool_calls=can_be_parallel)
    choice = server.post(PATH, request).json()["choices"][0]
    message, found = choice["message"], joined(server.post(PATH, {**request, "stream": True}))[0]
    assert (found.get("content") or "") == (message["content"] or "")
    assert found.get("reasoning") == found.get("reasoning_content") == message.get("reasoning")
    assert without_ids(found["tool_calls"]) == without_ids(message.get("tool_calls", []))
    assert found["finish_reason"] == choice["finish_reason"]
    if not can_be_parallel:
        assert len(found["tool_calls"]) < 2


def test_calls_and_reasoning_are_taken_out_of_the_content() -> None:
    server = make_server(FakeEngine([TEXTS[2]]), parsers=HERMES, enable_auto_tool_choice=True)
    choice = server.post(PATH, chat(tools=[tool()])).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "x"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert server.engine.request.params.skip_special_tokens is False
    hidden = server.post(PATH, chat(tools=[tool()], include_reasoning=False)).json()["choices"][0]["message"]
    assert "reasoning" not in hidden and len(hidden["tool_calls"]) == 2
    kept = server.post(PATH, chat(tools=[tool()], tool_choice="none", skip_special_tokens=True)).json()["choices"][0]
    assert kept["message"]["content"].startswith("<tool_call>") and kept["finish_reason"] == "stop"
    assert server.engine.request.params.skip_special_tokens is True


def test_an_answer_that_was_cut_keeps_its_finish_reason() -> None:
    server = make_server(FakeEngine([TEXTS[1]]), parsers=HERMES, enable_auto_tool_choice=True)
    choice = server.post(PATH, chat(tools=[tool()], max_tokens=60)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a"')


def test_reasoning_that_the_prompt_begins_needs_no_tag() -> None:
    engine = FakeEngine(["hm", "m</think>", "Yes"], rendered="user: Hi\nassistant: <think>\n")
    server = make_server(engine, parsers=HERMES)
    message = server.post(PATH, chat()).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hmm", "Yes")
    found = joined(server.post(PATH, chat(stream=True)))[0]
    assert (found["reasoning"], found["content"]) == ("hmm", "Yes")


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_reasoning_that_does_not_end_is_a_call(stream: bool) -> None:
    pieces = ["I ad", "d.\n<tool", ADD[5:40], f"{ADD[40:]}\n</thi", "nk>"]
    server = make_server(
        FakeEngine(pieces, rendered="<|im_start|>assistant\n<think>\n"), parsers=HERMES, enable_auto_tool_choice=True
    )

    def message(**fields: Any) -> dict[str, Any]:
        answer = server.post(PATH, chat(stream=stream, **fields))
        return joined(answer)[0] if stream else _with_reason(answer.json()["choices"][0])

    found = message(tools=[tool()])
    assert (found["reasoning"], found["content"] or None, found["finish_reason"]) == ("I add.\n", None, "tool_calls")
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    for fields in ({}, {"tools": [tool()], "tool_choice": "none"}, {"tools": [tool("sub")]}):
        found = message(**fields)
        assert (found["reasoning"], found["finish_reason"]) == (f"I add.\n{ADD}\n", "stop")
        assert not found.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3"])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nFirst I add", " it.", "Yes."),
        ("<think>\nHm.\n</think>\n\nThe answer", None, " it.</think>Yes."),
        ("The answer", None, " it.</think>Yes."),
    ],
)
def test_a_continued_message_may_end_inside_reasoning(
    stream: bool, name: str, text: str, reasoning: str | None, content: str
) -> None:
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": text}]
    engine = FakeEngine([" it.", "</think>", "Yes."], rendered=f"Q: What is <think>? A: {text}")
    server = make_server(engine, parsers=ParserNames(name, None))
    answer = server.post(PATH, {"messages": messages, "continue_final_message": True, "stream": stream})
    found = joined(answer)[0] if stream else answer.json()["choices"][0]["message"]
    assert (found.get("reasoning") or None, found["content"]) == (reasoning, content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_a_structure_of_the_answer(stream: bool) -> None:
    engine = FakeEngine(["Hm.</thi", 'nk>[{"name": "add", "para', 'meters": {"a": 3}}]'])
    server = make_server(engine, parsers=ParserNames("deepseek_r1", None))
    answer = server.post(PATH, chat(tools=[tool(), tool("sub")], tool_choice="required", stream=stream))
    found = joined(answer)[0] if stream else answer.json()["choices"][0]["message"]
    assert without_ids(found["tool_calls"]) == [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    ]
    assert found["reasoning"] == "Hm."  # the grammar holds from its end on
    structure = engine.request.params.structured_outputs
    assert structure is not None and structure.json is not None
    assert dict(structure.json)["type"] == "array"  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.texts = (["</think>", '{"a"', ": 4}"],)
    named = {"type": "function", "function": {"name": "sub"}}
    answer = server.post(PATH, chat(tools=[tool(), tool("sub")], tool_choice=named, stream=stream))
    found = joined(answer)[0] if stream else answer.json()["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    calls = found["tool_calls"] if stream else found["message"]["tool_calls"]
    assert calls[0]["function"] == {"name": "sub", "arguments": '{"a": 4}'}


class HarmonyEngine(FakeEngine):
    """Its tokenizer has Harmony's markers as special tokens."""

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Outputs without the markers if the request skips special tokens."""
        if request.params.skip_special_tokens:
            self.texts = tuple([re.sub(r"<\|\w+\|>", "", piece) for piece in pieces] for pieces in self.texts)
        async for output in super().generate(request):
            yield output


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips", [None, True, False])
def test_harmony_needs_its_special_tokens(stream: bool, skips: bool | None) -> None:
    given = {} if skips is None else {"skip_special_tokens": skips}

    def message(*pieces: str, **fields: Any) -> dict[str, Any]:
        server = make_server(
            HarmonyEngine(pieces, rendered="<|start|>assistant"),
            parsers=ParserNames("openai_gptoss", "openai"),
            enable_auto_tool_choice=True,
        )
        answer = server.post(PATH, chat(stream=stream, **given, **fields))
        return joined(answer)[0] if stream else _with_reason(answer.json()["choices"][0])

    found = message("<|channel|>ana", "lysis<|message|>H", "m.<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("Hm.", "Yes.", "stop")
    found = message(THOUGHT, HARMONY_CALL, '{"a"', ": 12}", tools=[tool()])
    assert (found["reasoning"], found["content"] or None, found["finish_reason"]) == ("Hm.", None, "tool_calls")
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "add", "arguments": '{"a": 12}'}]
    found = message(THOUGHT, f"{HARMONY_CALL}oops", tools=[tool()])
    assert (found["content"], found["finish_reason"]) == (
        "<|channel|>commentary to=functions.add<|message|>oops",
        "stop",
    )
    found = message(THOUGHT, tools=[tool()], tool_choice="none", max_tokens=35, include_reasoning=False)
    assert (found["content"], found["finish_reason"]) == ("", "length")


def _with_reason(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_of_harmony_is_in_its_final_channel(stream: bool) -> None:
    engine = HarmonyEngine(
        [THOUGHT, '<|start|>assistant<|channel|>final<|message|>[{"name": "add", "parameters": {}}]']
    )
    server = make_server(engine, parsers=ParserNames("openai_gptoss", "openai"))
    answer = server.post(PATH, chat(tools=[tool()], tool_choice="required", bad_words=["x"], stream=stream))
    found = joined(answer)[0] if stream else _with_reason(answer.json()["choices"][0])
    assert (found["reasoning"], found["finish_reason"]) == ("Hm.", "tool_calls")
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "add", "arguments": "{}"}]
    params = engine.request.params
    assert list(params.bad_words or ()) == ["x", "<|channel|>commentary"], "no grammar would constrain such a call"
    assert params.structured_outputs is not None
    server.post(PATH, chat(response_format={"type": "json_object"}))
    assert not engine.request.params.bad_words


@pytest.mark.parametrize("stream", [False, True])
def test_gemma_s_markers_are_special_tokens_too(stream: bool) -> None:
    parsers = ParserNames("gemma4", "gemma4")
    engine = FakeEngine(["<|channel>", "thought\nHm.", '<|tool_call>call:add{a:<|"|>x', '<|"|>}<tool_call|>'])
    server = make_server(engine, parsers=parsers, enable_auto_tool_choice=True)
    answer = server.post(PATH, chat(tools=[tool()], stream=stream))
    found = joined(answer)[0] if stream else _with_reason(answer.json()["choices"][0])
    assert (found["reasoning"], found["content"] or None, found["finish_reason"]) == ("Hm.", None, "tool_calls")
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "add", "arguments": '{"a": "x"}'}]
    assert engine.request.params.skip_special_tokens is False
    server.post(PATH, chat(tools=[tool()], tool_choice="required"))
    assert engine.request.params.bad_words == ("<|tool_call>",)


def test_ids_of_calls_may_be_the_models_own() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    server = make_server(FakeEngine([text]), parsers=ParserNames(None, "kimi_k2"), enable_auto_tool_choice=True)
    choice = server.post(PATH, chat(tools=[tool()])).json()["choices"][0]
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([call], "tool_calls")
    assert server.engine.request.params.skip_special_tokens is False


def test_a_structure_behind_the_reasoning_may_hold_its_marks() -> None:
    server = make_server(FakeEngine(["<think>Hm.</think>", '{"a": "<think>"}']), parsers=ParserNames("think", None))
    message = server.post(PATH, chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"a": "<think>"}')


@pytest.mark.parametrize(
    ("form", "kind", "value"),
    [
        ({"type": "json_object"}, "json_object", True),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            "json",
            {"type": "object"},
        ),
        ({"type": "structural_tag", "format": {"type": "any"}}, "structural_tag", None),
    ],
)
def test_response_formats_are_structures(form: dict[str, Any], kind: str, value: Any) -> None:
    server = make_server(FakeEngine(["{}"]))
    assert server.post(PATH, chat(response_format=form)).status == 200
    structure = server.engine.request.params.structured_outputs
    assert structure is not None and structure.kind == kind
    if value is None:
        assert json.loads(structure.structural_tag or "") == form
    else:
        assert getattr(structure, kind) == value
    assert server.post(PATH, chat(response_format={"type": "text"})).status == 200
    assert server.engine.request.params.structured_outputs is None


def test_the_template_gets_its_variables() -> None:
    server = make_server(default_chat_template_kwargs={"a": 1, "b": 2}, trust_request_chat_template=True)
    answer = server.post(
        PATH,
        chat(
            chat_template_kwargs={"b": True, "c": None},
            reasoning_effort="low",
            chat_template="{{ messages }}",
            add_generation_prompt=False,
            tools=[],
            documents=[],
            add_special_tokens=False,
        ),
    )
    assert answer.status == 200, answer.body
    assert server.engine.request.chat == {
        "messages": CHAT,
        "chat_template": "{{ messages }}",
        "add_generation_prompt": False,
        "continue_final_message": False,
        "chat_template_kwargs": {"a": 1, "b": True, "c": None, "reasoning_effort": "low"},
    }


VARIABLES = {
    "list": [1, {"deep": [None, True, -0.5, "é"]}],
    "object": {"a b": {}, "": [[]]},
    "least": -(2**63),
    "most": [2**63 - 1],
    "none": None,
    "nested": functools.reduce(lambda inner, _: [inner], range(62), 1),
}


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_variables_of_the_template_are_any_json(path: str) -> None:
    server = make_server()
    answer = server.post(path, chat(chat_template_kwargs=VARIABLES))
    assert answer.status == 200, answer.body
    chat_given = server.engine.request.chat
    assert chat_given is not None and chat_given["chat_template_kwargs"] == VARIABLES


def test_max_completion_tokens_wins() -> None:
    server = make_server()
    server.post(PATH, chat(max_tokens=3, max_completion_tokens=2))
    assert server.engine.request.params.max_tokens == 2
    server.post(PATH, chat(max_tokens=3))
    assert server.engine.request.params.max_tokens == 3


def test_the_role_of_answers_is_a_setting() -> None:
    server = make_server(response_role="bot")
    assert server.post(PATH, chat()).json()["choices"][0]["message"]["role"] == "bot"
    assert server.post(PATH, chat(stream=True)).events[0]["choices"][0]["delta"]["role"] == "bot"
