"""Copies pages within the pools of one stage, a few per call."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.device.program import ModelProgram, shardings
from jaxserve.device.programs import submit
from jaxserve.layers.attention import Pools
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.scheduling.plan import PageCopy

COPY_CAPACITY = 8
"""Most pages copied per call."""


def trace_copy_pages(program: ModelProgram, kind: PoolKind, count: int) -> jax.stages.Traced:
    """Trace the program that copies pages in the pools of a kind; its arguments are (pools, sources, targets).

    Args:
        program: The model.
        kind: Kind of the pools.
        count: Number of pools stacked in the same arrays; the same pages are copied in each.
    """
    pools = program.abstract_pools(kind, count)
    pages = program.rows_struct((COPY_CAPACITY,), jnp.int32)

    def copy(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        if count > 1:
            num_pages = program.pool_pages
            first = num_pages * jnp.arange(count, dtype=jnp.int32)[:, None]
            sources = (first + jnp.minimum(sources, num_pages - 1)).ravel()
            targets = jnp.where(targets < num_pages, first + targets, count * num_pages).ravel()
        return program.kernel.copy_pages(cast(Any, pools), sources, targets)

    return program.trace(copy, (pools, pages, pages), out_shardings=shardings(pools), donated=[0])


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


class PageCopies:
    """The compiled programs that copy pages, one per kind of pools.

    Args:
        program: The model, or one stage of it.
    """

    def __init__(self, program: ModelProgram):
        self._program = program
        self._compiled: dict[PoolKind, concurrent.futures.Future[jax.stages.Compiled]] = {}

    def compile(self, pool: concurrent.futures.Executor) -> None:
        """Begin to compile the programs on the threads of a pool."""
        layout = self._program.kv_layout
        counts = dict(zip(layout.pools, layout.counts, strict=True))
        self._compiled = {
            kind: submit(pool, trace_copy_pages(self._program, kind, count)) for kind, count in counts.items()
        }

    def copy(self, pools: Sequence[Pools], copies: Sequence[Sequence[PageCopy]]) -> tuple[Pools, ...]:
        """Copy pages of each lane in all pools, which are donated."""
        kinds, found = self._program.kv_layout.pools, tuple(pools)
        for sources, targets in copy_arrays(copies, self._program.num_pages):
            found = tuple(
                self._compiled[kind].result()(pool, sources, targets) for kind, pool in zip(kinds, found, strict=True)
            )
        return found
