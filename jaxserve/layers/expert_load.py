"""Counts of the tokens that a step routes to each expert."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_each(experts: Int[Array, " choices"], num_experts: int) -> Int[Array, " E"]:
    """Return how often each expert is chosen; indices that are out of range do not count."""
    return jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def count_tokens(experts: Int[Array, "T k"], num_tokens: Int[Array, ""], num_experts: int) -> Int[Array, " E"]:
    """Return the number of tokens routed to each expert; tokens from ``num_tokens`` on are padding."""
    is_used = jnp.arange(experts.shape[0]) < num_tokens
    chosen = jnp.where(is_used[:, None], experts, num_experts).reshape(-1)
    return count_each(chosen, num_experts)
