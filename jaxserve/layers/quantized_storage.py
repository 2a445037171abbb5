"""Quantized weights as checkpoints have them: rows of records, each device's part packed for the implementation of
``quantized_linear`` or, for experts, ``quantized_grouped_matmul``.

Outputs that hold different things (a mixture of types of blocks in one fused projection, or other orders of features)
are *segments*: each is an array of its own and has its own product. Where features are sorted by group, a second array
says which feature of a row each of them is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.storage import Arrays, Segment, StoredArray, Weight
from pallas_kernels.linear import Fused, finished
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_grouped_matmul import QuantizedGroupedMatmul
from pallas_kernels.quantized_linear import QuantizedLinear
from pallas_kernels.registry import load


class _Part(NamedTuple):
    """A segment of one device's outputs: its array's name, its outputs, what they hold, and its features."""

    name: str
    outputs: slice
    form: Form
    inner: int
    is_sorted: bool

    @property
    def order(self) -> str:
        """Name of the array with the order of features, where they are sorted."""
        return order_of(self.name)

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
        if part.is_sorted:
            found[part.order] = StoredArray((part.inner * weight.parts[1],), "int32", weight.axes[1:])
    return found


def names_of(segments: Sequence[Segment]) -> list[str]:
    """Return the name of each segment's array."""
    return ["weight"] if len(segments) == 1 else [f"segment_{number}" for number in range(len(segments))]


def order_of(name: str) -> str:
    """Return the name of the array with the order of a segment's features."""
    return f"{name}_order"


def fill(weight: Weight, part: UInt8[np.ndarray, "outer bytes"]) -> dict[str, np.ndarray]:
    """Pack one device's rows of records; arrays with orders are not made of them."""
    if weight.experts is not None:
        (each,) = _parts(weight)
        matrices = part.reshape(-1, weight.local[0], part.shape[1])
        return {each.name: _grouped_kernel(weight).pack(matrices, each.form, weight.is_gated)}
    kernel, is_gated = _kernel(weight), _is_gated(weight)
    return {
        each.name: kernel.pack(
            np.ascontiguousarray(part[each.outputs, : each.form.row_bytes(each.inner)]), each.form, is_gated
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
    rows = np.zeros((outer, max(each.form.row_bytes(each.inner) for each in parts)), np.uint8)
    for each in parts:
        found = kernel.unpack(arrays[each.name], each.num_outputs, each.inner, each.form, is_gated)
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
        return _product(kernel, parts[0], arrays, x, fused, num_rows)
    products = [_product(kernel, part, arrays, x, Fused(fused.norm), num_rows) for part in parts]
    y = jnp.concatenate(products, axis=1)
    return finished(y, fused, y.dtype)


def rows(weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Decode rows of the packed weight, using the kernel."""
    (part,) = _parts(weight)
    found = _kernel(weight).rows(arrays[part.name], indices, part.inner, part.form)
    if not part.is_sorted:
        return found
    inner = weight.local[1]
    return jnp.zeros((len(indices), inner), found.dtype).at[:, arrays[part.order]].set(found, mode="drop")


def grouped_matmul(
    weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """Multiply each row by the matrix of its expert, using the kernel."""
    (part,) = _parts(weight)
    num_out = weight.local[0] // (1 + weight.is_gated)
    return _grouped_kernel(weight).grouped_matmul(
        x, arrays[part.name], group_sizes, num_out, part.form, is_gated=weight.is_gated
    )


def _product(
    kernel: QuantizedLinear,
    part: _Part,
    arrays: Arrays,
    x: Float[Array, "T inner"],
    fused: Fused,
    num_rows: Int[Array, ""] | None,
) -> Float[Array, "T results"]:
    order = arrays[part.order] if part.is_sorted else None
    packed, outer = arrays[part.name], part.num_outputs
    return kernel.matmul(x, packed, outer, part.form, fused=fused, num_rows=num_rows, order=order)


def _parts(weight: Weight) -> Iterator[_Part]:
    start = 0
    for name, segment in zip(names_of(weight.segments), weight.segments, strict=True):
        end = start + segment.num_outputs
        inner = segment.num_sorted or weight.local[1]
        yield _Part(name, slice(start, end), segment.form, inner, bool(segment.num_sorted))
        start = end


def _is_gated(weight: Weight) -> bool:
    """Whether the kernel gates; gates and what they multiply that differ in form are segments, gated afterwards."""
    return weight.is_gated and len(weight.segments) == 1


def _packed_shape(weight: Weight, part: _Part) -> tuple[int, ...]:
    kernel = _kernel(weight) if weight.experts is None else _grouped_kernel(weight)
    return kernel.packed_shape(part.num_outputs, part.inner, part.form, _is_gated(weight))


def _kernel(weight: Weight) -> QuantizedLinear:
    return cast(QuantizedLinear, load("quantized_linear", weight.kernel))


def _grouped_kernel(weight: Weight) -> QuantizedGroupedMatmul:
    return cast(QuantizedGroupedMatmul, load("quantized_grouped_matmul", weight.kernel))
