"""Clients that stop to read: cut off, and nobody else is the worse for it (failure list 5)."""

import concurrent.futures
import contextlib

import grpc
import pytest

from jaxserve.server.proto.jaxserve.v1 import generation_pb2_grpc
from scripts.server_child import RunningServer
from tests.faults.talk import LONG, ended, long_call, post, raw_request, total, wait_until

LARGE = {"n": 4, "temperature": 1.0, "logprobs": 20, "max_tokens": 200}
"""Makes answers of hundreds of kilobytes."""
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
"""gRPC reads for its user, unless told otherwise, until megabytes lie there."""


def assert_ends_and_delays_nobody(server: RunningServer) -> None:
    """The request that nobody reads leaves the server, and answers meanwhile are those of an idle one."""
    assert total(server, "jaxserve:requests_in_flight") == 1
    body = {"prompt": "reverse moon:", "ignore_eos": True, "max_tokens": 40, "temperature": 0, "logprobs": 3}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [one.result().json() for one in [pool.submit(post, server, **body) for _ in range(6)]]
    wait_until(lambda: total(server, "jaxserve:requests_in_flight") == 0, "the client that does not read is cut off")
    alone = post(server, **body).json()
    assert [one["choices"] for one in answers] == [alone["choices"]] * len(answers)


def test_a_client_that_stops_to_read_is_ended_and_delays_nobody(server: RunningServer) -> None:
    """Failure list 5: the connection is reset, long before the answer is whole."""
    body = {"prompt": "1+1=", "stream": True, **LONG, **LARGE}
    with contextlib.closing(raw_request(server, receive_bytes=4096, **body)) as stalled:
        wait_until(lambda: total(server, "jaxserve:requests_in_flight") == 1, "the request has begun")
        assert_ends_and_delays_nobody(server)
        assert "received nothing for 3 s" in server.log.read_text()
        with pytest.raises(ConnectionResetError):
            while stalled.recv(1 << 16):
                pass


def test_a_grpc_client_that_stops_to_read_is_told_why_it_was_ended(server: RunningServer) -> None:
    """Failure list 5: a status comes behind what was sent before."""
    num_cut = ended(server, "cancelled")
    with grpc.insecure_channel(server.grpc, SMALL_WINDOW) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(long_call(**LARGE))
        assert next(call).completions
        assert_ends_and_delays_nobody(server)
        assert ended(server, "cancelled") == num_cut + 1
        with pytest.raises(grpc.RpcError, match="did not read the response for 3 s") as failure:
            list(call)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
