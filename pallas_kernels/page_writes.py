"""Writes to pools of pages in plain XLA, which implementations of several operations share."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import AttentionBatch


def as_stored(
    pools: tuple[Float[Array, "P ..."], Float[Array, "P ..."]], key: Float[Array, "T K H"], value: Float[Array, "T K H"]
) -> tuple[Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Convert keys and values to the dtypes of their pools, with all values finite.

    A value that is not a number would reach the page's next owner, since masked values count as zero times
    themselves: it moves to the key, which is masked before it counts and makes its own text's scores no numbers either.
    """
    key_pool, value_pool = pools
    key, value = key.astype(key_pool.dtype), value.astype(value_pool.dtype)
    is_finite = jnp.isfinite(value)
    return jnp.where(is_finite, key, jnp.nan), jnp.where(is_finite, value, 0)


def as_stored_latents(
    pool: Float[Array, "P ..."], key: Float[Array, "T 1 rotated"], value: Float[Array, "T 1 latent"]
) -> Float[Array, "T H"]:
    """Return latents beside their rotated keys in the dtype of their pool; see ``as_stored``.

    The rotated key is never a value, so it takes the NaN of a latent that is not finite.
    """
    key, value = key[:, 0].astype(pool.dtype), value[:, 0].astype(pool.dtype)
    is_finite = jnp.isfinite(value)
    key = jnp.where(is_finite.all(1, keepdims=True), key, jnp.nan)
    return jnp.concatenate([jnp.where(is_finite, value, 0), key], axis=1)


def write_pages(
    pools: tuple[Float[Array, "P K p H"], Float[Array, "P K p H"]],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    batch: AttentionBatch,
) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p H"]]:
    """Return pools with each token's key and value written, converted by ``as_stored``."""
    key_pool, value_pool = pools
    key, value = as_stored(pools, key, value)
    place = batch.token_pages, slice(None), batch.token_offsets
    return (
        key_pool.at[place].set(key, mode="promise_in_bounds"),
        value_pool.at[place].set(value, mode="promise_in_bounds"),
    )


def copy_pages(
    pools: tuple[Float[Array, "P ..."], Float[Array, "P ..."]], sources: Int[Array, " C"], targets: Int[Array, " C"]
) -> tuple[Float[Array, "P ..."], Float[Array, "P ..."]]:
    """Return pools of any layout with pages copied; see ``PagedAttention.copy_pages``."""
    key_pool, value_pool = pools
    return copy_pool_pages(key_pool, sources, targets), copy_pool_pages(value_pool, sources, targets)


def copy_pool_pages(
    pool: Float[Array, "P ..."], sources: Int[Array, " C"], targets: Int[Array, " C"]
) -> Float[Array, "P ..."]:
    """Return a pool of any layout with pages copied; see ``PagedAttention.copy_pages``."""
    return pool.at[targets].set(jnp.take(pool, sources, 0, mode="clip"), mode="drop")
