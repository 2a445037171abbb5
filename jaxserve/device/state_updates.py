"""Programs that update the state between steps: one writes a slot's row of the ``SlotTables``, others copy pages."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.structs import shardings
from jaxserve.layers.attention import Pools
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.sampling.penalties import IN_PROMPT, MAX_TRACKED, SlotTables
from jaxserve.scheduling.plan import PageCopy, SlotSetup
from pallas_kernels.recurrent_states import copy_states

COPY_CAPACITY = 8
"""Most pages copied per call."""
_NO_SLOT = np.iinfo(np.int32).max


def trace_set_up(sharded: ShardedModel) -> jax.stages.Traced:
    """Trace the program that writes a slot's row of each lane (see ``slot_row``) to the ``SlotTables``."""
    vocab_size, split = sharded.config.vocab_size, sharded.split
    tables = sharded.abstract_state().tables

    def set_up(tables: SlotTables, row: Int[Array, " size"]) -> SlotTables:
        counts, bias, tracked_ids = (lax.slice(row, (start,), (stop,))[None] for start, stop in _row_parts(vocab_size))
        width = tables.bias.shape[1]
        counts, bias = split.part(counts, width), split.part(bias, width)
        parts = SlotTables(counts, lax.bitcast_convert_type(bias, jnp.float32), tracked_ids)
        return jax.tree.map(lambda table, part: table.at[row[0]].set(part[0], mode="drop"), tables, parts)

    row = sharded.rows_struct((_row_parts(vocab_size)[-1][1],), jnp.int32)
    return sharded.trace(set_up, (tables, row), out_shardings=shardings(tables), donated=[0])


def slot_row(setup: SlotSetup | None, vocab_size: int) -> np.ndarray:
    """Return a lane's part of the int32 input of ``trace_set_up``'s program, which writes nothing for None.

    It has the slot, token counts, bias (float32 bits), and tracked tokens.
    """
    parts = _row_parts(vocab_size)
    row = np.zeros(parts[-1][1], np.int32)
    if setup is None:
        row[0] = _NO_SLOT
        return row
    sampling = setup.sampling
    row[0] = setup.slot
    counts, bias, tracked_ids = (row[start:stop] for start, stop in parts)
    if sampling.has_penalties:
        token_ids = np.array(setup.token_ids, np.int64)
        counts += np.bincount(token_ids[setup.num_prompt_tokens :], minlength=vocab_size).astype(np.int32)
        counts[token_ids[: setup.num_prompt_tokens]] |= IN_PROMPT
    for token, added in sampling.logit_bias:
        bias.view(np.float32)[token] += added
    tracked_ids[: len(sampling.tracked_ids)] = sampling.tracked_ids
    return row


def _row_parts(vocab_size: int) -> list[tuple[int, int]]:
    """Return the ranges of counts, bias and tracked tokens in a slot's row, after the slot itself."""
    ends = np.cumsum([1, vocab_size, vocab_size, MAX_TRACKED]).tolist()
    return [*zip(ends[:-1], ends[1:], strict=True)]


def trace_copy_pages(sharded: ShardedModel, kind: PoolKind, count: int) -> jax.stages.Traced:
    """Trace the program that copies pages in the pools of a kind; its arguments are (pools, sources, targets).

    Args:
        sharded: The model, or a stage of it.
        kind: Kind of the pools.
        count: Number of pools stacked in the same arrays; the same pages are copied in each.
    """
    pools = sharded.abstract_pools(kind, count)
    pages = sharded.rows_struct((COPY_CAPACITY,), jnp.int32)

    def copy(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        if count > 1:
            num_pages = sharded.pool_pages
            first = num_pages * jnp.arange(count, dtype=jnp.int32)[:, None]
            sources = (first + jnp.minimum(sources, num_pages - 1)).ravel()
            targets = jnp.where(targets < num_pages, first + targets, count * num_pages).ravel()
        return sharded.kernel.copy_pages(cast(Any, pools), sources, targets)

    return sharded.trace(copy, (pools, pages, pages), out_shardings=shardings(pools), donated=[0])


def trace_copy_states(sharded: ShardedModel) -> jax.stages.Traced:
    """Trace the program that copies state pages in all recurrent layers; arguments: (states, sources, targets)."""
    states = sharded.own_pools()[sharded.kv_layout.state_places]
    pages = sharded.rows_struct((COPY_CAPACITY,), jnp.int32)

    def copy(states: tuple[Pools, ...], sources: Int[Array, " C"], targets: Int[Array, " C"]) -> tuple[Pools, ...]:
        return tuple(copy_states(arrays, sources, targets) for arrays in states)

    return sharded.trace(copy, (states, pages, pages), out_shardings=shardings(states), donated=[0])


def copy_arrays(copies: Sequence[Sequence[PageCopy]], num_pages: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return sources and targets for each call of ``trace_copy_pages``'s program; padding copies write nothing.

    Each call reads all its sources before it writes, so a page may be a source and the target of a later copy.

    Args:
        copies: Copies of each lane.
        num_pages: Usable pages of a lane.
    """
    calls = []
    for start in range(0, max(map(len, copies)), COPY_CAPACITY):
        arrays = np.full((2, len(copies), COPY_CAPACITY), num_pages + 2, np.int32)
        for lane, each in enumerate(copies):
            pages = np.array(each[start : start + COPY_CAPACITY], np.int32).reshape(-1, 2)
            arrays[:, lane, : len(pages)] = pages.T
        sources, targets = arrays.reshape(2, -1)
        calls.append((sources, targets))
    return calls
