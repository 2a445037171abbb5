"""What keeps a server from starting says what it is (failure list 12, 22, 23)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from scripts.server_child import REPOSITORY
from tests.faults.talk import assert_serves
from tests.hooks import DEMO_DIRECTORY
from tests.server_process import running_server


def start(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A start that fails."""
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", "0", "--grpc-port", "0", "--admin-port", "0"]
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _long_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def _overlapping(path: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    written = json.dumps(header).encode().ljust(size)[:size]
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


SLOW = pytest.mark.slow
"""The reader's own tests have these cases too; here each costs a start."""


@pytest.mark.parametrize(
    "damage",
    [
        _truncated,
        pytest.param(_long_header, marks=SLOW),
        pytest.param(_overlapping, marks=SLOW),
        pytest.param(_empty, marks=SLOW),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Failure list 22."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, directory)
    damage(directory / "model.safetensors")
    ended = start(str(directory))
    assert ended.returncode == 2
    assert "model.safetensors" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """Failure list 22."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, directory)
    (directory / name).write_text("{")
    ended = start(str(directory))
    assert ended.returncode == 2
    assert name in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_is_nowhere_is_named() -> None:
    ended = start("/nowhere/model")
    assert ended.returncode == 2
    assert "/nowhere/model" in ended.stderr.splitlines()[-1]


def test_a_pool_that_a_request_could_be_too_large_for_is_refused() -> None:
    """Failure list 12: no request that a context holds meets a pool that does not hold it."""
    ended = start("demo", "--num-gpu-blocks-override", "4", "--block-size", "16", "--max-model-len", "150")
    assert ended.returncode == 2
    assert "max_model_len=150 tokens needs 10 KV pages" in ended.stderr.splitlines()[-1]


def test_a_port_in_use_is_named_and_keys_are_in_no_log() -> None:
    with running_server("--api-key", "a-very-secret-key", "--enable-log-requests") as server:
        for flag, address in (("--port", server.http), ("--grpc-port", server.grpc)):
            port = address.rpartition(":")[2]
            ended = start(flag, port)
            assert ended.returncode == 2
            assert port in ended.stderr.splitlines()[-1]
        for key, status in (("a-very-secret-key", 200), ("another-secret-key", 401)):
            answer = httpx2.post(
                server.http + "/v1/completions",
                json={"prompt": "1+1=", "max_tokens": 2},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert answer.status_code == status
        log = server.log.read_text()
        assert "1+1=" in log
        assert log.count(" KV cache size: ") == 1
        assert "secret-key" not in log


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_no_reason_to_fail() -> None:
    """Failure list 23: the programs are compiled and not kept."""
    with running_server("--compilation-cache-dir", "/proc/nowhere") as server:
        assert_serves(server)
