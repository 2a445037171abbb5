"""The folder of compiled programs: private, bounded, and damaged entries are compiled again instead of read in vain."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM
from jaxserve.device.program_cache import check_entries, use_compilation_cache
from jaxserve.engine import startup
from jaxserve.layers.cpu import cpu_key
from tests.jaxserve.test_memory import FakeGpu

COMPILE = """
import resource, signal, sys, warnings
from pathlib import Path
import jax
from jaxserve.device.program_cache import check_entries, use_compilation_cache

warnings.simplefilter("ignore")
folder = use_compilation_cache(sys.argv[1], jax.devices()[0], int(sys.argv[2]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if int(sys.argv[3]):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), hard))
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
for size in (2, 3, 4):
    jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((size,), "float32")).compile()
cut = len(list(folder.glob("*-cache")))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
check_entries(folder)
print(len(hits), cut, len(list(folder.glob("*-cache"))))
"""


def compile_programs(directory: Path, max_bytes: int = 0, file_bytes: int = 0) -> tuple[int, int, int]:
    """Compile three programs in a process; return how many were found, and the entries before and after a check.

    Args:
        directory: The cache.
        max_bytes: Its limit.
        file_bytes: Size at which writing a file fails, as on a full disk; 0: none.
    """
    arguments = [sys.executable, "-c", COMPILE, str(directory), str(max_bytes), str(file_bytes)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    hits, before, after = map(int, run.stdout.split())
    return hits, before, after


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int, int]]]:
    """A cache of three programs, which a full disk had cut, and the results of both processes."""
    directory = tmp_path_factory.mktemp("programs")
    return directory, [compile_programs(directory, file_bytes=1000), compile_programs(directory)]


@pytest.fixture
def folder(starts: tuple[Path, list[tuple[int, int, int]]], tmp_path: Path) -> Path:
    """The folder of a copy of that cache."""
    shutil.copytree(starts[0], tmp_path / "cache")
    return tmp_path / "cache" / cpu_key()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-cache"))


def test_a_full_disk_leaves_no_cut_programs(starts: tuple[Path, list[tuple[int, int, int]]]) -> None:
    (hits, before, after), second = starts[1]
    assert (hits, after) == (0, 0)
    assert before > 0  # JAX leaves them, and would read them in vain at each start
    assert second == (0, 3, 3)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("damage", ["cut", "foreign", "empty", "swapped"])
def test_damaged_programs_are_removed(folder: Path, damage: str, is_known: bool) -> None:
    first, second, third = entries(folder)
    content = first.read_bytes()
    new = {"cut": content[:-9], "foreign": b"x" * 5000, "empty": b"", "swapped": second.read_bytes()}[damage]
    if not is_known and damage == "swapped":
        pytest.skip("an entry without a checksum cannot be told from that of another program")
    first.write_bytes(new)
    for path in [] if is_known else folder.glob("*-sha256"):
        path.unlink()
    check_entries(folder)
    assert entries(folder) == [second, third]
    assert len(list(folder.glob("*-sha256"))) == 2


def test_a_copied_cache_is_kept(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    check_entries(folder)
    assert len(entries(folder)) == 3


def test_an_unchanged_program_is_not_read_again(folder: Path) -> None:
    first = entries(folder)[0]
    state = first.stat()
    first.write_bytes(b"x" * state.st_size)
    os.utime(first, ns=(state.st_atime_ns, state.st_mtime_ns))
    check_entries(folder)
    assert first.exists()


def test_the_least_recently_used_go(folder: Path) -> None:
    first, *others = entries(folder)
    for number, path in enumerate((first, *others)):
        path.with_name(path.name.replace("-cache", "-atime")).write_bytes((number + 1).to_bytes(8, "little"))
    size = sum(path.stat().st_size for path in entries(folder))
    _, _, after = compile_programs(folder.parent, max_bytes=2 * size - first.stat().st_size // 2)
    assert after == 5  # three more were compiled
    assert not first.exists()
    assert all(path.exists() for path in others)


def test_an_engine_passes_its_limit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        """The folder was asked for."""

    def use(directory: str, device: Any, max_bytes: int) -> None:
        raise AskedError(directory, max_bytes)

    monkeypatch.setattr(startup, "use_compilation_cache", use)
    with pytest.raises(AskedError) as asked:
        LLM("demo", compilation_cache_dir="programs", compilation_cache_max_bytes=12345)
    assert asked.value.args == ("programs", 12345)


@pytest.fixture
def no_programs_cache() -> Iterator[None]:
    """JAX without a directory for compiled programs, and the tests' own again afterwards."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", directory)


@pytest.mark.usefixtures("no_programs_cache")
def test_each_kind_of_device_has_its_own_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    updates: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", updates.__setitem__)
        use_compilation_cache(str(tmp_path), FakeGpu(None))
        assert updates["jax_compilation_cache_dir"] == f"{tmp_path}/NVIDIA-H200"
        use_compilation_cache(str(tmp_path), jax.devices()[0])
        assert updates["jax_compilation_cache_dir"] == f"{tmp_path}/{cpu_key()}"


@pytest.mark.usefixtures("no_programs_cache")
def test_a_folder_of_another_user_that_others_can_write_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / cpu_key()).mkdir()
    (tmp_path / cpu_key()).chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert use_compilation_cache(str(tmp_path), jax.devices()[0]) is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert "belongs to another user and others can write to it" in caplog.text


@pytest.mark.usefixtures("no_programs_cache")
def test_the_folder_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / cpu_key()).mkdir(mode=0o755)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    folder = use_compilation_cache(str(tmp_path), jax.devices()[0])
    assert folder is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    new = use_compilation_cache(str(tmp_path / "new"), jax.devices()[0])
    assert new is not None
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
