"""One validator: a request gets the same verdict from Python, gRPC and HTTP (failure list 8)."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import AsyncLLM, RequestError, SamplingParams
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from scripts.server_child import RunningServer
from tests.faults.talk import text

NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5, 1e-9, 3.0, -3.0, 1e300]), st.floats(-3, 3, allow_nan=False)
)
WHOLE = st.one_of(st.sampled_from([0, 1, 2, -1, -2, 20, 21, 2**31, 2**62, -(2**62)]), st.integers(-5, 50))
IDS = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([-1, 10**6, 2**40])), min_size=1, max_size=4)
TEXTS = st.lists(st.sampled_from(["", "a", "stop", "\u00e9", "x" * 50]), min_size=1, max_size=3)
STRUCTURES = st.sampled_from(
    [
        {"regex": "[0-9]+"},
        {"regex": "("},
        {"choice": ["a", "b"]},
        {"json": '{"type": "object"}'},
        {"json": "{"},
        {"grammar": ""},
    ]
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": WHOLE,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": WHOLE,
    "min_p": NUMBERS,
    "seed": WHOLE,
    "stop": TEXTS,
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "max_tokens": st.one_of(st.integers(-2, 8), st.just(2**40)),
    "min_tokens": st.integers(-2, 9),
    "logprobs": WHOLE,
    "prompt_logprobs": WHOLE,
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "structured_outputs": STRUCTURES,
    "logit_bias": st.dictionaries(st.sampled_from([1, 5, 10**6, -1]), NUMBERS, min_size=1, max_size=2),
    "allowed_token_ids": IDS,
    "bad_words": TEXTS,
    "thinking_token_budget": WHOLE,
    "repetition_detection": st.fixed_dictionaries({"max_pattern_size": WHOLE, "min_count": WHOLE}),
    "extra_args": st.sampled_from([{"nan_from": 0}, {"other": 1}, {"nan_from": "x"}]),
}
REQUESTS = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


def test_every_field_of_the_parameters_is_tried() -> None:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    elsewhere = {
        *("output_kind", "flat_logprobs"),  # Python's outputs alone
        *("detokenize", "spaces_between_special_tokens", "skip_reading_prefix_cache", "logprob_token_ids"),
    }
    assert set(FIELDS) | elsewhere == known


@pytest.fixture(scope="module")
def python_engine() -> Iterator[tuple[asyncio.AbstractEventLoop, AsyncLLM]]:
    """The third surface: an engine in this process, of the same settings."""
    loop = asyncio.new_event_loop()
    engine = AsyncLLM(
        "demo",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        kv_cache_memory_bytes=8 << 20,
        compilation_cache_dir="",
        logits_processors=["tests.faults.nan_processor:NAN_FROM"],
    )
    yield loop, engine
    engine.shutdown()
    loop.close()


def python_verdict(loop: asyncio.AbstractEventLoop, engine: AsyncLLM, fields: dict[str, Any]) -> bool:
    """Whether Python takes the request."""

    async def run() -> bool:
        try:
            async for _ in engine.generate("1+1=", engine.get_default_sampling_params().clone(**fields)):
                pass
        except RequestError:
            return False
        return True

    return loop.run_until_complete(run())


def http_verdict(server: RunningServer, fields: dict[str, Any]) -> bool:
    """Whether HTTP takes it; anything but 200 and 400 is a fault."""
    body = {"vllm_xargs" if name == "extra_args" else name: value for name, value in fields.items()}
    answer = httpx2.post(server.http + "/v1/completions", json={"prompt": "1+1=", **body}, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    return answer.status_code == 200


def grpc_message(fields: dict[str, Any]) -> sampling_pb2.SamplingParams:
    """The fields as a client of the protocol writes them, unchecked."""
    message = sampling_pb2.SamplingParams()
    for name, value in fields.items():
        if name == "structured_outputs":
            ((kind, what),) = value.items()
            if kind == "choice":
                message.structured_outputs.choice.texts.extend(what)
            else:
                setattr(message.structured_outputs, kind, what)
        elif name == "repetition_detection":
            for part, number in value.items():
                setattr(message.repetition_detection, part, number)
        elif name == "allowed_token_ids":
            message.allowed_token_ids.ids.extend(value)
        elif name == "logit_bias":
            message.logit_bias.update(value)
        elif name == "extra_args":
            message.extra_args_json = json.dumps(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def grpc_verdict(server: RunningServer, fields: dict[str, Any]) -> bool:
    """Whether gRPC takes it; anything but OK and INVALID_ARGUMENT is a fault."""
    request = generation_pb2.GenerateRequest(text="1+1=", sampling_params=grpc_message(fields))
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            return False
    return True


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=REQUESTS)
def test_three_surfaces_one_verdict(
    shared_server: RunningServer, python_engine: tuple[asyncio.AbstractEventLoop, AsyncLLM], fields: dict[str, Any]
) -> None:
    if fields.get("max_tokens", 0) > 200:
        # Python cuts what the context does not hold, as vLLM does; servers refuse it.
        assert http_verdict(shared_server, fields) == grpc_verdict(shared_server, fields) is False
        return
    verdicts = {
        "python": python_verdict(*python_engine, fields),
        "http": http_verdict(shared_server, fields),
        "grpc": grpc_verdict(shared_server, fields),
    }
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
    answer = httpx2.post(server.http + "/v1/completions", json={"prompt": "1+1=", **BAD[case]}, timeout=60)
    assert answer.status_code in (400, 413), answer.text
    request = generation_pb2.GenerateRequest(text="1+1=", sampling_params=grpc_message(BAD[case]))
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as failure:
        generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)  # the latter: too large a message
    assert failure.value.code() in codes


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_everywhere(server: RunningServer, name: str, value: float) -> None:
    """Failure list 8: JSON has no NaN, and protobuf has."""
    content = json.dumps({"prompt": "1+1=", name: value})
    headers = {"Content-Type": "application/json"}
    answer = httpx2.post(server.http + "/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert not grpc_verdict(server, {name: value})
    given: dict[str, Any] = {name: value}
    with pytest.raises(RequestError):
        SamplingParams(**given)


def test_both_servers_give_the_same_text(server: RunningServer) -> None:
    request = generation_pb2.GenerateRequest(text="reverse moon:", sampling_params=grpc_message({"temperature": 0.0}))
    with grpc.insecure_channel(server.grpc) as channel:
        answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    assert answer.completions[0].text == text(server, "reverse moon:") == " noom"
