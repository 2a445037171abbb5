"""Matrix multiplication in a native kernel for x86 CPUs, called through ``jax.ffi``.

A row's result depends on the row and the weight alone, whatever the number of rows and threads. Weights stay as
checkpoints store them. Activations are never rounded: weights in bfloat16 are widened in registers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.native_library import target, unavailable


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on such a device, or None."""
    del device_kind, sizes
    if platform != "cpu":
        return "native kernels run on CPUs"
    if dtype not in ("float32", "bfloat16"):
        return f"weights must be float32 or bfloat16, not {dtype}"
    return unavailable()


def matmul(x: Float[Array, "T inner"], weight: Float[Array, "outer inner"]) -> Float[Array, "T outer"]:
    """Compute ``x @ weight.T`` in float32; see ``linear.LinearKernel``."""
    struct = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(target("linear"), struct)(x.astype(jnp.float32), weight, jnp.int32(x.shape[0]))
