"""Clients that leave or are too late: pages come back within a step (failure list 1 to 3, 6)."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx2
import pytest

from jaxserve.server.proto.jaxserve.v1 import generation_pb2_grpc
from scripts.server_child import REPOSITORY, RunningServer
from tests.faults.half_open import relay
from tests.faults.kinds import Caller
from tests.faults.steps import StepGate, closed_gate, one_more_step
from tests.faults.talk import (
    LONG,
    ended,
    long_call,
    post,
    raw_request,
    stream,
    text,
    total,
    wait_until,
)

SURFACES = ("http stream", "http unary", "grpc stream", "grpc unary")
"""All that a ``Caller`` can use."""
PREFILL = "sort 9 8 7:" * 8
"""Takes more than a step, where the prefix cache has nothing of it."""
PHASES: dict[str, tuple[str, int, int]] = {
    "prefill": (PREFILL, 140, 1),
    "decode": ("1+1=", 140, 4),
    "last": ("1+1=", 2, 1),
}
"""What is asked, for how many tokens, and the steps that have run when the client leaves."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("surface", SURFACES)
def test_a_client_that_leaves_gives_its_pages_back(
    server: RunningServer, switches: Path, surface: str, phase: str
) -> None:
    """Failure list 1: leaving in each phase, on each surface."""
    prompt, max_tokens, num_steps = PHASES[phase]
    with one_more_step(server, switches, "cancelled") as gate:
        caller = Caller(server, surface, prompt, max_tokens)
        gate.let_through(num_steps)
        if phase == "decode" and surface.endswith("stream"):
            caller.read()
        caller.leave()


def test_the_prompt_of_the_tests_takes_more_than_a_step(server: RunningServer) -> None:
    """Else nobody would leave in its prefill."""
    assert post(server, "/tokenize", prompt=PREFILL).json()["count"] > 64


@pytest.mark.parametrize("surface", SURFACES)
def test_a_client_that_leaves_the_queue_leaves_it_within_a_step(
    server: RunningServer, switches: Path, surface: str
) -> None:
    """Failure list 1: others hold all places meanwhile, and go on."""
    before = ended(server, "cancelled")
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(closed_gate(server, switches))
        fill(server, gate, stack)
        caller = Caller(server, surface)
        gate.let_through_until(lambda: waiting(server) == 1, "a request is in the queue")
        caller.leave()
        wait_until(lambda: ended(server, "cancelled") == before + 1, "the request is counted as cancelled")
        assert (running(server), waiting(server)) == (4, 1)
        gate.let_through()
        assert (running(server), waiting(server)) == (4, 0)


def running(server: RunningServer) -> float:
    """Sequences that hold a place."""
    return total(server, "jaxserve:num_requests_running")


def waiting(server: RunningServer) -> float:
    """Sequences that wait for one."""
    return total(server, "jaxserve:num_requests_waiting")


def fill(server: RunningServer, gate: StepGate, stack: contextlib.ExitStack) -> None:
    """Gives all four places away, until the stack is unwound."""
    for _ in range(4):
        stack.enter_context(contextlib.closing(raw_request(server, prompt="1+1=", stream=True, **LONG)))
    gate.let_through_until(lambda: running(server) == 4, "four requests run")
    gate.let_through(3)  # their prompts are done


def test_a_deadline_in_the_queue_runs_no_prefill(server: RunningServer, switches: Path) -> None:
    """Failure list 2."""
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(closed_gate(server, switches))
        fill(server, gate, stack)
        before = total(server, "jaxserve:prompt_tokens_total")
        late = ended(server, "deadline")
        with grpc.insecure_channel(server.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError) as failure:
                stub.Generate(long_call("reverse moon:").request, timeout=0.2)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        answer = httpx2.post(
            server.http + "/v1/completions",
            json={"prompt": "reverse moon:", **LONG},
            headers={"X-Request-Timeout": "0.2"},
            timeout=60,
        )
        assert answer.status_code == 504
        gate.let_through(4)
        assert (running(server), waiting(server)) == (4, 0)
        assert total(server, "jaxserve:prompt_tokens_total") == before
        assert ended(server, "deadline") - late in (1, 2)  # gRPC's own may pass before the call has come


class NotBegunError(Exception):
    """A request's time was up before its second token."""


def test_a_deadline_while_it_decodes_ends_the_stream(server: RunningServer, switches: Path) -> None:
    """Failure list 3."""
    for limit_s in (1.0, 4.0, 16.0):  # a busy machine may not even begin within the first
        with contextlib.suppress(NotBegunError):
            code = code_of_a_late_stream(server, switches, limit_s)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            return
    raise AssertionError("no request began in time")


def code_of_a_late_stream(server: RunningServer, switches: Path, limit_s: float) -> grpc.StatusCode:
    """How a stream ends that is in its middle when its time is up.

    Raises:
        NotBegunError: It is not.
    """
    wait_until(lambda: total(server, "jaxserve:requests_in_flight") == 0, "an earlier try is over")
    with grpc.insecure_channel(server.grpc) as channel, one_more_step(server, switches, "deadline") as gate:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(long_call(), timeout=limit_s)
        try:
            if not gate.let_through(3, still=call.is_active):
                raise NotBegunError
            next(call)
        except grpc.RpcError as error:
            raise NotBegunError from error
        return call.code()


CRASHING = {
    "http": """
import sys, httpx2
body = {"prompt": "1+1=", "stream": True, "max_tokens": 200, "ignore_eos": True}
with httpx2.stream("POST", "http://" + sys.argv[1] + "/v1/completions", json=body) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
""",
    "grpc": """
import sys
from jaxserve import SamplingParams
from jaxserve.client import Client
with Client(sys.argv[1]) as client:
    for output in client.stream("1+1=", SamplingParams(max_tokens=200, ignore_eos=True)):
        print(output.request_id, flush=True)
""",
}
"""Clients that say when something came."""


@pytest.mark.parametrize("surface", CRASHING)
def test_a_client_that_is_killed_gives_its_pages_back(server: RunningServer, switches: Path, surface: str) -> None:
    """Failure list 6: nobody closes the connection but the kernel."""
    target = server.grpc if surface == "grpc" else server.http.removeprefix("http://")
    command = [sys.executable, "-c", CRASHING[surface], target]
    with one_more_step(server, switches, "cancelled") as gate:
        client = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
        with client:
            gate.let_through(4)
            assert client.stdout is not None
            assert client.stdout.readline()
            client.send_signal(signal.SIGKILL)


def test_a_peer_that_is_gone_without_a_word_is_found(server: RunningServer, switches: Path) -> None:
    """Failure list 6: no byte comes and no connection ends, so only gRPC's pings tell.

    The engine stands still, so that the request can end in no other way.
    """
    with relay(server.grpc) as between, one_more_step(server, switches, "cancelled") as gate:
        channel = grpc.insecure_channel(between.target)
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(long_call())
        gate.let_through(3)
        next(call)
        between.stop_passing()
    channel.close()


def test_readers_who_leave_midway_do_not_change_what_others_get(server: RunningServer) -> None:
    """Neighbours of cancelled requests get what they would alone."""
    alone = text(server, "reverse moon:", ignore_eos=True, max_tokens=40)
    for _ in range(5):
        with stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            answer = post(server, prompt="reverse moon:", temperature=0, ignore_eos=True, max_tokens=40)
        assert answer.json()["choices"][0]["text"] == alone
