"""Clients that leave, stop to read, or are too late: pages come back within a step (failure list 1 to 3, 5, 6)."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx2
import pytest

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from scripts.server_child import RunningServer
from tests.faults.talk import LONG, metrics, post, stream, text, total, wait_until_idle

PREFILL = {"prompt": "sort 9 8 7:" * 8, **LONG, "max_tokens": 140}  # takes more than a step


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    """Greedy and long, unless told otherwise."""
    return sampling_pb2.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 140, **fields})


def long_call(prompt: str = "1+1=") -> generation_pb2.StreamGenerateRequest:
    """A stream that goes on."""
    request = generation_pb2.GenerateRequest(text=prompt, sampling_params=sampling())
    return generation_pb2.StreamGenerateRequest(request=request)


def raw_request(server: RunningServer, **body: Any) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    address = urlsplit(server.http)
    assert address.hostname is not None and address.port is not None
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(http_request(body))
    return connection


def http_request(body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content


def wait_for_running(server: RunningServer, count: int) -> None:
    """Waits until so many requests are in the engine."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        found = metrics(server)
        names = ("jaxserve:num_requests_running", "jaxserve:num_requests_waiting")
        if sum(value for key, value in found.items() if key.partition("{")[0] in names) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"there were never {count} requests")


def cancelled(server: RunningServer) -> float:
    """Requests whose reader went away, so far."""
    return total(server, "jaxserve:requests_finished_total", 'outcome="cancelled"')


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode", "last token"])
@pytest.mark.parametrize("surface", ["http stream", "http unary", "grpc"])
def test_a_client_that_leaves_gives_its_pages_back(server: RunningServer, surface: str, phase: str) -> None:
    """Failure list 1: leaving in each phase, on each surface."""
    before = cancelled(server)
    wait_until_idle(server)
    with contextlib.ExitStack() as stack:
        if phase == "queue":  # four sequences fill the engine
            for _ in range(4):
                stack.enter_context(contextlib.closing(raw_request(server, prompt="1+1=", stream=True, **LONG)))
            wait_for_running(server, 4)
        body = PREFILL if phase == "prefill" else {"prompt": "1+1=", **LONG}
        if phase == "last token":
            body = {**body, "max_tokens": 2}
        if surface == "grpc":
            _leave_grpc(server, str(body["prompt"]), reads=phase == "decode")
        else:
            connection = raw_request(server, stream=surface == "http stream", **body)
            if phase == "decode" and surface == "http stream":
                connection.recv(64)
            elif phase == "decode":
                time.sleep(0.05)
            connection.close()
        assert total(server, "jaxserve:kv_cache_usage_perc") <= 1
    wait_until_idle(server)
    if phase != "last token":  # that one may have been answered before the client left
        until_s = time.monotonic() + 20
        while cancelled(server) == before:
            assert time.monotonic() < until_s, "the request was not counted as cancelled"
            time.sleep(0.02)


def _leave_grpc(server: RunningServer, prompt: str, *, reads: bool) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(long_call(prompt))
        list(call.initial_metadata())  # the request is admitted
        if reads:
            next(call)
        else:
            time.sleep(0.05)  # and the engine has it
        call.cancel()


def test_a_deadline_in_the_queue_runs_no_prefill(server: RunningServer) -> None:
    """Failure list 2."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(contextlib.closing(raw_request(server, prompt="1+1=", stream=True, **LONG)))
        wait_for_running(server, 4)
        before = total(server, "jaxserve:prompt_tokens_total")
        with grpc.insecure_channel(server.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError) as failure:
                stub.Generate(long_call("reverse moon:").request, timeout=0.05)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        late = httpx2.post(
            server.http + "/v1/completions",
            json={"prompt": "reverse moon:", **LONG},
            headers={"X-Request-Timeout": "0.05"},
            timeout=60,
        )
        assert late.status_code == 504
        assert total(server, "jaxserve:prompt_tokens_total") == before


def test_a_deadline_while_it_decodes_ends_the_stream(server: RunningServer) -> None:
    """Failure list 3."""

    async def run(limit_s: float) -> tuple[int, set[grpc.StatusCode]]:
        """Messages and ends of more streams than are done within the limit."""
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            count, codes = 0, set[grpc.StatusCode]()
            for call in [stub.StreamGenerate(long_call(), timeout=limit_s) for _ in range(16)]:
                try:
                    async for _ in call:
                        count += 1
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
            return count, codes

    for limit_s in (0.4, 0.8, 1.6, 3.2):  # a busy machine may not even begin within the first
        count, codes = asyncio.run(run(limit_s))
        if count:
            break
        wait_until_idle(server)
    assert count > 0
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}


def test_a_client_that_stops_to_read_is_ended_and_delays_nobody(server: RunningServer) -> None:
    """Failure list 5: answers are made large by logprobs of many tokens."""
    address = urlsplit(server.http)
    assert address.port is not None
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.connect((address.hostname, address.port))
    body = {"prompt": "1+1=", "stream": True, "logprobs": 20, "prompt_logprobs": None, "n": 4, **LONG, "temperature": 1}
    stalled.sendall(http_request(body))
    for _ in range(4):
        assert text(server, "reverse moon:", max_tokens=8) == " noom"
    wait_until_idle(server)
    until_s = time.monotonic() + 20
    while total(server, "jaxserve:requests_in_flight") and time.monotonic() < until_s:
        time.sleep(0.1)
    assert total(server, "jaxserve:requests_in_flight") == 0
    stalled.close()


CRASHING_CLIENT = """
import sys, httpx2
body = {"prompt": "1+1=", "stream": True, "max_tokens": 200, "ignore_eos": True}
with httpx2.stream("POST", sys.argv[1], json=body) as r:
    for line in r.iter_lines():
        print(line, flush=True)
"""


def test_a_client_that_is_killed_gives_its_pages_back(server: RunningServer) -> None:
    """Failure list 6: nobody closes the connection but the kernel."""
    command = [sys.executable, "-c", CRASHING_CLIENT, server.http + "/v1/completions"]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            for _ in range(3)
        ]
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
            client.send_signal(signal.SIGKILL)
    wait_until_idle(server)


def test_readers_who_leave_midway_do_not_change_what_others_get(server: RunningServer) -> None:
    """Neighbours of cancelled requests get what they would alone."""
    alone = text(server, "reverse moon:", ignore_eos=True, max_tokens=40)
    for _ in range(5):
        with stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            answer = post(server, prompt="reverse moon:", temperature=0, ignore_eos=True, max_tokens=40)
        assert answer.json()["choices"][0]["text"] == alone
