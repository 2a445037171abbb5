"""Matrix multiplication by quantized weights in XLA. Runs anywhere; weights are kept as rows of records, of which some
at a time are decoded for a product in float32."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.linear import Fused, finished
from pallas_kernels.qkv_write import normed
from pallas_kernels.quantized import Form, decode
from pallas_kernels.quantized_linear import ordered, rounded

_MOST_DECODED = 1 << 22  # elements at a time


def unsupported(platform: str, device_kind: str, dtype: str, *, form: Form | None = None) -> str | None:
    """Return None: it runs everywhere, with every form."""
    del platform, device_kind, dtype, form
    return None


def packed_shape(outer: int, inner: int, form: Form, is_gated: bool = False) -> tuple[int, ...]:
    """Return the shape of the records."""
    del is_gated
    return outer, form.row_bytes(inner)


def pack(
    records: UInt8[np.ndarray, "outer bytes"], form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "outer bytes"]:
    """Return the records themselves."""
    del form, is_gated
    return records


def unpack(
    packed: UInt8[np.ndarray, "outer bytes"], outer: int, inner: int, form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "outer bytes"]:
    """Return the records themselves."""
    del is_gated
    assert packed.shape == (outer, form.row_bytes(inner)), packed.shape
    return packed


def rows(
    packed: UInt8[Array, "outer bytes"], indices: Int[Array, " T"], inner: int, form: Form
) -> Float[Array, "T inner"]:
    """Return rows of the weight."""
    del inner
    return decode(packed[indices], form)


def matmul(
    x: Float[Array, "T features"],
    packed: UInt8[Array, "outer bytes"],
    outer: int,
    form: Form,
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
    order: Int[Array, " inner"] | None = None,
) -> Float[Array, "T results"]:
    """Compute ``x @ weight.T`` and what is fused with it; see ``quantized_linear.QuantizedLinear``."""
    del num_rows
    if fused.norm is not None:
        x = normed(x, *fused.norm)
    x = x if order is None else ordered(x, order)
    y = product(rounded(x.astype(jnp.float32), form), packed, outer, form)
    return finished(y, fused, x.dtype)


def product(
    x: Float[Array, "T inner"], packed: UInt8[Array, "outer bytes"], outer: int, form: Form
) -> Float[Array, "T outer"]:
    """Return ``x @ weight.T`` in float32, for some outputs after the others."""

    def of(records: UInt8[Array, "some bytes"]) -> Float[Array, "T some"]:
        return lax.dot_general(x, decode(records, form), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

    at_once = max(1, _MOST_DECODED // x.shape[1])
    num_parts = outer // at_once
    if num_parts < 2:
        return of(packed)
    whole = num_parts * at_once
    parts = lax.map(of, packed[:whole].reshape(num_parts, at_once, -1))
    y = jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], whole)
    return y if whole == outer else jnp.concatenate([y, of(packed[whole:])], axis=1)
