"""Fuzz targets: what was found is replayed, some inputs are drawn, and the script tells what it finds."""

import importlib
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import fuzz_inputs
from tests.fuzzing import target as targets
from tests.fuzzing.registry import TARGETS
from tests.fuzzing.target import Target, corpus, load, mutated

FOLDER = Path(targets.__file__).parent
NUM_DRAWN = 250


def test_the_registry_has_all_targets() -> None:
    assert list(TARGETS) == sorted(path.stem for path in (FOLDER / "targets").glob("*.py"))
    assert {path.stem for path in (FOLDER / "corpora").glob("*.txt")} <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_were_found_and_drawn_break_nothing(name: str) -> None:
    target, rng = load(name), random.Random(name)
    known = [*target.seeds, *corpus(name)]
    for data in known:
        target.run(data)
    for _ in range(NUM_DRAWN):
        data = mutated(target, rng.choice(known), rng, rng.choice(known))
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{name} fails for {data!r}") from error


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris, which has wheels for Linux on x86-64 only")
@pytest.mark.parametrize("name", TARGETS)
def test_two_minutes_with_coverage_find_nothing(name: str, tmp_path: Path) -> None:
    flags = ["--seconds", "120", "--findings", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, fuzz_inputs.__file__, name, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "stat::number_of_executed_units" in done.stdout


# ---------------------------------------------------------------- the script


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A target that fails for bytes above 250, in place of every other; and a folder."""

    def run(data: bytes) -> None:
        assert not data or max(data) <= 250, "a byte above 250"

    monkeypatch.setattr(fuzz_inputs, "load", lambda _: Target(run, seeds=(b"abc",), words=(), packages=()))
    monkeypatch.setattr(fuzz_inputs, "find_spec", lambda _: None)
    monkeypatch.setattr(targets, "_CORPORA", tmp_path / "corpora")
    (tmp_path / "corpora").mkdir()
    return tmp_path


def test_what_fails_is_written_down_read_again_and_added(broken: Path) -> None:
    with pytest.raises(AssertionError, match="a byte above 250"):
        fuzz_inputs.main(["http_body", "--findings", str(broken), "--seconds", "60"])
    (found,) = broken.glob("http_body-crash-*")
    with pytest.raises(AssertionError, match="a byte above 250"):
        fuzz_inputs.main(["http_body", "--input", str(found)])
    for _ in range(2):
        assert fuzz_inputs.main(["http_body", "--add", str(found)]) == 0
    assert corpus("http_body") == [found.read_bytes()]


def test_nothing_that_fails_is_no_finding(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (broken / "input").write_bytes(b"abc")
    assert fuzz_inputs.main(["http_body", "--input", str(broken / "input")]) == 0
    assert fuzz_inputs.main(["http_body", "--findings", str(broken), "--seconds", "0"]) == 0
    assert "0 executions, 0 lines, no finding" in capsys.readouterr().out


def test_lines_guide_the_search_without_atheris(
    broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four bytes one after the other are found, as each one that is right reaches a line; at random they are not."""
    module = broken / "reading_four_bytes.py"
    lines = "".join(f"    if data[{at}] != {byte}:\n        return\n" for at, byte in enumerate(b"\x11\x7f\xa0\x42"))
    module.write_text(f"def run(data):\n    data = data.ljust(4, b'\\0')\n{lines}    raise ValueError('found')\n")
    monkeypatch.syspath_prepend(broken)
    run = importlib.import_module(module.stem).run
    monkeypatch.setattr(fuzz_inputs, "find_spec", lambda name: None if name == "atheris" else find_spec(name))
    made = Target(run, seeds=(b"abcd",), words=(), packages=(module.stem,))
    monkeypatch.setattr(fuzz_inputs, "load", lambda _: made)
    flags = ["http_body", "--findings", str(broken), "--seconds", "300"]
    with pytest.raises(ValueError, match="found"):
        fuzz_inputs.main([*flags, "--keep", str(broken / "kept")])
    (crash,) = broken.glob("http_body-crash-*")
    assert crash.read_bytes()[:4] == b"\x11\x7f\xa0\x42"
    assert len([*(broken / "kept" / "http_body").iterdir()]) >= 3
    assert "guided by lines" in capsys.readouterr().out


def test_changes_of_json_keep_the_first_byte_and_are_json() -> None:
    target, rng = load("http_body"), random.Random(0)
    changed = {targets._changed_json(target.seeds[3], rng) for _ in range(200)}
    assert len(changed) > 50
    assert {data[0] for data in changed} == {target.seeds[3][0]}
    assert targets._changed_json(b"\1{", rng) == b"\1{"
