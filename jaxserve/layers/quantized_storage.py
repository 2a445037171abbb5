"""Quantized weights as checkpoints have them: rows of records, each device's part packed for the implementation of
``quantized_linear`` or, for experts, ``quantized_grouped_matmul``.

Outputs that hold different things (a mixture of types of blocks in one fused projection) are *segments*: each is an
array of its own and has its own product.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.storage import Arrays, StoredArray, Weight
from pallas_kernels.linear import Fused, finished
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_grouped_matmul import QuantizedGroupedMatmul
from pallas_kernels.quantized_linear import QuantizedLinear
from pallas_kernels.registry import load


class _Part(NamedTuple):
    """A segment of one device's outputs: its array's name, its outputs and what they hold."""

    name: str
    outputs: slice
    form: Form

    @property
    def num_outputs(self) -> int:
        return self.outputs.stop - self.outputs.start


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Return an array for each segment: the devices' packed parts side by side."""
    found: dict[str, StoredArray] = {}
    for part in _parts(weight):
        first, second, *rest = _packed_shape(weight, part)
        shape = (first * weight.parts[0], second * weight.parts[1], *rest)
        axes = (*weight.axes, *[None] * len(rest))
        if weight.experts is not None:
            shape, axes = (weight.experts.num_experts, *shape), ("experts", *axes)
        found[part.name] = StoredArray(shape, "uint8", axes)
    return found


def fill(weight: Weight, part: UInt8[np.ndarray, "outer bytes"]) -> dict[str, np.ndarray]:
    """Pack one device's rows of records."""
    if weight.experts is not None:
        (each,) = _parts(weight)
        matrices = part.reshape(-1, weight.local[0], part.shape[1])
        return {each.name: _grouped_kernel(weight).pack(matrices, each.form, weight.is_gated)}
    kernel, inner, is_gated = _kernel(weight), weight.local[1], _is_gated(weight)
    return {
        each.name: kernel.pack(
            np.ascontiguousarray(part[each.outputs, : each.form.row_bytes(inner)]), each.form, is_gated
        )
        for each in _parts(weight)
    }


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> UInt8[np.ndarray, "outer bytes"]:
    """Unpack one device's rows of records, bit for bit."""
    (outer, inner), is_gated = weight.local, _is_gated(weight)
    parts = list(_parts(weight))
    if weight.experts is not None:
        (each,) = parts
        found = _grouped_kernel(weight).unpack(arrays[each.name], outer, inner, each.form, is_gated)
        return found.reshape(-1, found.shape[-1])
    kernel = _kernel(weight)
    rows = np.zeros((outer, max(each.form.row_bytes(inner) for each in parts)), np.uint8)
    for each in parts:
        found = kernel.unpack(arrays[each.name], each.num_outputs, inner, each.form, is_gated)
        rows[each.outputs, : found.shape[1]] = found
    return rows


def matmul(
    weight: Weight,
    arrays: Arrays,
    x: Float[Array, "T inner"],
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """Multiply by the packed weight, using the kernel."""
    kernel, parts = _kernel(weight), list(_parts(weight))
    if len(parts) == 1:
        (part,) = parts
        return kernel.matmul(x, arrays[part.name], part.num_outputs, part.form, fused=fused, num_rows=num_rows)
    products = [
        kernel.matmul(
            x,
            arrays[part.name],
            part.num_outputs,
            part.form,
            fused=Fused(fused.norm),
            num_rows=num_rows,
        )
        for part in parts
    ]
    y = jnp.concatenate(products, axis=1)
    return finished(y, fused, y.dtype)


def rows(weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Decode rows of the packed weight, using the kernel."""
    (part,) = _parts(weight)
    return _kernel(weight).rows(arrays[part.name], indices, weight.local[1], part.form)


def grouped_matmul(
    weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """Multiply each row by the matrix of its expert, using the kernel."""
    (part,) = _parts(weight)
    num_out = weight.local[0] // (1 + weight.is_gated)
    return _grouped_kernel(weight).grouped_matmul(
        x, arrays[part.name], group_sizes, num_out, part.form, is_gated=weight.is_gated
    )


def _parts(weight: Weight) -> Iterator[_Part]:
    start = 0
    for number, (num_outputs, form) in enumerate(weight.segments):
        name = "weight" if len(weight.segments) == 1 else f"segment_{number}"
        yield _Part(name, slice(start, start + num_outputs), form)
        start += num_outputs


def _is_gated(weight: Weight) -> bool:
    """Whether the kernel gates; gates and what they multiply that differ in form are segments, gated afterwards."""
    return weight.is_gated and len(weight.segments) == 1


def _packed_shape(weight: Weight, part: _Part) -> tuple[int, ...]:
    kernel = _kernel(weight) if weight.experts is None else _grouped_kernel(weight)
    return kernel.packed_shape(part.num_outputs, weight.local[1], part.form, _is_gated(weight))


def _kernel(weight: Weight) -> QuantizedLinear:
    return cast(QuantizedLinear, load("quantized_linear", weight.kernel))


def _grouped_kernel(weight: Weight) -> QuantizedGroupedMatmul:
    return cast(QuantizedGroupedMatmul, load("quantized_grouped_matmul", weight.kernel))
