"""Find the library of native CPU kernels, choose its threads, and register its handlers with XLA.

``setup.py`` builds it from ``pallas_kernels/native`` into this folder. It runs on x86-64 Linux with AVX2 or AVX-512,
which is decided when it is loaded, and with AMX, or AMD's products of bfloat16, where the CPU has them; elsewhere
``unavailable`` says why there is none. ``JAXSERVE_MAX_CPU_ISA`` (avx2, avx512, avx512_vnni, avx512bf16 or
amx) keeps it to older instructions, for the same bits on other machines.
"""

import ctypes
import functools
import math
import os
from pathlib import Path

import jax

VERSION = 24  # of handlers.c
PATH = Path(__file__).with_name("libjaxserve_native.so")
_INSTRUCTIONS = ("neither AVX2 nor AVX-512", "avx2", "avx512", "avx512_vnni", "avx512bf16", "amx")
_LIMIT = "JAXSERVE_MAX_CPU_ISA"
_HANDLERS = (
    *("attend", "attend_latents", "write_kv", "write_latents", "qkv_write", "copy_pages"),
    *("linear", "grouped_matmul", "argmax", "truncation"),
    *("quantized_linear", "quantized_grouped_matmul", "quantized_rows"),
    *("delta_net", "mamba2", "short_convolution"),
)


@functools.cache
def unavailable() -> str | None:
    """Return why the native kernels cannot run in this process, or None; loads and registers them the first time."""
    if not PATH.exists():
        return "the native library was not built (pip install builds it on x86-64 Linux)"
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    if library.jaxserve_version() != VERSION:
        return f"the native library has version {library.jaxserve_version()}, this code {VERSION}; reinstall with pip"
    if not library.jaxserve_instructions():
        return f"the CPU has {_INSTRUCTIONS[0]}"
    library.jaxserve_limit_instructions(_INSTRUCTIONS.index(_limit()))
    library.jaxserve_set_threads(default_threads())
    for name in _HANDLERS:
        handler = jax.ffi.pycapsule(getattr(library, f"jaxserve_{name}"))
        jax.ffi.register_ffi_target(_target(name), handler, platform="cpu")
    return None


def target(name: str) -> str:
    """Return the name that XLA calls a handler by.

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    library()
    return _target(name)


def library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    reason = unavailable()
    if reason is not None:
        raise NotImplementedError(reason)
    return ctypes.CDLL(str(PATH))


def instructions() -> str:
    """Name the newest instructions that the kernels use here: ``avx2``, ``avx512``, ``avx512_vnni`` (with
    products of 8 bits), ``avx512bf16`` (AMD's, with those of bfloat16 too), or ``amx`` (with tiles)."""
    return _INSTRUCTIONS[min(library().jaxserve_instructions(), _INSTRUCTIONS.index(_limit()))]


def set_threads(count: int | None) -> None:
    """Set the number of threads that all native kernels of this process share; None for the default.

    Without native kernels there is nothing to set.
    """
    if unavailable() is None:
        library().jaxserve_set_threads(default_threads() if count is None else count)


def num_threads() -> int:
    """Return the number of threads that the native kernels share."""
    return library().jaxserve_threads()


def default_threads() -> int:
    """Return the threads that this process may run at once: CPUs of its affinity, and of its cgroups' quotas."""
    return max(1, min(len(os.sched_getaffinity(0)), quota_cpus(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))))


def quota_cpus(root: Path, membership: Path) -> int:
    """Return the CPUs that the smallest quota of a process's cgroups comes to, rounded up; very many without a quota.

    Args:
        root: Where cgroups are mounted (version 2, or version 1 with a folder for each controller).
        membership: The process's cgroups, as ``/proc/self/cgroup`` lists them: ``number:controllers:path``.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    paths = [Path(path.lstrip("/")) for _, controllers, path in lines if controllers in ("", "cpu", "cpu,cpuacct")]
    folders = {folder for path in [Path(), *paths] for folder in (path, *path.parents)}
    return min(_quota(root, folder) for folder in folders)


def _quota(root: Path, folder: Path) -> int:
    """Return the CPUs of one cgroup's own quota."""
    try:
        quota, period = (root / folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (root / "cpu" / folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        except OSError:
            return 1 << 16
    if quota in ("max", "-1") or int(period) <= 0:
        return 1 << 16
    return math.ceil(int(quota) / int(period))


def _limit() -> str:
    """Return the newest instruction set that may be used.

    Raises:
        ValueError: The environment variable names another one.
    """
    limit = os.environ.get(_LIMIT) or _INSTRUCTIONS[-1]
    if limit not in _INSTRUCTIONS[1:]:
        raise ValueError(f"{_LIMIT}: expected {', '.join(_INSTRUCTIONS[1:-1])} or {_INSTRUCTIONS[-1]}, got {limit!r}")
    return limit


def _target(name: str) -> str:
    """Name a handler with its version: a program in a cache must not find a handler that it was not compiled for."""
    return f"jaxserve_{name}_{VERSION}"
