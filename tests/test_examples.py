"""Examples of the README and the package's pages run: Python programs, commands, and requests to a server.

The first program and the first command run in an interpreter of their own, as a reader runs them; the others in this
process, which has imported JAX already.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import cli
from scripts.server_child import RunningServer
from tests.server_process import running_server

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "jaxserve/GUIDE.md", "jaxserve/server/README.md")
NOT_RUN = {
    "bash scripts/quickstart.sh": "creates the environment that these tests run in",
    "bash scripts/test.sh": "runs these tests",
    "jaxserve serve": "the requests of these pages run against such a server",
    "jaxserve bench serve": "runs against the server below",
    "srun": "tests/jaxserve/group/test_slurm.py starts groups where SLURM is",
    "jaxserve launch": "tests/jaxserve/group and tests/faults/test_group.py start groups",
    "head -c 32 /dev/urandom": "would leave a secret in the repository",
}
"""Beginnings of commands that this file does not run, and why."""


def examples(language: str, *, of_server: bool) -> list[str]:
    """Fenced blocks of the pages in a language: those that speak to a server, or the others."""
    texts = [(REPOSITORY / page).read_text() for page in PAGES]
    blocks = [b for t in texts for b in re.findall(rf"^```{language}\n(.*?)^```", t, flags=re.MULTILINE | re.DOTALL)]
    return list(dict.fromkeys(block for block in blocks if ("localhost" in block) == of_server))


def commands(*, of_server: bool) -> list[str]:
    """Command lines of the pages, without comments."""
    lines = "".join(examples("bash", of_server=of_server)).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s+", " ", re.sub(r"\s#.*", "", line)).strip() for line in lines]
    return list(dict.fromkeys(filter(None, lines)))


def is_run(command: str) -> bool:
    return not command.removeprefix(".venv/bin/").startswith(tuple(NOT_RUN))


def run_here(program: str) -> None:
    """Run a Python program in this process."""
    exec(compile(program, "<example>", "exec"), {"__name__": "__main__"})


def run_in_shell(command: str) -> str:
    """What a command line prints."""
    bin_directory = f"{Path(sys.executable).parent}/"
    environment = {**os.environ, "PATH": bin_directory + os.pathsep + os.environ["PATH"]}
    line = ["bash", "-c", command.replace(".venv/bin/", bin_directory)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=240, cwd=REPOSITORY, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_command(command: str) -> None:
    """Run ``jaxserve`` with the arguments of a command line in this process."""
    program, *arguments = shlex.split(command)
    assert Path(program).name == "jaxserve"
    cli.main(arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server of the demo model, in whose queue all requests of the load generator have room."""
    with running_server("--max-num-queued-reqs", "100") as running:
        yield running


def on_ports(text: str, server: RunningServer) -> str:
    """An example with the ports that the server really has."""
    return text.replace("http://localhost:8000", server.http).replace("localhost:8001", server.grpc)


PROGRAMS = examples("python", of_server=False)
COMMANDS = [command for command in commands(of_server=False) if is_run(command)]


def test_the_first_program_and_the_first_command_as_a_reader_runs_them() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAMS[0]], capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    assert "358+840= 1198" in ended.stdout
    assert run_in_shell(COMMANDS[0]).strip()


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_program(program: str) -> None:
    run_here(program)


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_command(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    run_command(command)
    assert capsys.readouterr().out.strip()


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    skipped = [command.removeprefix(".venv/bin/") for command in commands(of_server=False) if not is_run(command)]
    assert [beginning for beginning in NOT_RUN if not any(command.startswith(beginning) for command in skipped)] == []


@pytest.mark.parametrize("command", commands(of_server=True))
def test_request_with_curl(server: RunningServer, command: str) -> None:
    printed = run_in_shell(on_ports(command, server).replace("curl ", "curl --silent --fail-with-body "))
    assert any(sign in printed for sign in ('"text":"42"', "data: [DONE]", "jaxserve:steps_total")), printed


@pytest.mark.parametrize("program", examples("python", of_server=True))
def test_client(server: RunningServer, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "openai" in program:
        pytest.importorskip("openai", reason="needs the extra clients")
    run_here(on_ports(program, server))
    expected = "128" if "embeddings" in program else "42" if "openai" in program else "noom"
    assert capsys.readouterr().out.split() == [expected]


def test_load_generator(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(c for c in commands(of_server=False) if c.startswith(".venv/bin/jaxserve bench serve"))
    run_command(f"{command} --base-url {server.http}")
    printed = capsys.readouterr().out
    assert re.search(r"Successful requests: +100\b", printed), printed
