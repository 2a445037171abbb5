"""What an operator relies on, in real processes: descriptors, requests that end engines, revoked keys, audit."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from jaxserve.server.proto.jaxserve.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from scripts.server_child import REPOSITORY, RunningServer, as_flags, children_of
from tests.certificates import Authority
from tests.faults.conftest import faulty_environment
from tests.faults.steps import slow_steps
from tests.faults.talk import LONG, long_call, post, sampling, stream, wait_until
from tests.free_ports import free_ports
from tests.hooks import injected
from tests.server_process import running_server

HEALTH = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.contextmanager
def starting_server(folder: Path, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A server whose engine does not get ready, while the block runs; its log is the folder's file ``log``."""
    (folder / injected.START_HANGS).touch()
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", "--admin-port", "-1", *flags],
            cwd=REPOSITORY,
            env={**os.environ, **faulty_environment(folder)},
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def connected(path: Path, sent: bytes = b"") -> socket.socket:
    """A connection to a Unix socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(str(path))
    connection.sendall(sent)
    return connection


def test_a_server_without_descriptors_writes_few_lines_and_recovers(tmp_path: Path) -> None:
    """It raises its soft limit; once the hard one is reached, failed attempts are a line a minute."""
    path, log = tmp_path / "http", tmp_path / "log"
    with starting_server(tmp_path, "--uds", str(path), "--grpc-port", "-1", "--disable-access-log") as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 256))
        wait_until(path.exists, "it listens")
        assert RunningServer(process, "", "", "", log).engine_pid  # which needs descriptors too
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (256, 256)
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connected(path))
            wait_until(lambda: "cannot be accepted" in log.read_text(), "an attempt fails")
        with connected(path, HEALTH) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert log.read_text().count("cannot be accepted: [Errno 24] Too many open files") == 1
        assert len(log.read_text()) < 10_000


def fails_a_handshake(port: int) -> bool:
    """Whether a gRPC listener with certificates has ended a connection that speaks no TLS."""
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return connection.recv(100) is not None
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        return True


def test_failed_handshakes_write_no_lines_of_another_form(tmp_path: Path) -> None:
    made, log, port = Authority(tmp_path / "authority").sign("server"), tmp_path / "log", free_ports()
    flags = ("--uds", str(tmp_path / "http"), "--grpc-port", str(port), "--log-format", "json")
    with starting_server(tmp_path, *flags, *as_flags(made.settings)) as process:
        wait_until(lambda: fails_a_handshake(port), "it listens")
        assert all(fails_a_handshake(port) for _ in range(20))
        environments = [Path(f"/proc/{child}/environ").read_bytes() for child in children_of(process.pid)]
        assert environments and all(b"GRPC_VERBOSITY" not in each for each in environments)  # there JAX must write
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
        assert len(messages) < 20


def grpc_text(server: RunningServer, prompt: str, **fields: Any) -> str:
    """What a call over gRPC gets: its text, or the name of its status and why."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = generation_pb2.GenerateRequest(text=prompt, sampling_params=sampling(**fields))
        try:
            answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=120)
        except grpc.RpcError as error:
            call: Any = error
            return f"{call.code().name}: {call.details()}"
    return answer.completions[0].text


def test_what_ran_at_two_ends_of_the_engine_is_not_run_again(tmp_path: Path) -> None:
    """Each end by ``kill -9``, over HTTP and gRPC alike; the same prompts with other parameters run."""
    with running_server("--restart-engine", environment=faulty_environment(tmp_path)) as server:
        for _ in range(2):
            with (
                slow_steps(tmp_path, 0.02),
                stream(server, prompt="1+1=", **LONG) as events,
                grpc.insecure_channel(server.grpc) as channel,
            ):
                call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(long_call("2+2="))
                next(events)
                next(iter(call))
                os.kill(server.engine_pid, signal.SIGKILL)
                assert [*events][-1]["error"]["code"] == 503
                with pytest.raises(grpc.RpcError):
                    list(call)
            wait_until(lambda: httpx2.get(server.http + "/health").status_code == 200, "it serves again")
        refused = post(server, prompt="1+1=", **LONG, stream=True)
        assert refused.status_code == 500
        assert "was running at 2 ends of the engine process" in refused.json()["error"]["message"]
        assert "was running at 2 ends of the engine process" in grpc_text(server, "2+2=")
        assert grpc_text(server, "2+2=").startswith("INTERNAL: request ")
        assert post(server, prompt="1+1=", max_tokens=3).status_code == 200
        assert "ends of the engine" not in grpc_text(server, "2+2=", max_tokens=3)


def test_a_changed_auth_file_ends_a_grpc_stream_without_a_signal(tmp_path: Path) -> None:
    keys, audit = tmp_path / "keys.yaml", tmp_path / "audit"
    keys.write_text("[{name: old, key: old}, {name: operator, key: operator, scopes: [admin, generate]}]")
    flags = ("--auth-file", str(keys), "--audit-log", str(audit), "--log-format", "json", "--enable-log-requests")
    operator = (("authorization", "Bearer operator"),)
    with running_server(*flags, environment=faulty_environment(tmp_path)) as server:
        with (
            slow_steps(tmp_path, 0.05),
            grpc.insecure_channel(server.grpc) as channel,
            grpc.insecure_channel(server.admin) as admin_channel,
        ):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            admin = admin_pb2_grpc.AdminServiceStub(admin_channel)
            old = stub.StreamGenerate(long_call(), metadata=(("authorization", "Bearer old"),))
            next(iter(old))
            keys.write_text("[{name: operator, key: operator, scopes: [admin, generate]}]")
            with pytest.raises(grpc.RpcError) as revoked:
                list(old)
            assert revoked.value.code() is grpc.StatusCode.UNAUTHENTICATED
            trace = ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")
            kept = stub.StreamGenerate(long_call(), metadata=(*operator, trace))
            request_id = next(iter(kept)).request_id
            with pytest.raises(grpc.RpcError):
                stub.Generate(long_call().request, metadata=(("authorization", "Bearer old"),))
            aborted = admin.Abort(admin_pb2.AbortRequest(request_ids=[request_id, "none"]), metadata=operator)
            assert [*aborted.aborted_request_ids] == [request_id]
            with pytest.raises(grpc.RpcError):
                admin.Reshard(admin_pb2.ReshardRequest(mesh="tensor=77"), metadata=operator)
            admin.Drain(admin_pb2.DrainRequest(), metadata=operator)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (begun,) = [line for line in lines if line["message"].startswith(f"Request {request_id} of operator: ")]
    assert (begun["key"], begun["request_id"], begun["trace_id"]) == ("operator", request_id, "ab" * 16)
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    found = [(event["method"].rpartition("/")[2], event["caller"], event["result"]) for event in events]
    assert found[0] == ("reload of keys", "-", "ok")
    assert events[0]["revoked"] == "old"
    assert [each[:2] for each in found[1:]] == [
        ("Generate", "-"),
        ("Abort", "operator"),
        ("Reshard", "operator"),
        ("Drain", "operator"),
    ]
    assert found[1][2] == "unknown API key" and found[2][2] == found[4][2] == "ok"
    assert "needs 77 devices" in found[3][2]
