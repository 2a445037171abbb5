"""A full disk under the server's logs: requests are answered as if nothing were wrong."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from scripts.server_child import REPOSITORY
from tests.faults.conftest import faulty_environment
from tests.faults.talk import wait_until
from tests.hooks import injected

FULL = Path("/dev/full")
"""A device to which nothing can be written: no space is left on it."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs the device /dev/full, which Linux has")


@contextlib.contextmanager
def front_end(folder: Path, *flags: str, log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", httpx2.Client]]:
    """A server whose engine does not get ready, and a client of its socket."""
    (folder / injected.START_HANGS).touch()
    path = folder / "http"
    command = [sys.executable, "-m", "jaxserve", "serve", "--uds", str(path), "--grpc-port", "-1", "--admin-port", "-1"]
    environment = {**os.environ, **faulty_environment(folder)}
    with log.open("wb") as written:
        process = subprocess.Popen([*command, *flags], cwd=REPOSITORY, env=environment, stdout=written, stderr=written)
    try:
        wait_until(path.exists, "it listens")
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_logs_on_a_full_disk_end_and_delay_nothing(tmp_path: Path, log_format: str) -> None:
    """The log and the audit log lose their lines; keys are still asked for, and the server ends when it is told to."""
    flags = ("--log-format", log_format, "--api-key", "secret", "--audit-log", str(FULL))
    with front_end(tmp_path, *flags, log=FULL) as (process, client):
        headers = {"authorization": "Bearer secret"}
        for number in range(300):
            assert client.get(f"/health?{number}").status_code == 503
        assert client.get("/v1/models").status_code == 401  # a line of the audit log too
        assert client.get("/v1/models", headers=headers).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_log_that_gets_room_again_goes_on(tmp_path: Path) -> None:
    """A small file system is full, then it is not: lines that were lost are counted in the log."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        log, ballast = disk / "log", disk / "ballast"
        with front_end(tmp_path, "--audit-log", str(disk / "audit"), "--api-key", "k", log=log) as (process, client):
            assert client.get("/v1/models").status_code == 401
            wait_until(lambda: (disk / "audit").stat().st_size > 0, "the audit log has a line")
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
            sizes = [path.stat().st_size for path in (log, disk / "audit")]
            for _ in range(300):
                assert client.get("/v1/models").status_code == 401
            ballast.unlink()
            wait_until(lambda: client.get("/health").status_code == 503 and "lines of the log" in log.read_text(), "ok")
            assert client.get("/v1/models").status_code == 401
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert log.stat().st_size > sizes[0] and (disk / "audit").stat().st_size > sizes[1]
            assert (disk / "audit").read_text().endswith("}\n")
    finally:
        subprocess.run(["umount", disk], check=True)
