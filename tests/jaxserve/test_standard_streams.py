"""Commands whose output is closed, full or has no reader, and files that cannot be written: one line, no traceback."""

import argparse
import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

import jaxserve
from checkpoints import convert
from checkpoints.errors import CheckpointError
from jaxserve import cli, standard_streams
from jaxserve.api.errors import ConfigError, DeadlineError
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.bench import accuracy, latency, startup, throughput
from jaxserve.bench.serve import files as serve_files
from jaxserve.lab.compare import compare
from jaxserve.lab.hardware import DEVICES
from jaxserve.lab.plan import command as plan_command
from jaxserve.lab.show import show

FULL = "/dev/full"
KINDS = [(kind, is_buffered) for kind in ("pipe", "full") for is_buffered in (True, False)]


def broken_output(kind: str, is_buffered: bool) -> TextIO:
    """Output to a pipe that nobody reads or to a full device; without a buffer as ``python -u`` opens it."""
    if kind == "full":
        number = os.open(FULL, os.O_WRONLY)
    else:
        reader, number = os.pipe()
        os.close(reader)
    raw = io.FileIO(number, "w")
    return io.TextIOWrapper(io.BufferedWriter(raw) if is_buffered else raw, "utf-8", write_through=not is_buffered)


class FakeLLM:
    """Answers without a model."""

    vocab_size = 100

    def __init__(self, **arguments: Any):
        self.output = RequestOutput(
            request_id="1",
            prompt="Hi",
            prompt_token_ids=[1],
            outputs=[CompletionOutput(index=0, text="there " * 5000, token_ids=[1], cumulative_logprob=None)],
            finished=True,
            num_cached_tokens=0,
        )

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, *arguments: Any) -> Iterator[RequestOutput]:
        """One output."""
        yield self.output

    def get_metrics(self) -> list[Any]:
        """None."""
        return []

    def generate(self, prompts: Any, *arguments: Any, **options: Any) -> list[RequestOutput]:
        """One output for each prompt."""
        return [self.output] * len(prompts)


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run without their work; what they print is left to them."""
    monkeypatch.setattr("jaxserve.llm.LLM", FakeLLM)
    monkeypatch.setattr(latency, "LLM", FakeLLM)
    monkeypatch.setattr(throughput, "LLM", FakeLLM)
    monkeypatch.setattr(plan_command, "plan", lambda *_, **__: "the plan")
    monkeypatch.setattr(plan_command, "calibrate", lambda *_: DEVICES["h100"])
    monkeypatch.setattr(plan_command, "calibration_text", lambda *_: "measured")
    monkeypatch.setattr(show, "show", lambda *_, **__: Drawing())
    monkeypatch.setattr(compare, "compare", lambda *_, **__: "the comparison")
    monkeypatch.setattr(
        startup, "_start", lambda *_: dict.fromkeys(("first_token_s", "ready_s", "compile_s", "load_s"), 1)
    )
    monkeypatch.setattr(accuracy, "LLM", FakeLLM)
    monkeypatch.setattr(accuracy, "demo_accuracy", lambda *_: {})


class Drawing:
    """What ``jaxserve show`` draws."""

    svg = "<svg/>"


COMMANDS = [
    ("--version",),
    ("--help",),
    ("serve", "--help"),
    ("generate", "--prompt", "Hi"),
    ("generate", "--prompt", "Hi", "--json", "--quiet"),
    ("generate", "--prompt", "Hi", "--prompt", "Ho", "--quiet"),
    ("plan", "demo"),
    ("plan", "--help"),
    ("show", "demo"),
    ("compare", "demo", "--devices", "2"),
    ("bench", "latency", "--num-iters", "1"),
    ("bench", "latency", "--num-iters", "1", "--json"),
    ("bench", "startup"),
    ("eval", "demo"),
]


def run(arguments: tuple[str, ...], output: TextIO, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status of a command with this standard output."""
    with contextlib.closing(output), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as leaving:
            cli.main(arguments)
        output.flush()  # as the interpreter does at exit: nothing is left to fail
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("kind", "is_buffered"), KINDS)
def test_output_that_cannot_be_written(
    kind: str,
    is_buffered: bool,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    status = run(arguments, broken_output(kind, is_buffered), monkeypatch)
    out, err = capfd.readouterr()
    assert out == ""
    if kind == "pipe":
        assert (status, err) == (standard_streams.STATUS_BROKEN_PIPE, "")
    else:
        assert status == 2 and len(err.splitlines()) == 1
        assert err.startswith("jaxserve: cannot write") and err.endswith(": No space left on device\n")


FILES = [
    (
        ("bench", "latency", "--num-iters", "1", "--output-json", FULL),
        "--output-json: /dev/full cannot be written: No sp",
    ),
    (("bench", "latency", "--output-json", "/no/file"), "--output-json: /no/file cannot be written: No such file"),
    (("bench", "throughput", "--output-json", "/no/file"), "--output-json: /no/file cannot be written: No such file"),
    (("bench", "startup", "--output-json", "/no/file"), "--output-json: /no/file cannot be written: No such file"),
    (("show", "demo", "--svg", FULL), "--svg: /dev/full cannot be written: No space left on device"),
    (("show", "demo", "--svg", "/no/file"), "--svg: /no/file cannot be written: No such file"),
    (("plan", "--calibrate", "/proc/no.json"), "--calibrate: /proc/no.json cannot be written: No such file"),
]


@pytest.mark.parametrize(("arguments", "message"), FILES)
def test_files_that_cannot_be_written(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: {message}")


def test_a_result_of_a_load_test_that_cannot_be_written() -> None:
    options = argparse.Namespace(
        save_detailed=False, append_result=False, max_concurrency=None, request_rate=1.0, ramp_up_strategy=None,
        dataset_name="random", label=None, backend="openai", result_dir="/dev", result_filename="full",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--result-filename: /dev/full cannot be written: No space left"):
        serve_files.save(options, {"model_id": "m", "date": "d"})


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-written is left."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = sys.modules["checkpoints.convert"]  # whose name in the package is the function's
    monkeypatch.setattr(module, "_write", fill)
    monkeypatch.setattr(module, "open_checkpoint", lambda *_: contextlib.nullcontext())
    (tmp_path / "source").mkdir()
    with pytest.raises(CheckpointError, match="source cannot be converted to .*copy: .*No space left on device"):
        convert(tmp_path / "source", tmp_path / "copy", "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [ConfigError("wrong"), DeadlineError("wrong"), KeyboardInterrupt()])
@pytest.mark.parametrize(("kind", "is_buffered"), KINDS)
def test_a_command_that_fails_says_so_whatever_its_output(
    kind: str,
    is_buffered: bool,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        with contextlib.suppress(OSError):
            print("partly")
        raise error

    monkeypatch.setattr(plan_command, "plan", fail)
    status = run(("plan", "demo"), broken_output(kind, is_buffered), monkeypatch)
    expected = (130, "") if isinstance(error, KeyboardInterrupt) else (2, "jaxserve: wrong\n")
    assert (status, capsys.readouterr().err) == expected


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(plan_command, "plan", fail)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["plan", "demo"])
    assert (leaving.value.code, capsys.readouterr().err) == (2, "jaxserve: Broken pipe\n")


def test_a_terminal_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(plan_command, "plan", lambda *_, **__: "höher")
    cli.main(["plan", "demo"])
    assert output.buffer.getvalue() == b"h\\xf6her\n"


@pytest.mark.parametrize("arguments", [["--version"], ["-v"]])
def test_the_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert (leaving.value.code, capsys.readouterr()) == (0, (f"{jaxserve.__version__}\n", ""))


SHELL = [
    ("{} --version", 0, f"{jaxserve.__version__}\n"),
    ("{} --version > /dev/full", 2, "jaxserve: cannot write to standard output: No space left on device\n"),
    ("{} --version >&-", 2, "jaxserve: standard output is closed; redirect it to a file or /dev/null\n"),
    ("exec 3> >(true); sleep 0; wait $!; {} --version >&3", 141, ""),
    ("{} --version 2>&-", 0, f"{jaxserve.__version__}\n"),
    (
        "{} generate --prompts - <&-",
        2,
        "jaxserve: no prompts; pass --prompt TEXT, --prompts FILE or --prompt-token-ids FILE\n",
    ),
]


def test_in_a_shell() -> None:
    """The interpreter, which flushes at exit, has nothing to add."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    running = [
        subprocess.Popen(
            ["bash", "-c", command.format(f"{sys.executable} -m jaxserve")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command, _, _ in SHELL
    ]
    for process, (command, status, output) in zip(running, SHELL, strict=True):
        assert (process.communicate(timeout=120)[0], process.returncode) == (output, status), command
