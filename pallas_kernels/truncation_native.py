"""Min-p, top-k and top-p in a native kernel for x86 CPUs, called through ``jax.ffi``.

A row's tokens are counted, or their weights added up, in bins by how far their score is below the largest; only the bin
in which the wanted mass is reached is sorted. A row's floor depends on the row alone, whatever the number of threads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.native_library import target, unavailable


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on such a device, or None."""
    del device_kind, sizes
    if platform != "cpu":
        return "native kernels run on CPUs"
    return f"scores must be float32, not {dtype}" if dtype != "float32" else unavailable()


def floor(
    scores: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """Return the lowest score each row keeps; see ``Truncation.floor``."""
    call = jax.ffi.ffi_call(target("truncation"), jax.ShapeDtypeStruct(top_p.shape, jnp.float32))
    return call(scores, top_k.astype(jnp.int32), top_p.astype(jnp.float32), min_p.astype(jnp.float32))
