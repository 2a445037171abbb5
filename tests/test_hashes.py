"""The hashes of the packages that running needs: each pin has one, and what has none is refused."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.make_sbom import make_sbom
from scripts.pin_hashes import BUILD, VERSION, lines_of

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LINE = re.compile(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def pins(path: Path) -> dict[str, str]:
    """Version of each package of a constraints file."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def hashed(path: Path) -> dict[str, str]:
    """Version of each package of a file of hashes, every line of which must have one."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, [line for line, match in zip(lines, found, strict=True) if match is None]
    return {match[1]: match[2] for match in found if match is not None}


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("constraints-*.txt")), ids=lambda path: path.stem)
def test_hashes_are_those_of_the_tested_versions(path: Path) -> None:
    assert BUILD[0] in hashed(path.with_stem(path.stem.replace("constraints", "hashes")))
    assert hashed(path.with_stem(path.stem.replace("constraints", "hashes"))).items() <= pins(path).items()


def test_everything_that_running_needs_has_a_hash() -> None:
    needed = {component["name"].lower().replace("_", "-") for component in make_sbom()["components"]}
    path = SCRIPTS / f"hashes-{VERSION}.txt"
    if not path.exists():
        pytest.skip(f"hashes are kept for Python 3.11 to 3.13, as the pins of versions are; this is {VERSION}")
    assert needed - set(hashed(path)) == set()


def package(**source: Any) -> dict[str, Any]:
    """A package of pip's report."""
    return {"metadata": {"name": "Some_thing", "version": "1.2"}, "download_info": source}


def test_a_package_without_a_hash_of_an_index_is_refused() -> None:
    info = {"hashes": {"sha256": "ab"}}
    assert lines_of([package(url="https://index/some", archive_info=info)]) == ["some-thing==1.2 --hash=sha256:ab"]
    for source in ({"url": "file:///wheels/some", "archive_info": info}, {"url": "https://index/some"}):
        with pytest.raises(ValueError, match="Some_thing has no hash of an index"):
            lines_of([package(**source)])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the script, and an environment whose Python is this one."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "make_venv.sh", tmp_path / "scripts")
    (tmp_path / "pallas_kernels" / "native").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", *(f"pallas_kernels/native/a.{end}" for end in ("c", "h", "py"))):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def make_venv(tree: Path) -> str:
    """What the script says when it fails."""
    command = ["bash", str(tree / "scripts" / "make_venv.sh"), "--require-hashes"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_an_environment_without_hashes_is_refused(tree: Path) -> None:
    assert f"there are no hashes for Python {VERSION}" in make_venv(tree)
    (tree / "scripts" / f"hashes-{VERSION}.txt").touch()
    (tree / ".venv" / ".installed-core").touch()
    assert "packages that were installed without hashes" in make_venv(tree)
