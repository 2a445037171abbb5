"""A wheel built from the tree, installed into a fresh environment, imports and has its command."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.native_build import HAS_COMPILER, build_library

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
METADATA = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command away from the repository and returns what it printed; fails with all of it if it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PIP_CONSTRAINT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy so that the tree stays clean, with the setuptools that is installed (no network)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    with pytest.MonkeyPatch.context() as environment:
        if HAS_COMPILER:  # optimizing takes a minute, and these tests compute nothing
            quick = folder / "quick-cc"
            command = shlex.join(build_library.find_compiler(os.environ).command)
            quick.write_text(f'#!/bin/sh\nexec {command} "$@" -O0\n')
            quick.chmod(0o755)
            environment.setenv("CC", str(quick))
        run(*pip, "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel that sees this environment's dependencies, but not its editable code."""
    folder = tmp_path_factory.mktemp("fresh") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    run(*install, wheel, cwd=wheel.parent)
    site_packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_the_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    demo = REPOSITORY / "jaxserve" / "demo" / "model"
    server = REPOSITORY / "jaxserve" / "server"
    native = REPOSITORY / "pallas_kernels" / "native"
    targets = REPOSITORY / "jaxserve" / "lab" / "targets"
    data = [
        *demo.iterdir(),
        *server.rglob("*.proto"),
        *server.rglob("*.html"),
        *native.glob("*.[ch]"),
        *targets.iterdir(),
    ]
    expected |= {str(path.relative_to(REPOSITORY)) for path in data if path.is_file()}
    if HAS_COMPILER:
        expected.add("pallas_kernels/libjaxserve_native.so")
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs x86-64 Linux with a C compiler")
def test_native_kernels_need_no_compiler_to_run(wheel: Path, fresh_python: Path, tmp_path: Path) -> None:
    """The wheel is for a platform, not for a Python, and holds a library that loads where no program is on the path."""
    assert re.search(r"-py3-none-(linux|manylinux_2_28)_x86_64\.whl$", wheel.name)
    program = "from pallas_kernels.native_library import PATH, unavailable; print(PATH, unavailable())"
    path, reason = run("env", "PATH=", fresh_python, "-c", program, cwd=tmp_path).split(maxsplit=1)
    assert Path(path).is_relative_to(fresh_python.parent.parent)
    assert reason.strip() == "None" or reason.startswith("the CPU has neither")


def test_a_compiler_is_asked_for_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_library.importlib.util, "find_spec", lambda name: None)
    assert build_library.find_compiler({"PATH": str(tmp_path)}) is None
    assert build_library.find_compiler({"PATH": str(tmp_path), "CC": "my cc"}) == (("my", "cc"), False)
    for version, is_new_enough in (("9", False), ("12.2.0", True)):
        program = tmp_path / "gcc"
        program.write_text(f"#!/bin/sh\ntest $1 = -dumpversion && echo {version}\nexit 0\n")
        program.chmod(0o755)
        found = build_library.find_compiler({"PATH": str(tmp_path)})
        assert found == (((str(program),), False) if is_new_enough else None)
    program.write_text("#!/bin/sh\ntest $1 = -dumpversion && echo 12\n")  # it finds no headers
    assert build_library.find_compiler({"PATH": str(tmp_path)}) is None
    monkeypatch.setattr(build_library.importlib.util, "find_spec", lambda name: name)
    found = build_library.find_compiler({"PATH": ""})
    assert found is not None and found.command[1:4] == ("-m", "ziglang", "cc") and found.is_portable


def test_installed_packages_import(fresh_python: Path, tmp_path: Path) -> None:
    program = f"import {', '.join(PACKAGES)}\nprint(*[m.__file__ for m in ({', '.join(PACKAGES)})], sep='\\n')"
    for file in run(fresh_python, "-c", program, cwd=tmp_path).split():
        assert Path(file).is_relative_to(fresh_python.parent.parent)


def test_installed_version_is_the_projects(fresh_python: Path, tmp_path: Path) -> None:
    program = "from importlib.metadata import version; print(version('jaxserve'))"
    assert run(fresh_python, "-c", program, cwd=tmp_path).strip() == METADATA["project"]["version"]


def test_installed_command_runs(fresh_python: Path, tmp_path: Path) -> None:
    assert "generate" in run(fresh_python.parent / "jaxserve", "--help", cwd=tmp_path)


def test_every_folder_with_code_is_a_package() -> None:
    """The wheel holds only folders with an `__init__.py`, and what builds the native kernels beside their sources."""
    folders = {path.parent for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")}
    folders.remove(REPOSITORY / "pallas_kernels" / "native")
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "otel", "clients", "dev", "research", "ray"])
def test_extras_name_ranges(extra: str) -> None:
    """Every requirement has a lower bound or a pin; what lies under the constraints files is theirs."""
    requirements = METADATA["project"]["optional-dependencies"][extra]
    assert requirements
    assert [requirement for requirement in requirements if not re.search(r"[>=]=", requirement)] == []


def test_constraints_lie_within_the_ranges() -> None:
    """The tested sets are ones that `pip install jaxserve` would accept."""
    requirements = pytest.importorskip("packaging.requirements")
    project = METADATA["project"]
    extras = [project["optional-dependencies"][extra] for extra in ("dev", "clients", "otel", "research", "ray")]
    names = [requirements.Requirement(text) for some in [project["dependencies"], *extras] for text in some]
    for file in (REPOSITORY / "scripts").glob("constraints-*.txt"):
        pins = dict(line.split("==") for line in file.read_text().splitlines() if not line.startswith("#"))
        python = {"python_version": file.stem.removeprefix("constraints-")}
        for requirement in names:
            if requirement.marker is None or requirement.marker.evaluate(python):
                pin = pins[requirement.name.lower().replace("_", "-")]
                assert requirement.specifier.contains(pin), f"{file.name}: {requirement.name}=={pin}, not {requirement}"
