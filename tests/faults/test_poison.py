"""Requests that something goes wrong with: each fails alone (failure list 8 to 11)."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

from scripts.server_child import RunningServer
from tests.faults.talk import LONG, post, stream, text, total
from tests.hooks import injected
from tests.server_process import running_server

POISONS: dict[str, dict[str, Any]] = {
    "tokenizer": {"prompt": injected.TOKENIZER_MARK},
    "sampler": {"prompt": "1+1=", "seed": injected.SAMPLER_SEED},
    "detokenizer": {"prompt": "1+1=", "stop_token_ids": [injected.DETOKENIZER_STOP_ID]},
    "grammar": {"prompt": "1+1=", "structured_outputs": {"regex": injected.GRAMMAR_MARK}},
}


@pytest.mark.parametrize("place", POISONS)
def test_an_exception_in_host_code_fails_its_request_alone(server: RunningServer, place: str) -> None:
    """Failure list 10."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(text, server, "reverse moon:", max_tokens=8) for _ in range(2)]
        answer = post(server, **POISONS[place])
        texts = {one.result() for one in neighbours}
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text
    assert texts == {" noom"}


@pytest.mark.parametrize("place", POISONS)
def test_an_exception_in_a_stream_is_an_error_in_the_stream(server: RunningServer, place: str) -> None:
    """Failure list 10, where headers may have been sent."""
    answer = post(server, stream=True, **POISONS[place])
    assert "InternalServerError" in answer.text
    assert "secret" not in answer.text
    assert answer.status_code == 500 or answer.text.endswith("data: [DONE]\n\n")


def test_nan_ends_its_request_is_not_cached_and_changes_no_neighbour(server: RunningServer) -> None:
    """Failure list 11: bits of the batch-mates' logprobs, and what the prefix cache has afterwards."""
    prompt = "sort 9 8 7 6 5 4 3 2 1: sort 9 8 7 6 5 4 3 2 1: sort 9 8 7 6 5 4 3 2 1:"
    body = {"prompt": "reverse moon:", "max_tokens": 24, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    clean = post(server, **body).json()["choices"][0]
    corrupted = total(server, "jaxserve:corrupted_requests_total")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        mates = [pool.submit(post, server, **body) for _ in range(2)]
        poisoned = pool.submit(post, server, prompt=prompt, vllm_xargs={"nan_from": 3}, **{**LONG, "max_tokens": 50})
        answer = poisoned.result()
        choices = [one.result().json()["choices"][0] for one in mates]
    assert answer.status_code == 500
    assert "NaN" in answer.text
    for choice in choices:
        assert (choice["text"], choice["logprobs"]) == (clean["text"], clean["logprobs"])
    assert total(server, "jaxserve:corrupted_requests_total") == corrupted + 1
    hits = total(server, "jaxserve:prefix_cache_hits_total")
    assert post(server, prompt=prompt, max_tokens=4, temperature=0).status_code == 200
    assert total(server, "jaxserve:prefix_cache_hits_total") == hits


def test_nan_in_the_middle_of_a_stream_ends_it_with_an_error(server: RunningServer) -> None:
    """Failure list 11: what came before stays."""
    with stream(server, prompt="1+1=", vllm_xargs={"nan_from": 30}, **LONG) as events:
        found = list(events)
    assert any("choices" in event for event in found)
    assert found[-1]["error"]["code"] == 500


BOMBS: dict[str, dict[str, Any]] = {
    "catastrophic regex": {"structured_outputs": {"regex": "(((a{1,90}){1,90}){1,90}){1,90}"}},
    "huge repetition": {"structured_outputs": {"regex": "(a|b){1,1000000000}"}},
    "bad regex": {"structured_outputs": {"regex": "("}},
    "deep schema": {"structured_outputs": {"json": '{"type":"array","items":' * 200 + "{}" + "}" * 200}},
    "endless grammar": {"structured_outputs": {"grammar": "start: start start"}},
    "bad grammar": {"structured_outputs": {"grammar": "start: ((("}},
    "pattern too complex for long texts": {
        "structured_outputs": {"regex": "(((a{1,90}){1,90}){1,90}){1,90}"},
        **{"min_tokens": 100, "max_tokens": 100},
    },
    "bad schema": {"structured_outputs": {"json": {"type": "nothing"}}},
}
HARMLESS = ("huge repetition", "catastrophic regex")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bad_grammar_fails_its_request_alone_and_soon(server: RunningServer, bomb: str) -> None:
    """Failure list 9."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(text, server, "reverse moon:", max_tokens=8)
        answer = post(server, **{"prompt": "1+1=", "max_tokens": 4, **BOMBS[bomb]})
        assert neighbour.result() == " noom"
    # llguidance takes some of them in its stride.
    assert answer.status_code == (200 if bomb in HARMLESS else 400), answer.text


def test_nothing_was_unpickled(server: RunningServer, switches: Path) -> None:
    """The audit hook of every process of the server: a whole run of all kinds of requests, and no pickle."""
    for body in ({"logprobs": 2}, {"n": 2, "temperature": 1.0}, {"structured_outputs": {"json_object": True}}):
        assert post(server, prompt="1+1=", max_tokens=4, **{"temperature": 0, **body}).status_code == 200
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    assert post(server, "/v1/chat/completions", messages=messages, max_tokens=4).status_code == 200
    found = switches / "unpickled"
    assert not found.exists(), found.read_text()


def test_a_template_that_never_ends_fails_alone() -> None:
    """Failure list 9: a server that takes templates from requests, though nobody should."""
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    with running_server("--trust-request-chat-template", "--chat-template-timeout", "1") as server:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            bombs = [
                pool.submit(post, server, "/v1/chat/completions", messages=messages, chat_template=bomb)
                for _ in range(2)
            ]
            assert text(server, "reverse moon:", max_tokens=8) == " noom"
            answers = [one.result() for one in bombs]
        assert [answer.status_code for answer in answers] == [400, 400]
        answer = post(server, "/v1/chat/completions", messages=messages, temperature=0)
        assert answer.json()["choices"][0]["message"]["content"] == "42"
