"""The rule of recurrent states in one Pallas-Triton kernel, which two operations share.

A program keeps some values of one head's state in registers while the tokens of a row pass over it one by one:
a decode step reads and writes each state once, and a token's results depend on its row alone. Convolutions, gates and
norms are left to XLA.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_tiles import require_indexable
from pallas_kernels.recurrent_states import StateRows
from pallas_kernels.recurrent_xla import RuleTokens

_MOST_VALUES = 32  # of a state's columns that a program has
_MOST_KEYS = 256
_DTYPES = ("float32", "bfloat16", "float16")


def unsupported(is_interpreted: bool, platform: str, device_kind: str, dtype: str, num_keys: int) -> str | None:
    """Return why the kernel cannot run on such a device with such states, or None."""
    if not is_interpreted and (platform not in ("gpu", "cuda") or "NVIDIA" not in device_kind):
        return "needs an NVIDIA GPU"
    if num_keys > _MOST_KEYS:
        return f"a state must have at most {_MOST_KEYS} keys, not {num_keys}"
    return None if dtype in _DTYPES else f"projections must be {', '.join(_DTYPES)}, not {dtype}"


def update_states(
    tokens: RuleTokens,
    state: Float[Array, "P heads keys values"],
    rows: StateRows,
    *,
    is_delta: bool,
    is_interpreted: bool,
) -> tuple[Float[Array, "T heads values"], Float[Array, "P heads keys values"]]:
    """Update states by every token of each row, in order; see ``recurrent_xla.UpdateStates``."""
    require_indexable(state)
    num_tokens, num_heads, num_values = tokens.value.shape
    group, has_key_decays = num_heads // tokens.key.shape[1], tokens.decay.shape[2] > 1
    layout = _Layout(group, state.shape[2], num_values, is_delta, has_key_decays)
    call = pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        out_shape=(
            jax.ShapeDtypeStruct(tokens.value.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid=(rows.lens.shape[0], num_heads, pl.cdiv(num_values, layout.block)),
        input_output_aliases={0: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=is_interpreted,
        name="recurrent_update",
    )
    fields = tuple(field.astype(jnp.int32) for field in (*rows[:4], rows.pages_after(num_tokens)))
    results, state = call(state, fields, tuple(tokens))
    is_used = jnp.arange(num_tokens) < rows.num_tokens
    return jnp.where(is_used[:, None, None], results, 0), state


class _Layout(NamedTuple):
    """Compile-time parameters of the kernel; ``group`` heads share a key head."""

    group: int
    num_keys: int
    num_values: int
    is_delta: bool
    has_key_decays: bool

    @property
    def block(self) -> int:
        """Values of a program, a power of two."""
        return min(_MOST_VALUES, pl.next_power_of_2(self.num_values))


class _Lanes(NamedTuple):
    """The keys and values of a program's tile of a state, and which of them exist."""

    keys: Int[Array, " K"]
    values: Int[Array, " V"]
    are_keys: Bool[Array, " K"]
    are_values: Bool[Array, " V"]


def _kernel(
    _: Any,  # the states: the same memory as the last
    rows_ref: Any,  # starts, lens, are_new, pages: [R] each; the page to write too after each token, or -1: [T]
    # Of each token and head, a key head for the first two: query [K], key [K], value [V], factor, decay [1] or [K].
    tokens_ref: Any,
    result_ref: Any,  # [T, heads, V]
    state_ref: Any,  # [P, heads, K, V]
    *,
    layout: _Layout,
) -> None:
    row, head, block = (pl.program_id(axis) for axis in range(3))
    *fields, pages_after_ref = rows_ref
    start, length, is_new, page = (field[row] for field in fields)
    keys = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(layout.num_keys),), 0)
    values = block * layout.block + lax.broadcasted_iota(jnp.int32, (layout.block,), 0)
    lanes = _Lanes(keys, values, keys < layout.num_keys, values < layout.num_values)
    is_read = lanes.are_keys[:, None] & lanes.are_values & (length > 0) & (is_new == 0)
    state = plt.load(_tile(state_ref, page, head, lanes), mask=is_read, other=0.0)
    are_written = lanes.are_keys[:, None] & lanes.are_values

    def step(index: Array, state: Float[Array, "K V"]) -> Float[Array, "K V"]:
        token = start + index
        state, result = _apply_rule(state, tokens_ref, token, head, lanes, layout)
        place = jnp.broadcast_to(token, result.shape), jnp.broadcast_to(head, result.shape), lanes.values
        plt.store(result_ref.at[place], result, mask=lanes.are_values)
        kept = pages_after_ref[token]
        is_kept = kept >= 0
        plt.store(_tile(state_ref, jnp.where(is_kept, kept, page), head, lanes), state, mask=are_written & is_kept)
        return state

    state = lax.fori_loop(0, length, step, state)
    plt.store(_tile(state_ref, page, head, lanes), state, mask=are_written & (length > 0))


def _tile(state_ref: Any, page: Int[Array, ""], head: Int[Array, ""], lanes: _Lanes) -> Any:
    shape = lanes.keys.shape + lanes.values.shape
    page, head = jnp.broadcast_to(page, shape), jnp.broadcast_to(head, shape)
    return state_ref.at[page, head, jnp.broadcast_to(lanes.keys[:, None], shape), jnp.broadcast_to(lanes.values, shape)]


def _apply_rule(
    state: Float[Array, "K V"],
    tokens_ref: Any,
    token: Int[Array, ""],
    head: Int[Array, ""],
    lanes: _Lanes,
    layout: _Layout,
) -> tuple[Float[Array, "K V"], Float[Array, " V"]]:
    """Return the state after a token, and the token's result."""
    query_ref, key_ref, value_ref, factor_ref, decay_ref = tokens_ref
    token_of_keys, key_head = (jnp.broadcast_to(x, lanes.keys.shape) for x in (token, head // layout.group))
    query, key = (
        plt.load(ref.at[token_of_keys, key_head, lanes.keys], mask=lanes.are_keys, other=0.0)[:, None]
        for ref in (query_ref, key_ref)
    )
    place = jnp.broadcast_to(token, lanes.values.shape), jnp.broadcast_to(head, lanes.values.shape), lanes.values
    value = plt.load(value_ref.at[place], mask=lanes.are_values, other=0.0)
    if layout.has_key_decays:
        own_head = jnp.broadcast_to(head, lanes.keys.shape)
        decay = plt.load(decay_ref.at[token_of_keys, own_head, lanes.keys], mask=lanes.are_keys, other=0.0)
        state = state * decay[:, None]
    else:
        state = state * decay_ref[token, head, 0]
    value = value - jnp.sum(state * key, axis=0) if layout.is_delta else value
    state = state + key * (factor_ref[token, head] * value)[None, :]
    return state, jnp.sum(state * query, axis=0)
