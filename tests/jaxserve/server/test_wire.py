"""What crosses the line between front end and engine process comes out as it went in."""

import threading
from typing import Any

import pytest

from jaxserve import ConfigError, EngineDeadError, JaxserveError, MemoryPlanError, RequestError, SamplingParams
from jaxserve.api.errors import DeadlineError, OverloadedError, RequestFailedError
from jaxserve.api.metric_types import Counter, Gauge, Histogram, Metric
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams
from jaxserve.frames import HEADER, FrameError, check_length
from jaxserve.parsers import ParserNames
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.wire import (
    Cancel,
    EngineInfo,
    Failure,
    FromEngine,
    QueryResult,
    Submit,
    ToEngine,
    pack,
    sendable_error,
    unpack,
)

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)


def carried(message: ToEngine | FromEngine) -> Any:
    """The message as the other process reads it."""
    return unpack(pack(message, 1 << 20)[HEADER.size :])


def carried_error(error: BaseException) -> JaxserveError:
    return carried(Failure(sendable_error(error))).error


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
    found = carried_error(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "parameter", None) == getattr(error, "parameter", None)


def test_errors_may_hold_what_utf_8_cannot() -> None:
    error = RequestError("half of a character: \ud800", parameter="\udfff")
    found = carried_error(error)
    assert "half of a character: \\ud800" in str(found)
    assert isinstance(found, RequestError)
    assert found.parameter == "\\udfff"


def test_other_errors_become_the_nearest() -> None:
    assert type(carried_error(MemoryPlanError("no room"))) is ConfigError
    found = carried_error(KeyError())
    assert (type(found), str(found)) == (RequestFailedError, "KeyError")
    dead = EngineDeadError("the engine stopped: /secret/path")
    dead.__cause__ = OSError("/secret/path")
    assert str(carried_error(dead)) == "the engine stopped after a failure"


def test_frames_have_a_length_and_a_limit() -> None:
    message = Cancel([1, 2, 3])
    frame = pack(message, 1000)
    assert HEADER.unpack(frame[:4]) == (len(frame) - 4,)
    assert carried(message) == message
    with pytest.raises(FrameError, match=r"a message of \d+ bytes is too long; the limit is 2 bytes"):
        pack(message, 2)
    with pytest.raises(FrameError, match="a message of 4294967295 bytes is too long; the limit is 10 bytes"):
        check_length(2**32 - 1, 10)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xc7\0\x5b\4", b"\x81\xc7\0\2\5", b"\x81\x90\1"])
def test_other_bytes_are_no_message(body: bytes) -> None:
    with pytest.raises(FrameError, match=f"{len(body)} bytes are not a message"):
        unpack(body)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value",
    [object(), threading.Lock(), nested(100_000), "\ud800", 2**64],
    ids=["object", "lock", "deep", "text", "number"],
)
def test_what_cannot_be_sent_is_an_error_of_its_message(value: Any) -> None:
    with pytest.raises(FrameError, match="Submit holds a value that cannot be sent"):
        pack(Submit(1, Request(chat={"messages": value}, params=DELTA), 0.5), 1 << 30)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "request_",
    [
        Request(request_id="name", text="a", params=DELTA),
        Request(token_ids=(0,), params=DELTA),
        Request(
            token_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=None, n=3, seed=5, stop=["a", "b"], logprobs=2, logit_bias={3: 1.5}),
            priority=-4,
            cache_salt="salt",
            timeout_s=2.5,
            is_strict_length=False,
            truncate_prompt_tokens=-1,
            add_special_tokens=False,
        ),
        Request(
            chat={"messages": [{"role": "user", "content": "é"}], "tools": None},
            params=SamplingParams(
                structured_outputs=StructuredOutputsParams(json={"type": "object"}),
                repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
                extra_args={"a": 1},
            ),
        ),
        Request(text="a", params=DELTA, pooling=PoolingParams(pooling="mean", normalize=False)),
    ],
    ids=range(5),
)
def test_requests_come_through(request_: Request) -> None:
    assert carried(Submit(7, request_, 0.5)) == Submit(7, request_, 0.5)


def test_the_engine_s_description_comes_through() -> None:
    info = EngineInfo(
        model_pb2.Model(root="demo", max_model_len=256),
        {"temperature": 0.5},
        9,
        {"default": "{{ 1 }}"},
        None,
        {"bos_token": "<s>"},
        ParserNames("qwen3", "hermes"),
    )
    assert carried(info) == info


@pytest.mark.parametrize(
    "content",
    [{"a": [1, {2: "b"}]}, {12: [1, 2]}, {"": []}, (1, (2,)), [None, True, 0.5, float("inf"), b"\xff"]],
    ids=range(5),
)
def test_plain_values_stay_what_they_are(content: Any) -> None:
    assert carried(QueryResult(1, content)).result == content


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xff", b"\xc1", b"\x81\xd4\x7f\x00\x90", b"\x81\xd4\x00\x00\x90"], ids=range(5)
)
def test_bytes_that_are_no_message_are_an_error(body: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        unpack(body)


# ---------------------------------------------------------------- metrics


def test_metrics_come_through() -> None:
    metrics: list[Metric] = [
        Counter("jaxserve:steps", {}, 3),
        Gauge("jaxserve:usage", {"a": "b"}, 0.25),
        Histogram("jaxserve:time", {}, 2, 1.5, {"1.0": 1, "+Inf": 2}),
    ]
    assert carried(QueryResult(1, metrics)).result == metrics
