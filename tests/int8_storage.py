"""A toy storage method for tests: rows of 8-bit integers, and a scale for each row."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.storage import Arrays, StoredArray, Weight, load_method
from pallas_kernels.linear import Fused


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Integers and scales; features that are split have scales of their own on each device."""
    experts = () if weight.experts is None else (weight.experts.num_experts,)
    axes = (*("experts" for _ in experts), *weight.axes)
    return {
        "rows": StoredArray((*experts, weight.outer, weight.inner), "int8", axes),
        "scales": StoredArray((*experts, weight.outer, weight.parts[1]), "float32", axes),
    }


def fill(weight: Weight, part: Float[np.ndarray, "outer inner"]) -> dict[str, np.ndarray]:
    """Rows divided by their largest element, rounded."""
    part = part.astype(np.float32)
    scales = np.maximum(np.abs(part).max(1, keepdims=True), 1e-9) / 127
    stacked = (-1,) if weight.experts is None else (-1, weight.local[0])
    rows = np.rint(part / scales).astype(np.int8)
    return {"rows": rows.reshape(*stacked, rows.shape[1]), "scales": scales.reshape(*stacked, 1)}


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> Float[np.ndarray, "outer inner"]:
    """The rounded rows."""
    return (arrays["rows"] * arrays["scales"]).astype(weight.dtype).reshape(-1, weight.local[1])


def grouped_matmul(
    weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """The products by the plain method, with the rounded rows."""
    restored = (arrays["rows"] * arrays["scales"]).astype(weight.dtype)
    return load_method("plain").grouped_matmul(weight, {"weight": restored}, x, group_sizes)


def matmul(
    weight: Weight,
    arrays: Arrays,
    x: Float[Array, "T inner"],
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """The product by the plain method, with the rounded rows."""
    restored = (arrays["rows"] * arrays["scales"]).astype(weight.dtype)
    return load_method("plain").matmul(weight, {"weight": restored}, x, fused=fused, num_rows=num_rows)


def rows(weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Rounded rows."""
    return (arrays["rows"][indices] * arrays["scales"][indices]).astype(jnp.dtype(weight.dtype))
