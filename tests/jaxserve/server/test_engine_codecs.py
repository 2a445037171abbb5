"""What crosses the line between front end and engine process comes out as it went in."""

import dataclasses
from typing import Any

import pytest

from jaxserve import ConfigError, EngineDeadError, JaxserveError, MemoryPlanError, RequestError, SamplingParams
from jaxserve.errors import DeadlineError, OverloadedError, RequestFailedError
from jaxserve.metric_types import Counter, Gauge, Histogram, Metric
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import PromptFit
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.server.engine_frames import HEADER, FrameError, checked_length, error_from_proto, error_to_proto, packed
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.metric_codec import metrics_from_json, metrics_to_json
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.submit_codec import chat_of, fit_of, params_of, submit_to_proto
from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams

SCHEMA = StructuredOutputsParams(json={"type": "object"})
REPETITION = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)


def carried(request: EngineRequest) -> engine_pb2.Submit:
    """The message as the engine process reads it."""
    return engine_pb2.Submit.FromString(submit_to_proto(request, 7, "name").SerializeToString())


# ---------------------------------------------------------------- errors and frames


@pytest.mark.parametrize(
    "error",
    [
        RequestError("bad", parameter="n", value=3),
        RequestError("bad"),
        RequestFailedError("failed"),
        OverloadedError("full"),
        DeadlineError("late"),
        EngineDeadError("dead"),
        ConfigError("wrong"),
    ],
)
def test_errors_keep_class_text_and_parameter(error: JaxserveError) -> None:
    found = error_from_proto(engine_pb2.Error.FromString(error_to_proto(error).SerializeToString()))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "parameter", None) == getattr(error, "parameter", None)


def test_errors_may_hold_what_utf_8_cannot() -> None:
    error = RequestError("half of a character: \ud800", parameter="\udfff")
    found = error_from_proto(engine_pb2.Error.FromString(error_to_proto(error).SerializeToString()))
    assert "half of a character: \\ud800" in str(found)
    assert isinstance(found, RequestError)
    assert found.parameter == "\\udfff"


def test_other_errors_become_the_nearest() -> None:
    assert type(error_from_proto(error_to_proto(MemoryPlanError("no room")))) is ConfigError
    found = error_from_proto(error_to_proto(KeyError()))
    assert (type(found), str(found)) == (RequestFailedError, "KeyError")
    assert type(error_from_proto(engine_pb2.Error(message="x"))) is RequestFailedError


def test_frames_have_a_length_and_a_limit() -> None:
    message = engine_pb2.Cancel(ids=[1, 2, 3])
    frame = packed(message, 100)
    assert HEADER.unpack(frame[:4]) == (len(frame) - 4,)
    assert engine_pb2.Cancel.FromString(frame[4:]) == message
    with pytest.raises(FrameError, match="a frame may have 2 bytes, got 5"):
        packed(message, 2)
    with pytest.raises(FrameError, match="a frame may have 10 bytes, got 4294967295"):
        checked_length(2**32 - 1, 10)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, n=3, seed=5, stop=["a", "b"], logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, logit_bias={3: 1.5}, allowed_token_ids=[1, 2], bad_words=["x"], min_tokens=2),
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json={"type": "object"}), extra_args={"a": 1}, detokenize=False
        ),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]), skip_reading_prefix_cache=False),
        SamplingParams(repetition_detection=REPETITION, thinking_token_budget=4),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_sampling_parameters_come_through(params: SamplingParams, kind: RequestOutputKind) -> None:
    message = carried(EngineRequest(text="a", params=params.clone(output_kind=kind)))
    found = params_of(message)
    assert isinstance(found, SamplingParams)
    for field in dataclasses.fields(found):
        if field.name != "structured_outputs":
            expected = kind if field.name == "output_kind" else getattr(params, field.name)
            assert getattr(found, field.name) == expected, field.name
    kinds = [None if one.structured_outputs is None else one.structured_outputs.kind for one in (found, params)]
    assert kinds[0] == kinds[1]


def test_prompts_and_options_come_through() -> None:
    message = carried(
        EngineRequest(
            token_ids=(1, 2, 3),
            params=DELTA,
            priority=-4,
            cache_salt="salt",
            timeout_s=2.5,
            is_strict_length=False,
            truncate_prompt_tokens=-1,
            add_special_tokens=False,
        )
    )
    assert list(message.token_ids.ids) == [1, 2, 3]
    assert (message.id, message.request_id, message.priority, message.cache_salt) == (7, "name", -4, "salt")
    assert message.timeout_s == 2.5
    assert fit_of(message) == PromptFit(is_strict=False, truncate_prompt_tokens=-1, add_special_tokens=False)
    plain = carried(EngineRequest(text="a", params=DELTA))
    assert plain.WhichOneof("prompt") == "text"
    assert not plain.HasField("timeout_s") and not plain.HasField("cache_salt")
    assert fit_of(plain) == PromptFit(is_strict=True)
    chat = {"messages": [{"role": "user", "content": "é"}], "tools": None, "add_generation_prompt": False}
    assert chat_of(carried(EngineRequest(chat=chat, params=DELTA)).chat.arguments_json) == chat


def test_an_empty_list_of_token_ids_is_a_prompt() -> None:
    assert carried(EngineRequest(token_ids=(), params=DELTA)).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize("pooling", [PoolingParams(), PoolingParams(pooling="mean", normalize=False)])
def test_pooling_comes_through(pooling: PoolingParams) -> None:
    assert params_of(carried(EngineRequest(text="a", params=DELTA, pooling=pooling))) == pooling


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EngineRequest(params=DELTA), "exactly one of text, token_ids and chat; got 0"),
        (EngineRequest(text="a", token_ids=(1,), params=DELTA), "exactly one of text, token_ids and chat; got 2"),
        (EngineRequest(text="\ud800", params=DELTA), "the request has a wrong value"),
        (EngineRequest(token_ids=(1, -1), params=DELTA), "token id -1 is out of vocabulary"),
        (EngineRequest(token_ids=(2**63,), params=DELTA), "is out of vocabulary"),
        (EngineRequest(text="a", priority=2**63, params=DELTA), "the request has a wrong value"),
        (EngineRequest(chat={"messages": ["\ud800"]}, params=DELTA), "the conversation is not JSON"),
        (EngineRequest(chat={"messages": [object()]}, params=DELTA), "the conversation is not JSON"),
        (EngineRequest(chat={"messages": [float("nan")]}, params=DELTA), "the conversation is not JSON"),
    ],
    ids=range(9),
)
def test_what_no_message_can_hold_is_refused(request_: EngineRequest, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        submit_to_proto(request_, 1, "name")


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "3"])
def test_conversations_are_objects(text: str) -> None:
    with pytest.raises(RequestError, match=r"messages is not valid JSON|arguments must be an object, got int"):
        chat_of(text)


# ---------------------------------------------------------------- metrics


def test_metrics_come_through() -> None:
    metrics: list[Metric] = [
        Counter("jaxserve:steps", {}, 3),
        Gauge("jaxserve:usage", {"a": "b"}, 0.25),
        Histogram("jaxserve:time", {}, 2, 1.5, {"1.0": 1, "+Inf": 2}),
    ]
    values: Any = metrics_to_json(metrics)
    assert metrics_from_json(values) == metrics
