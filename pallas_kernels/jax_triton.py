"""Calls kernels written in Triton from JAX; the only module that uses jax-triton.

Both packages are optional (``pip install jaxserve[cuda13]``) and imported when a kernel is first used; modules
that hold ``@triton.jit`` functions (``*_kernels.py``) are imported the same way, through ``kernels``.
"""

import functools
import importlib
import importlib.metadata
import re
from types import ModuleType
from typing import Any

from jaxtyping import Array, PyTree

_MOST_REGISTERS = 248  # ptxas's default limit is low, so that it spills
PTX_VERSION = 85  # of CUDA 12.5: XLA assembles with the first ptxas on PATH, which may be older than Triton's own
_HOPPER = re.compile(r"NVIDIA G?H(20|100|200|800)\b")  # tiles fill its shared memory; newer ones need newer PTX
_OLDEST_JAX_TRITON = (0, 4)


def unsupported(platform: str, device_kind: str) -> str | None:
    """Return why Triton kernels cannot run on a device, or None; names a missing package."""
    if platform not in ("gpu", "cuda") or not _HOPPER.search(device_kind):
        return f"Triton kernels are tuned and compiled for NVIDIA Hopper GPUs, not for {device_kind} ({platform})"
    return _missing()


def kernels(module: str) -> ModuleType:
    """Return the module ``pallas_kernels.<module>``, which imports triton at its top."""
    return importlib.import_module(f"pallas_kernels.{module}")


def call(
    kernel: Any,
    *arrays: Array | int | float,
    out_type: PyTree,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> Any:
    """What a Triton kernel writes.

    Args:
        kernel: An ``@triton.jit`` function: takes the arrays, then pointers to the outputs, then ``tl.constexpr``s.
        arrays: Its inputs in order; numbers among them are its run-time scalars.
        out_type: Shapes and types of its outputs.
        grid: Programs in up to three dimensions.
        num_warps: Warps of a program.
        num_stages: Tiles in flight in its loops.
        constants: Its ``tl.constexpr`` arguments.
    """
    return _jax_triton().triton_call(
        *arrays,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        backend_options=backend_options(num_warps, num_stages),
        **constants,
    )


def backend_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """Return options of Triton's compiler; fused multiply-add is set because its default depends on the version."""
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": _MOST_REGISTERS,
        "ptx_version": PTX_VERSION,
        "enable_fp_fusion": True,
    }


@functools.cache
def _missing() -> str | None:
    for package in ("triton", "jax-triton"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"needs the package {package}, which is not installed"
        if package == "jax-triton" and _numbers(version) < _OLDEST_JAX_TRITON:
            return f"needs jax-triton 0.4.1 or newer (Python 3.12, JAX 0.11), not {version}"
    plugin = importlib.import_module("jaxlib.gpu_triton")  # empty without the plugin
    if getattr(plugin, "TritonKernel", None) is None:
        return "needs jaxlib with its CUDA plugin (jax[cuda13]), which is not installed"
    return None


@functools.cache
def _jax_triton() -> Any:
    driver = importlib.import_module("triton.backends.nvidia.driver")
    vars(driver).setdefault("TMA_TF32", None)  # jax-triton imports it; Triton 3.6 lacks it and nothing here uses it
    return importlib.import_module("jax_triton")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
