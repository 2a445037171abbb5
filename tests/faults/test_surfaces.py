"""One validator: a request gets the same verdict from Python, gRPC and HTTP (failure list 8)."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings

from jaxserve import RequestError, SamplingParams
from jaxserve.server.proto.jaxserve.v1 import generation_pb2_grpc
from scripts.server_child import RunningServer
from tests.faults.random_requests import FIELDS, PYTHON_ALONE, requests
from tests.faults.surfaces import Asked, Grpc, Http, Python, grpc_request
from tests.faults.talk import text

MAX_MODEL_LEN = 256
MAX_TEXTS = 20
"""That the shared server takes at once: four run, sixteen wait."""


def why_not_python(asked: Asked) -> str | None:
    """Why Python's verdict may be another by design; None where it may not."""
    if asked.kind == "text" and not asked.prompt:
        return "as in vLLM a text may begin with what the tokenizer puts in front alone; servers want a prompt"
    if "truncate_prompt_tokens" in asked.extras:
        return "no method has such an argument: a program cuts its prompts itself"
    if asked.kind == "messages" and "cache_salt" in asked.extras:
        return "chat has no such argument"
    if "chat_template_kwargs" in asked.chat:
        return "a program may give its own template whatever it likes"
    if asked.chat.get("continue_final_message") and "add_generation_prompt" not in asked.chat:
        return "as in vLLM it must be told to add no generation prompt; servers add none then"
    if asked.fields.get("max_tokens", 0) > MAX_MODEL_LEN:
        return "as in vLLM it cuts what the context does not hold; servers refuse it"
    if asked.fields.get("n", 0) > MAX_TEXTS:
        return "it has no queue that a request could be too large for"
    return None


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    """An engine in this process; it takes long to start, so one test alone uses it."""
    with contextlib.closing(Python()) as found:
        yield found


@pytest.fixture(scope="module")
def http(shared_server: RunningServer) -> Iterator[Http]:
    """The shared server's HTTP side."""
    with contextlib.closing(Http(shared_server)) as found:
        yield found


@pytest.fixture(scope="module")
def rpc(shared_server: RunningServer) -> Iterator[Grpc]:
    """The shared server's gRPC side."""
    with contextlib.closing(Grpc(shared_server)) as found:
        yield found


def test_every_field_of_the_parameters_is_tried() -> None:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(FIELDS) | set(PYTHON_ALONE) == known
    assert set(FIELDS) & set(PYTHON_ALONE) == set()


QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
PROMPT_CASES: dict[str, tuple[Asked, bool]] = {
    "text": (Asked(), True),
    "an empty text": (Asked(prompt=""), False),
    "token ids": (Asked("token_ids", [5, 6, 7]), True),
    "messages": (Asked("messages", QUESTION), True),
    "no token ids": (Asked("token_ids", []), False),
    "a negative token id": (Asked("token_ids", [5, -1]), False),
    "a token id out of the vocabulary": (Asked("token_ids", [5, 10**6]), False),
    "a token id of 41 bits": (Asked("token_ids", [2**40]), False),
    "more token ids than a context": (Asked("token_ids", [7] * 257), False),
    "a text longer than a context": (Asked(prompt="1" * 300), False),
    "no messages": (Asked("messages", []), False),
    "a role that the template does not know": (Asked("messages", [{"role": "wizard", "content": "x"}]), False),
    "a message without content": (Asked("messages", [{"role": "user"}]), True),
    "messages longer than a context": (Asked("messages", [{"role": "user", "content": "long " * 300}]), False),
    "both ways to end a prompt": (
        Asked("messages", QUESTION, chat={"continue_final_message": True, "add_generation_prompt": True}),
        False,
    ),
    "a variable that hides the messages": (
        Asked("messages", QUESTION, chat={"chat_template_kwargs": {"messages": []}}),
        False,
    ),
    "a variable in place of a token of the model": (
        Asked("messages", QUESTION, chat={"chat_template_kwargs": {"bos_token": "x"}}),
        False,
    ),
    "no priority": (Asked(extras={"priority": 0}), True),
    "a priority that nobody goes by": (Asked(extras={"priority": 1}), False),
    "a salt": (Asked(extras={"cache_salt": "a"}), True),
    "an empty salt": (Asked(extras={"cache_salt": ""}), False),
    "an empty salt of token ids": (Asked("token_ids", [5], extras={"cache_salt": ""}), False),
    "an empty salt of messages": (Asked("messages", QUESTION, extras={"cache_salt": ""}), False),
    "cut to three": (Asked(extras={"truncate_prompt_tokens": 3}), True),
    "cut to what fits": (Asked("token_ids", [7] * 300, extras={"truncate_prompt_tokens": -1}), True),
    "cut to nothing": (Asked(extras={"truncate_prompt_tokens": 0}), False),
    "cut to less than nothing": (Asked(extras={"truncate_prompt_tokens": -2}), False),
    "cut to more than a context": (Asked(extras={"truncate_prompt_tokens": 257}), False),
    "as many tokens as the context holds": (Asked(fields={"max_tokens": -1}), True),
}


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_prompts_get_the_verdict_that_they_should(http: Http, rpc: Grpc, case: str) -> None:
    """Failure list 8: not only the same, but the right one."""
    asked, is_right = PROMPT_CASES[case]
    assert (http.takes(asked), rpc.takes(asked)) == (is_right, is_right)


def with_all_cases(test: Callable[..., None]) -> Callable[..., None]:
    """A property that is tried with the prompts above too."""
    for asked, _ in PROMPT_CASES.values():
        test = example(asked=asked)(test)
    return test


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # beartype does, on the engine's threads
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@with_all_cases
@given(asked=requests())
def test_three_surfaces_one_verdict(python: Python, http: Http, rpc: Grpc, asked: Asked) -> None:
    """Failure list 8."""
    verdicts = {"http": http.takes(asked), "grpc": rpc.takes(asked)}
    if why_not_python(asked) is None:
        verdicts["python"] = python.takes(asked)
    assert len(set(verdicts.values())) == 1, verdicts


BAD: dict[str, dict[str, Any]] = {
    "n of 2**31": {"n": 2**31},
    "a million stop strings": {"stop": [f"s{i}" for i in range(1_000_000)]},
    "a stop string of a megabyte": {"stop": ["a" * 1_000_000]},
    "a bad word of a megabyte": {"bad_words": ["a" * 1_000_000]},
    "negative ids": {"stop_token_ids": [-3]},
    "no tokens": {"max_tokens": 0},
    "more samples than a server takes": {"n": 10_000, "temperature": 1.0},
    "ids out of the vocabulary": {"allowed_token_ids": [10**6]},
    "a bias out of the vocabulary": {"logit_bias": {10**6: 1.0}},
    "too many logprobs": {"logprobs": 21},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_are_refused_everywhere(server: RunningServer, case: str) -> None:
    """Failure list 8: neither surface lets them in, and the server lives."""
    is_too_long = case == "a million stop strings"
    answer = httpx2.post(server.http + "/v1/completions", json={"prompt": "1+1=", **BAD[case]}, timeout=60)
    assert answer.status_code == (413 if is_too_long else 400), answer.text
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as failure:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stub.Generate(grpc_request(Asked(fields=BAD[case])), timeout=60)
    codes = grpc.StatusCode
    assert failure.value.code() is (codes.RESOURCE_EXHAUSTED if is_too_long else codes.INVALID_ARGUMENT)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_everywhere(
    server: RunningServer, rpc: Grpc, name: str, value: float
) -> None:
    """Failure list 8: JSON has no NaN, and protobuf has."""
    content = json.dumps({"prompt": "1+1=", name: value})
    headers = {"Content-Type": "application/json"}
    answer = httpx2.post(server.http + "/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400
    fields: dict[str, Any] = {name: value}
    assert not rpc.takes(Asked(fields=fields))
    with pytest.raises(RequestError):
        SamplingParams(**fields)


def test_both_servers_give_the_same_text(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        request = grpc_request(Asked(prompt="reverse moon:", fields={"temperature": 0.0}))
        answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    assert answer.completions[0].text == text(server, "reverse moon:") == " noom"
