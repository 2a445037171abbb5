"""Bytes that are no requests: answered or dropped, and the server lives (failure list 7)."""

import os
import random
import socket
from urllib.parse import urlsplit

import grpc
import httpx2
import pytest

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from scripts.server_child import RunningServer

HTTP2_SETTINGS = b"\x04"
"""The kind of the frame that each side of HTTP/2 sends first."""


def send(address: tuple[str, int], content: bytes, *, hangs_up: bool = True) -> bytes:
    """What comes back, at most 64 KiB."""
    with socket.create_connection(address, timeout=10) as connection:
        try:
            connection.sendall(content)
            if hangs_up:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return b""


def addresses(server: RunningServer) -> dict[str, tuple[str, int]]:
    """Host and port of each listener."""
    parts = {
        "http": urlsplit(server.http),
        "grpc": urlsplit(f"//{server.grpc}"),
        "admin": urlsplit(f"//{server.admin}"),
    }
    return {name: (part.hostname or "", part.port or 0) for name, part in parts.items()}


@pytest.mark.parametrize("listener", ["http", "grpc", "admin"])
def test_garbage_kills_nothing(server: RunningServer, listener: str) -> None:
    generator = random.Random(7)
    address = addresses(server)[listener]
    pieces = [
        b"",
        b"\0" * 1000,
        os.urandom(5000),
        b"GET / HTTP/1.1\r\n" * 50,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(100),
    ]
    pieces += [generator.randbytes(generator.randrange(1, 400)) for _ in range(20)]
    for piece in pieces:
        answer = send(address, piece)
        if listener == "http":
            assert answer[:12] in (b"", b"HTTP/1.1 400")
        else:
            assert answer[3:4] in (b"", HTTP2_SETTINGS)


def test_a_truncated_body_and_a_lying_length(server: RunningServer) -> None:
    address = addresses(server)["http"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    assert send(address, head + b'100\r\n\r\n{"prompt"') == b""
    assert b" 400 " in send(address, head + b"-5\r\n\r\n", hangs_up=False)
    assert b" 400 " in send(address, head + b"99999999999999999999\r\n\r\n{}", hangs_up=False)
    assert b" 400 " in send(address, head + b"2\r\n\r\n{]", hangs_up=False)


def test_headers_and_bodies_are_bounded(server: RunningServer) -> None:
    answer = httpx2.post(
        server.http + "/v1/completions", content=b"x" * (5 << 20), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == 413
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    assert send(addresses(server)["http"], head + b"X: y\r\n" * 12_000, hangs_up=False)[:12] == b"HTTP/1.1 431"
    # The connection may end before all of it is sent.
    assert send(addresses(server)["http"], head + b"X: y\r\n" * 200_000)[:12] in (b"HTTP/1.1 431", b"")


def test_messages_and_metadata_are_bounded(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            stub.Generate(generation_pb2.GenerateRequest(text="x" * (5 << 20)), timeout=30)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as failure:
            stub.Generate(generation_pb2.GenerateRequest(text="1+1="), timeout=30, metadata=[("x", "y" * (1 << 20))])
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_unknown_call_and_a_message_that_is_none(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        unknown = channel.unary_unary("/jaxserve.v1.GenerationService/Nothing")
        with pytest.raises(grpc.RpcError) as failure:
            unknown(b"", timeout=30)
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for method in ("Generate", "StreamGenerate"):
            known = channel.unary_stream(f"/jaxserve.v1.GenerationService/{method}")
            for message in (b"\xff\xff\xff", b"\x12\x05cut", b""):  # the last is one that asks for nothing
                with pytest.raises(grpc.RpcError) as failure:
                    list(known(message, timeout=30))
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_nested_json_is_refused(server: RunningServer, depth: int) -> None:
    for field in ("prompt", "response_format", "anything"):
        content = f'{{"prompt": "1", "{field}": {"[" * depth}{"]" * depth}}}'
        answer = httpx2.post(
            server.http + "/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert answer.status_code == 400
