"""``/v1/completions``: the objects and the bytes of streams."""

import re
from typing import Any

import pytest

from jaxserve.api.draft_metrics import DraftReport
from tests.jaxserve.server.http_fakes import FakeEngine, make_server

PATH = "/v1/completions"


def test_a_text_is_answered_with_an_object() -> None:
    server = make_server()
    answer = server.post(PATH, {"prompt": "Hi!"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert re.fullmatch("cmpl-[0-9a-f]{32}", found.pop("id"))
    assert found.pop("created") > 1.6e9
    assert found.pop("system_fingerprint").startswith("jaxserve-")
    assert found == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
    }
    assert server.engine.request.params.max_tokens == 16
    assert server.engine.request.text == "Hi!"


def test_a_stream_is_these_bytes() -> None:
    answer = make_server(FakeEngine(["Hé", "l\n", "", "o"], stop=7)).post(PATH, {"prompt": "Hi", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    begin = answer.body.split(b',"choices"')[0]
    assert re.fullmatch(
        rb'data: \{"id":"cmpl-[0-9a-f]{32}","object":"text_completion","created":\d+,"model":"tiny",'
        rb'"system_fingerprint":"jaxserve-[\w.]+-[0-9a-f]{8}"',
        begin,
    )
    middle = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    assert answer.body == (
        begin + b',"choices":[{"index":0,"text":"H\xc3\xa9"' + middle
        + begin + b',"choices":[{"index":0,"text":"l\\n"' + middle
        + begin + b',"choices":[{"index":0,"text":"o","logprobs":null,"finish_reason":"stop","stop_reason":7}]}\n\n'
        + b"data: [DONE]\n\n"
    )  # fmt: skip


def test_prompts_of_a_batch_and_their_samples_have_indices_one_behind_the_other() -> None:
    engine = FakeEngine(["a", "b"], ["cd"], ["e", "f", "g"])
    request = {"prompt": ["one", "three"], "n": 3, "temperature": 1}
    found = make_server(engine).post(PATH, request).json()
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        *((0, "ab"), (1, "cd"), (2, "efg"), (3, "ab"), (4, "cd"), (5, "efg"))
    ]
    assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 22, "completion_tokens": 14}
    assert sorted(engine.requests) == [f"{found['id']}-0", f"{found['id']}-1"]
    texts, reasons = dict[int, str](), list[int]()
    for event in make_server(engine).post(PATH, {**request, "stream": True}).events:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        reasons += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == {0: "ab", 1: "cd", 2: "efg", 3: "ab", 4: "cd", 5: "efg"}
    assert sorted(reasons) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105]], ["Hi"], "Hi"])
def test_prompts_have_four_forms(prompt: Any) -> None:
    server = make_server()
    assert server.post(PATH, {"prompt": prompt}).json()["usage"]["prompt_tokens"] == 2
    expected = (None, (72, 105)) if "Hi" not in prompt else ("Hi", None)
    assert (server.engine.request.text, server.engine.request.token_ids) == expected


def test_usage_comes_last_or_with_every_chunk() -> None:
    server = make_server(enable_prompt_tokens_details=True)
    options = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.post(PATH, options).events
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        **{"prompt_tokens": 2, "total_tokens": 7, "completion_tokens": 5},
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    options["stream_options"]["continuous_usage_stats"] = True
    counts = [event["usage"]["completion_tokens"] for event in server.post(PATH, options).events]
    assert counts == [3, 5, 5]
    events = make_server().post(PATH, {**options, "prompt": ["Hi", "Hello"], "n": 1}).events
    used = [(event["choices"][0]["index"], event["usage"]) for event in events[:-1]]
    assert {(place, usage["prompt_tokens"]) for place, usage in used} == {(0, 2), (1, 5)}
    assert max(usage["completion_tokens"] for _, usage in used) == 5
    assert events[-1]["usage"]["total_tokens"] == 17
    options["stream_options"] = {"include_usage": False, "continuous_usage_stats": True}
    assert all("usage" not in event for event in server.post(PATH, options).events)
    del options["stream_options"]
    forced = make_server(enable_force_include_usage=True).post(PATH, options).events
    assert [event["usage"]["completion_tokens"] for event in forced] == [3, 5, 5]


@pytest.mark.parametrize("is_detailed", [False, True])
@pytest.mark.parametrize(
    "path, prompt",
    [(PATH, {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})],
)
def test_drafts_of_a_single_completion_are_reported(path: str, prompt: dict[str, Any], is_detailed: bool) -> None:
    """In a stream beside the usage; several completions have none to report."""
    engine, report = FakeEngine(), DraftReport(3, is_detailed)
    engine.draft_report = report
    server, expected = make_server(engine), report.of([3, 3, 1], [2, 0, 1]).to_dict()
    assert ("per_step_drafted" in expected) == is_detailed
    assert (expected["acceptance_histogram"], expected["mean_acceptance_length"]) == ([1, 1, 1, 0], 2.0)
    assert server.post(path, prompt).json()["metrics"] == {"speculative_decoding": expected}
    assert server.post(path, {**prompt, "n": 2}).json()["metrics"] is None
    *chunks, last = server.post(path, {**prompt, "stream": True, "stream_options": {"include_usage": True}}).events
    assert last["metrics"] == {"speculative_decoding": expected} and not any("metrics" in chunk for chunk in chunks)
    engine.draft_report = None
    assert "metrics" not in server.post(path, prompt).json()


def test_logprobs_are_lists_and_have_no_infinity() -> None:
    found = make_server(FakeEngine(["ab"])).post(PATH, {"prompt": "Hi", "logprobs": 3}).json()
    least = -9999.0
    assert found["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-1.5, -1.5],
        "tokens": ["a", "b"],
        "top_logprobs": [
            {"a": -1.5, "!": -0.25, "Z": least, "[": least},
            {"b": -1.5, "!": -0.25, "Z": least, "[": least},
        ],
    }
    as_ids = {"prompt": "Hi", "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = make_server(FakeEngine(["ab"])).post(PATH, as_ids).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"]
    assert logprobs["text_offset"] == [0, 1], "characters of the text, not of token_id:97"
    assert logprobs["top_logprobs"][0] == {"token_id:97": -1.5, "token_id:33": -0.25}
    del as_ids["return_tokens_as_token_ids"]
    server = make_server(FakeEngine(["ab"]), return_tokens_as_token_ids=True)
    assert server.post(PATH, as_ids).json()["choices"][0]["logprobs"]["tokens"][0] == "token_id:97"
    without_text = {"prompt": "Hi", "logprobs": 1, "detokenize": False}
    logprobs = make_server(FakeEngine(["ab"])).post(PATH, without_text).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"]
    assert logprobs["text_offset"] == [0, 0], "there is no text"


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
def test_an_echo_begins_with_the_prompt_and_its_logprobs(prompt: Any) -> None:
    server = make_server(FakeEngine(["a", "b"]))
    request = {"prompt": prompt, "echo": True, "logprobs": 1}
    choice = server.post(PATH, request).json()["choices"][0]
    assert choice["text"] == "Hiab"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -1.5, -1.5, -1.5],
        "tokens": ["H", "i", "a", "b"],
        "top_logprobs": [None, {"i": -1.5, "!": -0.25}, {"a": -1.5, "!": -0.25}, {"b": -1.5, "!": -0.25}],
    }
    assert "prompt_logprobs" not in choice
    assert server.engine.request.params.prompt_logprobs == 1
    events = server.post(PATH, {**request, "stream": True}).events
    parts = [event["choices"][0] for event in events]
    assert [part["text"] for part in parts] == ["Hia", "b"]
    joined = {name: sum((part["logprobs"][name] for part in parts), []) for name in parts[0]["logprobs"]}
    assert joined == choice["logprobs"]
    events = server.post(PATH, {**request, "stream": True, "return_tokens_as_token_ids": True}).events
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert sum(offsets, []) == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_of_no_tokens_is_the_prompt_alone(stream: bool) -> None:
    server = make_server(FakeEngine(["a", "b"]))
    request = {"prompt": ["Hi", "You"], "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    answer = server.post(PATH, {**request, "stream_options": {"include_usage": True}} if stream else request)
    choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json()["choices"]
    usage = (answer.events[-1] if stream else answer.json())["usage"]
    choices.sort(key=lambda choice: choice["index"])
    assert [choice["text"] for choice in choices] == ["Hi", "You"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert choices[1]["logprobs"]["tokens"] == ["Y", "o", "u"]
    assert choices[1]["logprobs"]["top_logprobs"] == [None, {"o": -1.5}, {"u": -1.5}]
    assert usage == {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}


def test_token_ids_and_prompt_logprobs_are_given_where_asked_for() -> None:
    server = make_server(FakeEngine(["a", "b"]))
    choice = server.post(PATH, {"prompt": "Hi", "return_token_ids": True, "prompt_logprobs": 1}).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
            "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
        },
    ]
    events = server.post(PATH, {"prompt": "Hi", "return_token_ids": True, "stream": True}).events
    assert [event["choices"][0]["token_ids"] for event in events] == [[97], [98]]
    assert events[0]["choices"][0]["prompt_token_ids"] == [72, 105]
    assert "prompt_token_ids" not in events[1]["choices"][0]


def test_every_sampling_field_reaches_the_engine() -> None:
    given: dict[str, Any] = {
        **{"n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "temperature": 0.75},
        **{
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.25,
            "seed": 5,
            "stop": ["x"],
            "stop_token_ids": [4],
            "ignore_eos": True,
        },
        **{"max_tokens": 9.0, "min_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": False},
        **{"spaces_between_special_tokens": False, "include_stop_str_in_output": True, "bad_words": ["bad"]},
        **{"allowed_token_ids": [1, 2], "logit_bias": {"7": 1000}, "thinking_token_budget": 6, "detokenize": True},
        **{"skip_reading_prefix_cache": True, "structured_outputs": {"choice": ["a", "b"]}},
        "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
    }
    more = {"vllm_xargs": {"x": 1}, "priority": -3, "cache_salt": "salt", "truncate_prompt_tokens": 2, "best_of": 2}
    server = make_server(strict=True)
    answer = server.post(PATH, {"prompt": "Hi", **given, **more, "add_special_tokens": False}, X_Request_Timeout="2.5")
    assert answer.status == 200, answer.body
    request = server.engine.request
    for name, value in given.items():
        found = getattr(request.params, name)
        found = list(found) if isinstance(found, tuple) else found
        if name not in ("logit_bias", "structured_outputs", "repetition_detection"):
            assert found == value, name
    assert request.params.logit_bias == {7: 100.0}
    assert request.params.structured_outputs is not None and request.params.structured_outputs.choice == ("a", "b")
    assert request.params.repetition_detection is not None and request.params.repetition_detection.min_count == 4
    assert request.params.extra_args == {"x": 1}
    assert (request.priority, request.truncate_prompt_tokens, request.timeout_s) == (-3, 2, 2.5)
    assert (request.cache_salt, request.add_special_tokens) == ("salt", False)


def test_the_models_defaults_are_used() -> None:
    server = make_server()
    server.engine.default_fields = {"temperature": 0.0, "max_tokens": 3}
    assert server.post(PATH, {"prompt": "Hi"}).json()["choices"][0]["text"] == "Hel"
    assert server.post(PATH, {"prompt": "Hi"}).json()["choices"][0]["finish_reason"] == "length"
    assert server.post(PATH, {"prompt": "Hi", "max_tokens": None, "temperature": None}).status == 200
    assert server.engine.request.params.temperature == 0.0
