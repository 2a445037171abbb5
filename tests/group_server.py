"""A server whose engine runs in several processes on this machine, and what tests do with it."""

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.client import Client
from scripts.server_child import RunningServer, children_of
from scripts.server_child import family as family
from tests.server_process import running_server

PROMPTS: tuple[str, ...] = ("12+30=", "reverse abc: ", "The dog", "5*7=")
REQUESTS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "max_tokens": 12, "ignore_eos": True},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5, "max_tokens": 12, "ignore_eos": True},
)


def secret_flags(folder: Path) -> tuple[str, str]:
    """The flag that names a group's secret, which is written to a folder."""
    path = folder / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return "--group-secret-file", str(path)


@contextlib.contextmanager
def running_group(*flags: str, nproc: int = 2, **settings: Any) -> Iterator[RunningServer]:
    """A server of ``nproc`` processes while the block runs; settings are those of ``running_server``."""
    with running_server(*flags, launcher=("launch", "--nproc", str(nproc)), **settings) as server:
        yield server


def post(server: RunningServer, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> tuple[int, Any]:
    """Status and JSON of a response."""
    data = json.dumps(dict(body)).encode()
    request = urllib.request.Request(f"{server.http}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def text_of(server: RunningServer, path: str) -> str:
    """The body of a page."""
    with urllib.request.urlopen(f"{server.http}{path}", timeout=60) as response:
        return response.read().decode()


def answers(server: RunningServer) -> list[Any]:
    """Text, finish reason and logprobs of every prompt with every kind of request."""
    found = []
    for kind in REQUESTS:
        status, response = post(server, "/v1/completions", {"prompt": list(PROMPTS), **kind})
        assert status == 200, response
        for choice in response["choices"]:
            logprobs = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
            found.append((choice["text"], choice["finish_reason"], logprobs))
    return found


def grpc_answers(server: RunningServer) -> list[Any]:
    """What ``answers`` gives, over gRPC."""
    found = []
    with Client(server.grpc) as client:
        for kind in REQUESTS:
            outputs = [client.generate(prompt, SamplingParams(**kind)) for prompt in PROMPTS]
            found += [_answer(output) for output in outputs]
    return found


def expected_answers(llm: LLM) -> list[Any]:
    """The same of an engine in this process."""
    found = []
    for kind in REQUESTS:
        found += [_answer(output) for output in llm.generate(list(PROMPTS), SamplingParams(**kind), use_tqdm=False)]
    return found


def _answer(output: RequestOutput) -> tuple[str, str | None, Sequence[float] | None]:
    (one,) = output.outputs
    entries = zip(one.token_ids, one.logprobs or (), strict=bool(one.logprobs))
    return one.text, one.finish_reason, [each[token].logprob for token, each in entries] or None


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Equal texts and finish reasons, and logprobs but for the last bits."""
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for (*_, mine), (*_, theirs) in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert all(abs(a - b) < 1e-3 for a, b in zip(mine or (), theirs or (), strict=True))


def follower_pid(server: RunningServer, rank: int = 1) -> int:
    """Process id of a follower, a child of the launcher."""
    launcher = server.process.pid
    for child in children_of(launcher):
        if f"--node-rank={rank}\0" in Path(f"/proc/{child}/cmdline").read_text():
            return child
    raise AssertionError(f"process {launcher} has no follower of rank {rank}")


def assert_gone(pids: list[int], within_s: float) -> None:
    """All processes end within some seconds."""
    until_s = time.monotonic() + within_s
    while any(map(_runs, pids)):
        assert time.monotonic() < until_s, [pid for pid in pids if _runs(pid)]
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal."""
    os.kill(pid, number)


def assert_ends_with_its_follower(server: RunningServer) -> None:
    """Kill the follower of a server of two processes: clients are told so, and all processes end."""
    processes = family(server.process.pid)
    kill(follower_pid(server))
    status, response = post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 8})
    assert status == 503 and "rank 1 of its processes ended" in response["error"]["message"]
    assert_gone(processes[1:], within_s=20.0)
    assert server.wait() == 70
