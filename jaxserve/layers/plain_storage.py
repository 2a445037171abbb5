"""Unquantized weights, each device's part packed for the implementation of ``linear``."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.storage import Arrays, StoredArray, Weight
from pallas_kernels.linear import Fused, LinearKernel
from pallas_kernels.registry import load


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Return one array: the devices' packed parts side by side."""
    first, second, *rest = _kernel(weight).packed_shape(*weight.local, weight.dtype, weight.is_gated)
    shape = (first * weight.parts[0], second * weight.parts[1], *rest)
    return {"weight": StoredArray(shape, weight.dtype, (*weight.axes, *[None] * len(rest)))}


def fill(weight: Weight, part: Float[np.ndarray, "outer inner"]) -> dict[str, np.ndarray]:
    """Pack one device's part."""
    return {"weight": _kernel(weight).pack(part, weight.is_gated)}


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> Float[np.ndarray, "outer inner"]:
    """Unpack one device's part, bit for bit."""
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


def _kernel(weight: Weight) -> LinearKernel:
    return cast(LinearKernel, load("linear", weight.kernel))
