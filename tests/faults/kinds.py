"""Requests of each kind at once, and how they end: over HTTP and gRPC, streamed and whole."""

import concurrent.futures
import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from scripts.server_child import RunningServer
from tests.faults.talk import LONG, health, long_call, post, raw_request, sampling, total, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WHOLE = ["length", "length", "FINISH_REASON_LENGTH", "FINISH_REASON_LENGTH"]
"""How requests end that get all they ask for."""
FAILED = ["503", "503", "UNAVAILABLE", "UNAVAILABLE"]
"""How those end whose engine is gone, or that a server has no time for."""


def http_stream_end(server: RunningServer, max_tokens: int) -> str:
    """The finish reason of a stream, or the code of its error."""
    answer = post(server, prompt="1+1=", stream=True, **{**LONG, "max_tokens": max_tokens})
    if answer.status_code != 200:  # before the first event
        return str(answer.status_code)
    *_, event, _ = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
    last = json.loads(event)
    return str(last["error"]["code"]) if "error" in last else last["choices"][0]["finish_reason"]


def http_unary_end(server: RunningServer, max_tokens: int) -> str:
    """The finish reason of a whole answer, or its status."""
    answer = post(server, prompt="1+1=", **{**LONG, "max_tokens": max_tokens})
    return answer.json()["choices"][0]["finish_reason"] if answer.status_code == 200 else str(answer.status_code)


def grpc_stream_end(server: RunningServer, max_tokens: int) -> str:
    """The finish reason of a stream, or its status."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            *_, last = stub.StreamGenerate(long_call(max_tokens=max_tokens))
        except grpc.RpcError as error:
            return _status(error)
    return generation_pb2.FinishReason.Name(last.completions[0].finish_reason)


def grpc_unary_end(server: RunningServer, max_tokens: int) -> str:
    """The finish reason of a whole answer, or its status."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            answer = stub.Generate(long_call(max_tokens=max_tokens).request)
        except grpc.RpcError as error:
            return _status(error)
    return generation_pb2.FinishReason.Name(answer.completions[0].finish_reason)


def _status(error: grpc.RpcError) -> str:
    """Its name; who should try again is also told when."""
    call: Any = error
    if call.code() is grpc.StatusCode.UNAVAILABLE:
        status = rpc_status.from_call(call)
        assert status is not None
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    return call.code().name


REQUESTS: tuple[Callable[[RunningServer, int], str], ...] = (
    http_stream_end,
    http_unary_end,
    grpc_stream_end,
    grpc_unary_end,
)


@contextlib.contextmanager
def in_flight(server: RunningServer, max_tokens: int) -> Iterator[Callable[[], list[str]]]:
    """Requests of each kind that have begun; gives what waits for their ends."""
    pool = concurrent.futures.ThreadPoolExecutor(len(REQUESTS))
    try:
        ends = [pool.submit(request, server, max_tokens) for request in REQUESTS]
        wait_until(lambda: total(server, "jaxserve:requests_in_flight") == len(REQUESTS), "all requests have begun")
        yield lambda: [one.result() for one in ends]
    finally:
        pool.shutdown(wait=False)  # where a test fails they may end with the server only


def assert_takes_no_requests(server: RunningServer, why: str) -> None:
    """Health says so, and new requests are told to try again later, or elsewhere."""
    wait_until(lambda: httpx2.get(server.http + "/health", timeout=60).status_code == 503, "health has turned")
    assert health(server) == NOT_SERVING
    refused = post(server, prompt="1+1=")
    assert refused.status_code == 503
    assert why in refused.json()["error"]["message"]
    assert "Retry-After" in refused.headers
    assert_grpc_takes_no_requests(server, why)


def assert_grpc_takes_no_requests(server: RunningServer, why: str) -> None:
    """A request is refused with the reason, and with a time to try again."""
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError, match=why) as failure:
        generation_pb2_grpc.GenerationServiceStub(channel).Generate(long_call().request, timeout=60)
    assert _status(failure.value) == "UNAVAILABLE"


class Caller:
    """A client with a request that it can leave.

    Args:
        server: Whom it asks.
        surface: How.
        prompt: What.
        max_tokens: So much of it.
    """

    def __init__(self, server: RunningServer, surface: str, prompt: str = "1+1=", max_tokens: int = 140):
        kind, _, way = surface.partition(" ")
        salt = uuid.uuid4().hex
        if kind == "http":
            body = {**LONG, "prompt": prompt, "max_tokens": max_tokens, "cache_salt": salt, "stream": way == "stream"}
            connection = raw_request(server, **body)
            self.leave: Callable[[], Any] = connection.close
            self.read: Callable[[], Any] = lambda: connection.recv(64)
            return
        channel = grpc.insecure_channel(server.grpc)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            text=prompt, sampling_params=sampling(max_tokens=max_tokens), cache_salt=salt
        )
        if way == "stream":
            call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request))
        else:
            call = stub.Generate.future(request)
        self.read = lambda: next(call)
        self.leave = lambda: (call.cancel(), channel.close())
