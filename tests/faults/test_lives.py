"""A server ends when it cannot serve any more: its HTTP listener ended, or its engine does not get ready."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.server_child import REPOSITORY
from tests.faults.conftest import faulty_environment
from tests.hooks import EXIT_ENGINE_DEAD, injected

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
