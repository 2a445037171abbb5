"""A server ends when it cannot serve any more, and serves on although nobody reads its log."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from scripts.server_child import REPOSITORY
from tests.faults.conftest import faulty_environment
from tests.faults.kinds import NOT_SERVING
from tests.faults.steps import slow_steps
from tests.faults.talk import health, wait_until
from tests.hooks import EXIT_ENGINE_DEAD, injected
from tests.server_process import running_server

LOSING_HTTP = """
import sys
import uvicorn
from jaxserve.cli import main

async def fail(self, counter):
    if counter == 5:
        raise RuntimeError("lost")
    return False

uvicorn.Server.on_tick = fail
main(sys.argv[1:])
"""


def serve_until_end(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a server whose engine does not get ready, until it ends by itself."""
    (folder / injected.START_HANGS).touch()
    ports = ("--port", "0", "--grpc-port", "-1", "--admin-port", "-1")
    environment = {**os.environ, **faulty_environment(folder)}
    arguments = [sys.executable, *command, *ports]
    return subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def test_the_process_ends_if_the_http_loop_ends(tmp_path: Path) -> None:
    ended = serve_until_end(tmp_path, "-c", LOSING_HTTP, "serve")
    assert ended.returncode == EXIT_ENGINE_DEAD
    assert "has ended: RuntimeError: lost" in ended.stderr


@pytest.mark.parametrize("flags", [(), ("--restart-engine",)], ids=["plain", "restart"])
def test_an_engine_that_does_not_get_ready_is_ended_with_its_stacks(tmp_path: Path, flags: tuple[str, ...]) -> None:
    ended = serve_until_end(tmp_path, "-m", "jaxserve", "serve", "--startup-timeout", "1", *flags)
    assert ended.returncode == EXIT_ENGINE_DEAD
    assert "Timeout (0:00:01)!" in ended.stderr
    assert "in faulty" in ended.stderr  # the function that hangs
    assert "the engine process ended while it started: it ended with status 1" in ended.stderr


def test_a_log_that_nobody_reads_delays_no_request(tmp_path: Path) -> None:
    """A pipe takes about 700 of these lines; the server answers on, and ends when it is told to."""
    (tmp_path / injected.START_HANGS).touch()
    path = tmp_path / "http"
    flags = ("--uds", str(path), "--grpc-port", "-1", "--admin-port", "-1", "--log-format", "json")
    command = [sys.executable, "-m", "jaxserve", "serve", *flags]
    environment = {**os.environ, **faulty_environment(tmp_path)}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE)
    try:
        wait_until(path.exists, "it listens")
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://x", timeout=30) as client:
            assert client.get("/v1/models").status_code == 503
            statuses = {client.get(f"/health?{number}").status_code for number in range(1500)}
        assert statuses == {503}
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        with process.stderr:
            lines = [json.loads(line) for line in process.stderr]
        assert process.wait(60) == 0
        assert sum('"GET /health" 503' in line["message"] for line in lines) == 1500
        assert [line["key"] for line in lines if '"GET /v1/models" 503' in line["message"]] == ["anonymous"]
    finally:
        process.kill()
        process.wait()


def test_during_the_drain_delay_requests_are_taken_and_connections_closed() -> None:
    with running_server("--drain-delay", "600") as server:
        with httpx2.Client(base_url=server.http, timeout=60) as client:
            assert [client.get(path).status_code for path in ("/livez", "/readyz", "/startupz")] == [200, 200, 200]
            assert "connection" not in client.get("/livez").headers
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/readyz").status_code == 503, "it is not ready")
            assert client.get("/livez").status_code == 200
            assert health(server) == NOT_SERVING
            answer = client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 3})
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        server.process.send_signal(signal.SIGTERM)  # a second one waits for nothing
        assert server.wait() == 0


@pytest.mark.slow
def test_a_revoked_key_ends_its_streams_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: old, key: old}, {name: kept, key: kept}]")
    body = {"prompt": "1+1=", "ignore_eos": True, "max_tokens": 100, "temperature": 0, "stream": True}
    with running_server("--auth-file", str(keys), environment=faulty_environment(tmp_path)) as server:
        with slow_steps(tmp_path, 0.05), contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx2.Client(base_url=server.http, timeout=60))
            streams = {
                key: stack.enter_context(
                    client.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                )
                for key in ("old", "kept")
            }
            lines = {key: stream.iter_lines() for key, stream in streams.items()}
            assert all(next(lines[key]).startswith("data: {") for key in lines)
            keys.write_text("[")  # a file with a mistake ends nothing
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "is not used" in server.log.read_text(), "the file is refused")
            keys.write_text("[{name: kept, key: kept}]")
            server.process.send_signal(signal.SIGHUP)
            assert "the API key was revoked" in "".join(lines["old"])
            assert "[DONE]" in "".join(lines["kept"])
            headers = {"authorization": "Bearer old"}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 401
