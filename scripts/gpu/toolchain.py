"""Find CUDA's assembler and the packages that parts need, before JAX is imported.

JAX takes the folder of the package ``nvidia.cu13`` for CUDA's own; where it holds no ``bin/ptxas``, as with the wheels
of CUDA's libraries alone, JAX ends up with a path called "None". ``CUDA_ROOT`` overrides that.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-triton",
    "triton",
    "flax",
    "torch",
    "transformers",
    "llguidance",
)
NEEDED_BY = {
    "flax": "the engine part",
    "llguidance": "the engine part",
    "jax-triton": "the rows jax-triton of paged_attention and triton of int4_matmul and grouped_matmul",
    "triton": "the rows jax-triton of paged_attention and triton of int4_matmul and grouped_matmul",
    "torch": "PyTorch's ceilings and peers",
    "transformers": "the engine part and the peer of that name",
}


class Assembler(NamedTuple):
    """Where CUDA's assembler ``ptxas`` is, in ``root/bin``, and its version."""

    root: Path
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        """Return the version and the path, for the results."""
        return f"{'.'.join(map(str, self.version))} ({self.root / 'bin' / 'ptxas'})"


def find_assembler(environment: Mapping[str, str]) -> Assembler | None:
    """Find the newest ``ptxas`` that runs; the one that ``CUDA_ROOT`` names wins over all others.

    Args:
        environment: The process's variables.
    """
    named = environment.get("CUDA_ROOT")
    if named and (found := _assembler(Path(named))) is not None:
        return found
    candidates = (_assembler(root) for root in dict.fromkeys(_roots(environment)))
    # XLA reads the folder's libdevice too. With equal versions the first counts: JAX's wheels, a toolkit, Triton's own.
    found = (each for each in candidates if each is not None)
    return max(found, key=lambda each: ((each.root / "nvvm" / "libdevice").is_dir(), each.version), default=None)


def variables(environment: Mapping[str, str], assembler: Assembler | None) -> dict[str, str]:
    """Return what to set before JAX is imported, so that XLA, Mosaic and Triton find the same assembler."""
    if assembler is None:
        return {}
    path = os.pathsep.join([str(assembler.root / "bin"), environment.get("PATH", "")])
    return {"CUDA_ROOT": str(assembler.root), "PATH": path.rstrip(os.pathsep)}


def versions(assembler: Assembler | None) -> dict[str, str]:
    """Return the versions of all that the figures depend on."""
    found = {"python": platform.python_version()}
    found |= {package: _version(package) or "not installed" for package in PACKAGES}
    return found | {"ptxas": "not found" if assembler is None else assembler.text}


def missing(found: Mapping[str, str]) -> list[str]:
    """Return a line for each package that a part needs and that is not installed.

    Args:
        found: From ``versions``.
    """
    lines = [
        f"missing: {package}, which {what} cannot run without; install its wheel (pip install --no-index --no-deps "
        f"--target DIR {package.replace('-', '_')}-*.whl, with DIR on PYTHONPATH)"
        for package, what in NEEDED_BY.items()
        if found[package] == "not installed"
    ]
    if found["ptxas"] == "not found":
        lines.append("missing: ptxas, without which Mosaic kernels do not compile; set CUDA_ROOT to a CUDA toolkit")
    return lines


def _roots(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders that may be a CUDA toolkit's."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        yield from _package_folders(package)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            yield Path(environment[name])
    yield from sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    on_path = shutil.which("ptxas", path=environment.get("PATH"))
    if on_path:
        yield Path(on_path).resolve().parents[1]
    for folder in _package_folders("triton"):
        yield folder / "backends" / "nvidia"


def _package_folders(package: str) -> list[Path]:
    """Return where a package lies, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package around it is not there
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _assembler(root: Path) -> Assembler | None:
    """Ask the ``ptxas`` of a folder for its version; None if it does not run."""
    try:
        done = subprocess.run(
            [str(root / "bin" / "ptxas"), "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", done.stdout)
    return Assembler(root, tuple(int(part) for part in match.groups())) if match else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
