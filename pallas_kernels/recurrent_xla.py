"""What the XLA implementations of recurrent layers share: ragged convolutions, and updates of states.

A step's first tokens, one per row, update all states at once; the tokens after them, which decode steps do not have,
follow one by one, each on the state that the one before left in its page.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.recurrent_states import Convolution, StateRows


class RuleTokens(NamedTuple):
    """What the rule of a state takes of each token; a key head serves ``heads / key_heads`` consecutive heads.

    ``decay`` has one number per head, or one per key. A state becomes ``decay * S``, then takes up
    ``key (factor * value)^T``; under the delta rule the value is reduced first by what the state holds for the key. The
    result is ``S^T query``.
    """

    query: Float[Array, "T key_heads keys"]
    key: Float[Array, "T key_heads keys"]
    value: Float[Array, "T heads values"]
    factor: Float[Array, "T heads"]
    decay: Float[Array, "T heads decays"]


@runtime_checkable
class UpdateStates(Protocol):
    """Updates states by every token of each row, in order; results of padding tokens are zeros."""

    def __call__(
        self, tokens: RuleTokens, state: Float[Array, "P heads keys values"], rows: StateRows, *, is_delta: bool
    ) -> tuple[Float[Array, "T heads values"], Float[Array, "P heads keys values"]]:
        """Return the results and the states."""
        ...


def state_shape(num_heads: int, num_keys: int, num_values: int) -> tuple[int, ...]:
    """Return the shape of one page of states."""
    return num_heads, num_keys, num_values


def to_layout(state: Float[Array, "P heads keys values"]) -> Float[Array, "P heads keys values"]:
    """Return the states: matrices are the layout."""
    return state


def from_layout(state: Float[Array, "P heads keys values"], num_values: int) -> Float[Array, "P heads keys values"]:
    """Return the states."""
    assert state.shape[-1] == num_values, state.shape
    return state


def convolve(
    x: Float[Array, "T channels"],
    tail: Float[Array, "P history channels"],
    convolution: Convolution,
    rows: StateRows,
) -> tuple[Float[Array, "T channels"], Float[Array, "P history channels"]]:
    """Convolve the tokens of each row, in float32 and from the oldest tap on; return the tails too."""
    num_tokens, history = x.shape[0], tail.shape[1]
    old = jnp.where(rows.are_new[:, None, None], 0, jnp.take(tail, rows.pages, 0, mode="clip"))
    owners = token_rows(rows, num_tokens)
    offsets = jnp.arange(num_tokens) - rows.starts[owners]
    weight = convolution.weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32) if convolution.bias is None else convolution.bias.astype(jnp.float32)
    for delay in range(history, -1, -1):
        earlier = jnp.pad(x, ((delay, 0), (0, 0)))[:num_tokens]
        if delay:
            from_tail = old[owners, jnp.clip(offsets - delay + history, 0, history - 1)]
            earlier = jnp.where((offsets >= delay)[:, None], earlier, from_tail)
        y = y + earlier.astype(jnp.float32) * weight[history - delay]
    is_kept = rows.snapshot_tokens < rows.num_tokens
    for last, pages, are_written in (
        (rows.snapshot_tokens, rows.snapshot_pages, is_kept),
        (rows.starts + rows.lens - 1, rows.pages, rows.lens > 0),
    ):
        last = jnp.clip(last, 0, num_tokens - 1)
        new = _tails(x, old, last, owners[last], offsets[last])
        tail = tail.at[jnp.where(are_written, pages, tail.shape[0])].set(new, mode="drop")
    return y, tail


def _tails(
    x: Float[Array, "T channels"],
    old: Float[Array, "R history channels"],
    last: Int[Array, " N"],
    owners: Int[Array, " N"],
    offsets: Int[Array, " N"],
) -> Float[Array, "N history channels"]:
    """Return the tails after some tokens, of whose rows the old tails are known, and the tokens' index in the row."""
    delays = jnp.arange(old.shape[1] - 1, -1, -1)
    index = offsets[:, None] - delays  # of an input in its row; below 0 in the old tail
    new = jnp.take(x, last[:, None] - delays, 0, mode="clip")
    kept = old[owners[:, None], jnp.clip(index + old.shape[1], 0, old.shape[1] - 1)]
    return jnp.where((index >= 0)[:, :, None], new, kept)


def token_rows(rows: StateRows, num_tokens: int) -> Int[Array, " T"]:
    """Return the row of each token; of padding any row."""
    before = jnp.arange(num_tokens)[:, None] >= rows.starts + rows.lens
    return jnp.minimum(before.sum(1, dtype=jnp.int32), rows.starts.shape[0] - 1)


def update_states(
    tokens: RuleTokens, state: Float[Array, "P heads keys values"], rows: StateRows, *, is_delta: bool
) -> tuple[Float[Array, "T heads values"], Float[Array, "P heads keys values"]]:
    """Update states by every token of each row, in order; see ``UpdateStates``."""
    step = partial(_update_state, is_delta=is_delta)
    num_tokens, num_pages = tokens.value.shape[0], state.shape[0]
    firsts = RuleTokens(*(jnp.take(x, rows.starts, 0, mode="clip") for x in tokens))
    old = jnp.where(rows.are_new[:, None, None, None], 0, jnp.take(state, rows.pages, 0, mode="clip"))
    new, found = jax.vmap(step)(old, firsts)
    is_used = rows.lens > 0
    results = jnp.zeros((num_tokens, *found.shape[1:]), jnp.float32)
    results = results.at[jnp.where(is_used, rows.starts, num_tokens)].set(found, mode="drop")
    pages_after = rows.pages_after(num_tokens)
    kept = jnp.take(pages_after, rows.starts, mode="clip")
    state = state.at[jnp.where(is_used & (kept >= 0), kept, num_pages)].set(new, mode="drop")
    state = state.at[jnp.where(is_used, rows.pages, num_pages)].set(new, mode="drop")

    owners = token_rows(rows, num_tokens)
    offsets = jnp.arange(num_tokens) - rows.starts[owners]
    is_later = (offsets > 0) & (jnp.arange(num_tokens) < rows.num_tokens)
    (later,) = jnp.nonzero(is_later, size=num_tokens, fill_value=0)

    def update(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, results = carry
        token = later[index]
        row = owners[token]
        page = rows.pages[row]
        new, found = step(state[page], RuleTokens(*(x[token] for x in tokens)))
        target = jnp.where(pages_after[token] >= 0, pages_after[token], page)
        return state.at[target].set(new).at[page].set(new), results.at[token].set(found)

    results, state = lax.fori_loop(0, is_later.sum(), update, (state, results))[::-1]
    return results, state


def _update_state(
    state: Float[Array, "heads keys values"], token: RuleTokens, is_delta: bool
) -> tuple[Float[Array, "heads keys values"], Float[Array, "heads values"]]:
    """Apply the rule of one token; sums run over keys, elementwise for all values."""
    query, key, value, factor, decay = token
    group = state.shape[0] // key.shape[0]
    query, key = (jnp.repeat(x, group, axis=0)[:, :, None] for x in (query, key))
    state = state * decay[:, :, None]
    value = value - jnp.sum(state * key, axis=1) if is_delta else value
    state = state + key * (factor[:, None] * value)[:, None]
    return state, jnp.sum(state * query, axis=1)
