"""A toy storage method for tests: rows of 8-bit integers, and a scale for each row."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.storage import Arrays, StoredArray, Weight, load_method
from pallas_kernels.linear import Fused


def arrays(weight: Weight) -> dict[str, StoredArray]:
    """Integers and scales; features that are split have scales of their own on each device."""
    columns = weight.parts[1]
    return {
        "rows": StoredArray((weight.outer, weight.inner), "int8", weight.axes),
        "scales": StoredArray((weight.outer, columns), "float32", weight.axes),
    }


def fill(weight: Weight, part: Float[np.ndarray, "outer inner"]) -> dict[str, np.ndarray]:
    """Rows divided by their largest element, rounded."""
    part = part.astype(np.float32)
    scales = np.maximum(np.abs(part).max(1, keepdims=True), 1e-9) / 127
    return {"rows": np.rint(part / scales).astype(np.int8), "scales": scales}


def restore(weight: Weight, arrays: Mapping[str, np.ndarray]) -> Float[np.ndarray, "outer inner"]:
    """The rounded rows."""
    return (arrays["rows"] * arrays["scales"]).astype(weight.dtype)


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
