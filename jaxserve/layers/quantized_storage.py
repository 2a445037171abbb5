"""Quantized weights as checkpoints have them: rows of records, each device's part packed for the implementation of
``quantized_linear`` or ``quantized_grouped_matmul``."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.storage import Arrays, StoredArray, Weight
from pallas_kernels.linear import Fused
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_linear import QuantizedLinear
from pallas_kernels.registry import load


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Return one array: the devices' packed parts side by side, for each expert if there are experts."""
    first, second, *rest = _kernel(weight).packed_shape(*weight.local, _form(weight), weight.is_gated)
    shape = (first * weight.parts[0], second * weight.parts[1], *rest)
    axes = (*weight.axes, *[None] * len(rest))
    if weight.experts is not None:
        shape, axes = (weight.experts.num_experts, *shape), ("experts", *axes)
    return {"weight": StoredArray(shape, "uint8", axes)}


def fill(weight: Weight, part: UInt8[np.ndarray, "outer bytes"]) -> dict[str, np.ndarray]:
    """Pack one device's rows of records."""
    kernel, form = _kernel(weight), _form(weight)
    if weight.experts is None:
        return {"weight": kernel.pack(part, form, weight.is_gated)}
    matrices = part.reshape(-1, weight.local[0], part.shape[1])
    return {"weight": np.stack([kernel.pack(each, form, weight.is_gated) for each in matrices])}


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> UInt8[np.ndarray, "outer bytes"]:
    """Unpack one device's rows of records, bit for bit."""
    kernel, form = _kernel(weight), _form(weight)
    packed = arrays["weight"] if weight.experts is not None else arrays["weight"][None]
    return np.concatenate([kernel.unpack(each, *weight.local, form, weight.is_gated) for each in packed])


def matmul(
    weight: Weight,
    arrays: Arrays,
    x: Float[Array, "T inner"],
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """Multiply by the packed weight, using the kernel."""
    return _kernel(weight).matmul(x, arrays["weight"], weight.local[0], _form(weight), fused=fused, num_rows=num_rows)


def rows(weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Decode rows of the packed weight, using the kernel."""
    return _kernel(weight).rows(arrays["weight"], indices, weight.local[1], _form(weight))


def grouped_matmul(
    weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """Multiply each row by the matrix of its expert, using the kernel."""
    raise NotImplementedError


def _kernel(weight: Weight) -> QuantizedLinear:
    return cast(QuantizedLinear, load("quantized_linear", weight.kernel))


def _form(weight: Weight) -> Form:
    assert weight.form is not None, weight
    return weight.form
