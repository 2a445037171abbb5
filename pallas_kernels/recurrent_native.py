"""What the native updates of recurrent layers share: checks, the layout of states, and copies of pages.

States lie in tiles of 16 values, ``[P, heads, tiles, keys, 16]``, the last filled up with zeros; see
``pallas_kernels/native/recurrent.h``. A token's results and the states have the same bits in every batch, however a
context is cut into steps, with any number of threads, with AVX2 and with AVX-512.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.native_library import target, unavailable
from pallas_kernels.recurrent_states import StateRows

_TILE = 16
_LEAST_TAPS, _MOST_TAPS = 2, 4


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on such a device with such sizes, or None."""
    del device_kind
    if platform != "cpu":
        return "native kernels run on CPUs"
    if dtype != "float32":
        return f"projections and tails must be float32, not {dtype}"
    if not _LEAST_TAPS <= sizes.get("taps", _MOST_TAPS) <= _MOST_TAPS:
        return f"a convolution must have {_LEAST_TAPS} to {_MOST_TAPS} taps, not {sizes['taps']}"
    return unavailable()


def state_shape(num_heads: int, num_keys: int, num_values: int) -> tuple[int, ...]:
    """Return the shape of one page of states."""
    return num_heads, -(-num_values // _TILE), num_keys, _TILE


def to_layout(state: Float[Array, "P heads keys values"]) -> Float[Array, "P heads tiles keys 16"]:
    """Return states in tiles."""
    num_pages, num_heads, num_keys, num_values = state.shape
    tiles = -(-num_values // _TILE)
    padded = jnp.pad(state, ((0, 0), (0, 0), (0, 0), (0, tiles * _TILE - num_values)))
    return padded.reshape(num_pages, num_heads, num_keys, tiles, _TILE).swapaxes(2, 3)


def from_layout(state: Float[Array, "P heads tiles keys 16"], num_values: int) -> Float[Array, "P heads keys values"]:
    """Return states as matrices: the inverse of ``to_layout``."""
    num_pages, num_heads, tiles, num_keys, _ = state.shape
    return state.swapaxes(2, 3).reshape(num_pages, num_heads, num_keys, tiles * _TILE)[..., :num_values]


def copy_states(
    arrays: tuple[Float[Array, "P ..."], ...], sources: Int[Array, " C"], targets: Int[Array, " C"]
) -> tuple[Float[Array, "P ..."], ...]:
    """Copy pages, in place where the caller donates the arrays; see ``recurrent_states.copy_states``."""
    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    aliases = {index: index for index in range(len(arrays))}
    call = jax.ffi.ffi_call(target("copy_pages"), results, input_output_aliases=aliases)
    return tuple(call(*arrays, sources, targets))


def row_arrays(rows: StateRows, num_tokens: int) -> tuple[Int[Array, "4 R"], Int[Array, " T"]]:
    """Return rows as the handlers take them: the fields of rows, and the page that is also written after each token.

    XLA computes this once for all layers.
    """
    return jnp.stack([field.astype(jnp.int32) for field in rows[:4]]), rows.pages_after(num_tokens)


def float32(parameter: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Return a parameter as the handlers take it; an absent one is empty."""
    return jnp.zeros(0, jnp.float32) if parameter is None else parameter.astype(jnp.float32)
