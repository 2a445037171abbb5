"""The README's examples of a server run, against one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.server_child import RunningServer
from tests.server_process import running_server

REPOSITORY = Path(__file__).resolve().parent.parent


def examples(language: str) -> list[str]:
    """Fenced blocks of the README that speak to a server."""
    section = (REPOSITORY / "README.md").read_text().partition("### Serve it")[2].partition("\n### ")[0]
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "localhost" in block]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server of the demo model."""
    with running_server() as running:
        yield running


def on_ports(text: str, server: RunningServer) -> str:
    """An example with the ports that the server really has."""
    return text.replace("http://localhost:8000", server.http).replace("localhost:8001", server.grpc)


def test_there_are_examples_of_each_kind() -> None:
    assert (len(examples("bash")), len(examples("python"))) == (1, 2)


def test_curl(server: RunningServer) -> None:
    for line in examples("bash")[0].replace("\\\n", " ").splitlines():
        command = ["bash", "-c", on_ports(line, server).replace("curl ", "curl --silent --fail-with-body ")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert any(sign in ended.stdout for sign in ('"text":"42"', "data: [DONE]", "jaxserve:steps_total")), (
            ended.stdout
        )


@pytest.mark.parametrize("place", [0, 1])
def test_python(server: RunningServer, place: int) -> None:
    program = examples("python")[place]
    if "openai" in program:
        pytest.importorskip("openai", reason="needs the extra clients")
    command = [sys.executable, "-c", on_ports(program, server)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == (["42", "128"] if "openai" in program else ["noom"])
