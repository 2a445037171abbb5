"""What fault tests say to a server, and ask it."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, sampling_pb2
from scripts.server_child import RunningServer

LONG = {"ignore_eos": True, "max_tokens": 200, "temperature": 0}
"""A request that goes on until the context is almost full."""


def post(
    server: RunningServer, path: str = "/v1/completions", timeout_s: float = 120.0, **body: Any
) -> httpx2.Response:
    """The answer to a request."""
    return httpx2.post(server.http + path, json=body, timeout=timeout_s)


def text(server: RunningServer, prompt: str, **body: Any) -> str:
    """The text that a prompt gets at temperature 0."""
    answer = post(server, prompt=prompt, **{"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def assert_serves(server: RunningServer) -> None:
    """The server answers, and right."""
    assert text(server, "12+30=").startswith("42")


@contextlib.contextmanager
def stream(server: RunningServer, path: str = "/v1/completions", **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Events of a streamed answer; leaving the block closes the connection."""
    with (
        httpx2.Client(timeout=120.0) as client,
        client.stream("POST", server.http + path, json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200, answer.read()

        def events() -> Iterator[dict[str, Any]]:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

        yield events()


def http_request(body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content


def raw_request(server: RunningServer, receive_bytes: int | None = None, **body: Any) -> socket.socket:
    """A connection that has sent a request and reads nothing; the system may take in so much meanwhile."""
    address = urlsplit(server.http)
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((address.hostname, address.port))
    connection.sendall(http_request(body))
    return connection


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    """Greedy and long, unless told otherwise."""
    return sampling_pb2.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 140, **fields})


def long_call(prompt: str = "1+1=", **fields: Any) -> generation_pb2.StreamGenerateRequest:
    """A stream that goes on."""
    request = generation_pb2.GenerateRequest(text=prompt, sampling_params=sampling(**fields))
    return generation_pb2.StreamGenerateRequest(request=request)


def health(server: RunningServer, service: str = "jaxserve.v1.GenerationService") -> int:
    """What gRPC's health service says."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(request, timeout=10).status


def metrics(server: RunningServer) -> dict[str, float]:
    """All series of ``/metrics``, each by its name with labels."""
    found = httpx2.get(server.http + "/metrics", timeout=60.0)
    assert found.status_code == 200, found.text
    lines = [line for line in found.text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def total(server: RunningServer, name: str, *labels: str) -> float:
    """The sum over a metric's series that have the labels, such as ``finished_reason="abort"``."""
    series = metrics(server)
    matching = [
        value for key, value in series.items() if key.partition("{")[0] == name and all(one in key for one in labels)
    ]
    assert matching, f"no series of {name} with {labels}"
    return sum(matching)


def ended(server: RunningServer, outcome: str) -> float:
    """Requests that have ended so."""
    return total(server, "jaxserve:requests_finished_total", f'outcome="{outcome}"')


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Waits until something is so; fails where that takes longer than anything should."""
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, f"after {limit_s:g} s it is still not so that {what}"
        time.sleep(0.005)


def wait_until_idle(server: RunningServer, limit_s: float = 30.0) -> None:
    """Waits until nothing runs or waits and no page is held; fails where that takes longer."""
    names = [f"jaxserve:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    until_s = time.monotonic() + limit_s
    found: dict[str, float] = {}
    while time.monotonic() < until_s:
        found = {name: total(server, name) for name in names}
        if not any(found.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"the server is not idle after {limit_s:g} s: {found}")
