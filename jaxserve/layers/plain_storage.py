"""Unquantized weights, each device's part packed for the implementation of ``linear`` or ``grouped_matmul``."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.storage import Arrays, StoredArray, Weight
from pallas_kernels.grouped_matmul import GroupedMatmul
from pallas_kernels.linear import Fused, LinearKernel
from pallas_kernels.registry import load


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Return one array: the devices' packed parts side by side, for each expert if there are experts."""
    kernel = _kernel(weight) if weight.experts is None else _grouped_kernel(weight)
    first, second, *rest = kernel.packed_shape(*weight.local, weight.dtype, weight.is_gated)
    shape = (first * weight.parts[0], second * weight.parts[1], *rest)
    axes = (*weight.axes, *[None] * len(rest))
    if weight.experts is not None:
        shape, axes = (weight.experts.num_experts, *shape), ("experts", *axes)
    return {"weight": StoredArray(shape, weight.dtype, axes)}


def fill(weight: Weight, part: Float[np.ndarray, "outer inner"]) -> dict[str, np.ndarray]:
    """Pack one device's part."""
    if weight.experts is not None:
        return {"weight": _grouped_kernel(weight).pack(part.reshape(-1, *weight.local), weight.is_gated)}
    return {"weight": _kernel(weight).pack(part, weight.is_gated)}


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> Float[np.ndarray, "outer inner"]:
    """Unpack one device's part, bit for bit."""
    if weight.experts is not None:
        matrices = _grouped_kernel(weight).unpack(arrays["weight"], *weight.local, weight.is_gated)
        return matrices.reshape(-1, weight.local[1])
    return _kernel(weight).unpack(arrays["weight"], *weight.local, weight.is_gated)


def matmul(
    weight: Weight,
    arrays: Arrays,
    x: Float[Array, "T inner"],
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """Multiply by the packed weight, using the kernel."""
    return _kernel(weight).matmul(x, arrays["weight"], weight.local[0], fused=fused, num_rows=num_rows)


def rows(weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Read rows of the packed weight, using the kernel."""
    return _kernel(weight).rows(arrays["weight"], indices, weight.local[1])


def grouped_matmul(
    weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """Multiply each row by the matrix of its expert, using the kernel."""
    num_out = weight.local[0] // (1 + weight.is_gated)
    kernel = _grouped_kernel(weight)
    return kernel.grouped_matmul(x, arrays["weight"], group_sizes, num_out, is_gated=weight.is_gated)


def _kernel(weight: Weight) -> LinearKernel:
    return cast(LinearKernel, load("linear", weight.kernel))


def _grouped_kernel(weight: Weight) -> GroupedMatmul:
    return cast(GroupedMatmul, load("grouped_matmul", weight.kernel))
