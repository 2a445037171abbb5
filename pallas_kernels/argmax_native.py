"""Argmax of each row, in a native kernel for x86 CPUs, called through ``jax.ffi``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.native_library import target, unavailable


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on such a device, or None."""
    del device_kind, dtype, sizes
    return "native kernels run on CPUs" if platform != "cpu" else unavailable()


def argmax(scores: Float[Array, "R V"], num_rows: Int[Array, ""] | None = None) -> Int[Array, " R"]:
    """Return the places; see ``argmax.ArgmaxKernel``."""
    count = jnp.int32(scores.shape[0]) if num_rows is None else num_rows
    return jax.ffi.ffi_call(target("argmax"), jax.ShapeDtypeStruct(scores.shape[:1], jnp.int32))(scores, count)
