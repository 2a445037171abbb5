"""Small programs that run before steps that need them: one sets a slot up, one copies pages."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxserve.device.program import ModelProgram, shardings
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.sampling.penalties import IN_PROMPT, MAX_TRACKED, SlotTables
from jaxserve.scheduling.plan import PageCopy, SlotSetup

COPY_CAPACITY = 8
"""Pages that one call copies."""

Pools = tuple[Array, Array]


def trace_set_up(program: ModelProgram) -> jax.stages.Traced:
    """Traces what gives a slot its row of the tables: takes (``SlotTables``, row, as ``slot_row`` makes it)."""
    vocab_size = program.config.vocab_size
    tables = program.abstract_state().tables

    def set_up(tables: SlotTables, row: Int[Array, " size"]) -> SlotTables:
        counts, bias, tracked_ids = (lax.slice(row, (start,), (stop,))[None] for start, stop in _row_parts(vocab_size))
        parts = SlotTables(counts, lax.bitcast_convert_type(bias, jnp.float32), tracked_ids)
        return jax.tree.map(lambda table, part: lax.dynamic_update_slice(table, part, (row[0], 0)), tables, parts)

    row = program.whole((_row_parts(vocab_size)[-1][1],), jnp.int32)
    return jax.jit(set_up, donate_argnums=0, out_shardings=shardings(tables)).trace(tables, row)


def slot_row(setup: SlotSetup, vocab_size: int) -> np.ndarray:
    """What ``trace_set_up``'s program writes: slot, token counts, bias (by its bits) and tracked tokens, all int32."""
    sampling = setup.sampling
    parts = _row_parts(vocab_size)
    row = np.zeros(parts[-1][1], np.int32)
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


def trace_copy_pages(program: ModelProgram, kind: PoolKind, count: int) -> jax.stages.Traced:
    """Traces the copying of pages: takes (pools, sources, targets), for all pools of a kind, one after the other.

    Args:
        program: The model.
        kind: Of the pools.
        count: How many of the kind lie in the same arrays; the same pages of each are copied.
    """
    pools = program.abstract_pools(kind, count)
    pages = program.whole((COPY_CAPACITY,), jnp.int32)

    def copy(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        if count > 1:
            num_pages = program.pool_pages
            first = num_pages * jnp.arange(count, dtype=jnp.int32)[:, None]
            sources = (first + jnp.minimum(sources, num_pages - 1)).ravel()
            targets = jnp.where(targets < num_pages, first + targets, count * num_pages).ravel()
        return program.kernel.copy_pages(pools, sources, targets)

    return program.trace(copy, (pools, pages, pages), gives=shardings(pools), donated=[0])


def copy_arrays(copies: Sequence[PageCopy], num_pages: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sources and targets of each call of ``trace_copy_pages``'s program; those that only fill up write nothing.

    Calls run in order, and each reads all its sources first: a page may be a source and a later copy's target.
    """
    calls = []
    for start in range(0, len(copies), COPY_CAPACITY):
        pages = np.array(copies[start : start + COPY_CAPACITY], np.int32)
        sources, targets = np.full((2, COPY_CAPACITY), num_pages + 2, np.int32)
        sources[: len(pages)], targets[: len(pages)] = pages.T
        calls.append((sources, targets))
    return calls


def _row_parts(vocab_size: int) -> list[tuple[int, int]]:
    """Return the ranges of counts, bias and tracked tokens in a slot's row, after the slot itself."""
    ends = np.cumsum([1, vocab_size, vocab_size, MAX_TRACKED]).tolist()
    return [*zip(ends[:-1], ends[1:], strict=True)]
