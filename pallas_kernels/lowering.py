"""Lowering for NVIDIA GPUs on a machine that has none: checks anywhere what a kernel's compiler front end accepts."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh


def lower_for_cuda(function: Callable[..., Any], *arguments: Any, device_kind: str = "NVIDIA H200") -> str:
    """Return the StableHLO text of a function lowered for CUDA.

    JAX 0.11 lowers GPU kernels only for a device it knows; an abstract mesh names one that need not be there.

    Args:
        function: Takes arrays.
        arguments: Arrays or their shapes.
        device_kind: The device's own name.
    """
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with warnings.catch_warnings(), use_abstract_mesh(mesh):
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # JAX 0.11 on Pallas-Triton
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
