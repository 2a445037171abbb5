"""Counts of the tokens that a step routes to each expert."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_tokens(experts: Int[Array, "T k"], num_tokens: Int[Array, ""], num_experts: int) -> Int[Array, " E"]:
    """Return the number of tokens routed to each expert; tokens from ``num_tokens`` on are padding."""
    is_used = jnp.arange(experts.shape[0]) < num_tokens
    chosen = jnp.where(is_used[:, None], experts, num_experts).reshape(-1)
    return jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
