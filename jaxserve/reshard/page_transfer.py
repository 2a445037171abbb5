"""Move KV pages from the pools of an engine's stages to those of another, through host memory and layer by layer.

Both must lay out a page of a layer in the same way; only the heads that a device stores may differ, and the stages.
Each compiled program is called with a fixed number of pages.
"""

import collections
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.device.head_states import HeadStates
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.structs import shardings
from jaxserve.layers.attention import Pools
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.reshard.exchange import Exchange
from jaxserve.reshard.state_transfer import can_share_states, processes_of_layers
from sharding import own_devices

_CALL_BYTES = 16 << 20  # of the pages that one call moves


class _Stack(NamedTuple):
    """The arrays of one kind of pool, or a draft head's states.

    Attributes:
        kind: The kind.
        num_pools: Pools stacked in each array.
        num_heads: Key/value heads of a page on all devices, repeated ones counted.
        head_dimensions: Dimension of each array that is split by heads; None if none is.
        structs: Shapes and shardings of the arrays.
        layers: For each layer whose pages it has: index in the whole model, page table, and index of the pool.
        pool_pages: Pages of a pool in one lane.
        capacity: Pages that one call moves.
    """

    kind: PoolKind
    num_pools: int
    num_heads: int
    head_dimensions: tuple[int | None, ...]
    structs: tuple[Any, ...]
    layers: tuple[tuple[int, int, int], ...]
    pool_pages: int
    capacity: int = 1

    @classmethod
    def all_of(cls, sharded: ShardedModel) -> "list[_Stack]":
        """Return the arrays of pages of a stage in their order (``StepState.pages``), without recurrent states.

        The layers of a drafter follow those of the whole model, and the states of a draft head count as one more.
        """
        states = sharded.abstract_states()
        return cls.pools_of(sharded) + ([] if states is None else [cls._of_states(sharded, states)])

    @classmethod
    def pools_of(cls, sharded: ShardedModel) -> "list[_Stack]":
        """Return the pools of a stage, those of a drafter last."""
        kinds = zip(sharded.kv_layout.pools, sharded.kv_layout.counts, strict=True)
        own = [cls._of(sharded, index, *each) for index, each in enumerate(kinds)]
        if sharded.drafter is None:
            return own
        first, table = len(sharded.abstract_model.kv_specs), sharded.drafter.table
        stacks = cls.pools_of(sharded.drafter.sharded)
        places = [tuple((first + layer, table, pool) for layer, _, pool in stack.layers) for stack in stacks]
        return own + [stack._replace(layers=layers) for stack, layers in zip(stacks, places, strict=True)]

    @classmethod
    def _of(cls, sharded: ShardedModel, index: int, kind: PoolKind, count: int) -> "_Stack":
        num_heads = sharded.parallel.parts(sharded.parallel.kv_heads) * kind.num_kv_heads
        specs = sharded.kernel.pool_specs(sharded.num_pages, sharded.own_page_size, num_heads, kind.head_dim)
        structs = sharded.abstract_pools(kind, count)
        layers = tuple(
            (layer, place.table, place.first_page // sharded.pool_pages)
            for layer, place in zip(sharded.layers, sharded.kv_layout.layer_indices, strict=True)
            if place.pool == index
        )
        dimensions = tuple(spec.heads_dimension for spec in specs)
        return cls(kind, count, num_heads, dimensions, structs, layers, sharded.pool_pages)._with_capacity(sharded)

    @classmethod
    def _of_states(cls, sharded: ShardedModel, states: HeadStates) -> "_Stack":
        drafter, own = sharded.drafter, states.pages
        assert drafter is not None, "only draft heads keep states"
        layer = len(sharded.abstract_model.kv_specs) + len(drafter.sharded.abstract_model.kv_specs)
        kind, layers = PoolKind(1, own.shape[1], str(own.dtype)), ((layer, drafter.table, 0),)
        return cls(kind, 1, 1, (None,), (own,), layers, sharded.num_pages)._with_capacity(sharded)

    def _with_capacity(self, sharded: ShardedModel) -> "_Stack":
        return self._replace(capacity=max(1, min(sharded.num_pages, _CALL_BYTES // self.page_bytes)))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers, heads that several devices have counted as often."""
        return self.num_pools * sum(math.prod(each.shape[1:]) * each.dtype.itemsize for each in self.structs)

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of a page in each array, for one head."""
        shapes: list[tuple[int, ...]] = []
        for struct, heads in zip(self.structs, self.head_dimensions, strict=True):
            sizes = list(struct.shape)
            if heads is not None:
                sizes[heads] //= self.num_heads
            shapes.append(tuple(sizes[1:]))
        return tuple(shapes)

    def splits_only_pages_and_heads(self, sharded: ShardedModel) -> bool:
        """Whether each device has whole tokens of some pages and heads."""
        for struct, heads in zip(self.structs, self.head_dimensions, strict=True):
            axes = ["pages", *["kv_heads" if i == heads else None for i in range(1, len(struct.shape))]]
            if struct.sharding != sharded.layout.sharding(sharded.mesh, *axes):
                return False
        return True


def can_share_pages(old: Sequence[ShardedModel], new: Sequence[ShardedModel]) -> bool:
    """Return whether pages can be moved from the stages of one engine to those of another one for the same model.

    Those of a model with recurrent layers are of no use without its states.
    """
    if not can_share_states(old, new):
        return False
    for sharded in (*old, *new):
        if not all(stack.splits_only_pages_and_heads(sharded) for stack in _Stack.pools_of(sharded)):
            return False
    return _form(old) == _form(new)


def _form(stages: Sequence[ShardedModel]) -> object:
    """Return what two engines must have in common to share pages: kernel, and table and form of each layer's pages."""
    layers = {
        layer: (table, stack.kind.dtype, stack.page_shapes)
        for sharded in stages
        for stack in _Stack.all_of(sharded)
        for layer, table, _ in stack.layers
    }
    drafter = stages[-1].drafter
    kernels = stages[0].kernel.name, None if drafter is None else drafter.sharded.kernel.name
    return kernels, stages[0].page_size, layers


def page_bytes(sharded: ShardedModel) -> int:
    """Return the bytes of a page in all pools of one lane, heads that several devices have counted as often."""
    return sum(stack.page_bytes for stack in _Stack.all_of(sharded))


class LayerPages(NamedTuple):
    """Pages of one layer in host memory.

    Attributes:
        num_heads: Key/value heads of a page, repeated ones counted.
        arrays: The layer's arrays [pages, ...].
    """

    num_heads: int
    arrays: tuple[np.ndarray, ...]


Receivers = Mapping[int, Collection[int]]
"""The processes that need what layers of the whole model have cached."""
HostPages = dict[int, LayerPages]
"""Pages of one lane in host memory, by layer of the whole model."""


class PageWrite(NamedTuple):
    """Writes a page of the host to a page of a lane, in the layers of a page table.

    Attributes:
        pages: The pages on the host.
        number: Index of the page in them.
        target: The page of the lane.
        table: The page table that the page belongs to.
    """

    pages: HostPages
    number: int
    target: int
    table: int = 0


def receivers_of(stages: Sequence[ShardedModel]) -> dict[int, frozenset[int]]:
    """Return the processes that have devices with pages of each layer.

    Args:
        stages: The stages of all replicas.
    """
    return processes_of_layers(
        (layer, sharded) for sharded in stages for stack in _Stack.all_of(sharded) for layer, _, _ in stack.layers
    )


class PageReader:
    """Reads pages from the pools of a stage.

    Attributes:
        num_programs: Number of compiled programs.

    Args:
        sharded: The stage.
        exchange: Leads to the other processes; None if this one has all devices.
        receivers: The processes that need what it reads; None if there is one process.
    """

    def __init__(self, sharded: ShardedModel, exchange: Exchange | None = None, receivers: Receivers | None = None):
        self._sharded = sharded
        self._exchange, self._receivers = exchange or Exchange(), receivers
        self._stacks = _Stack.all_of(sharded)
        self._compiled, self.num_programs = _compile_kinds(sharded, self._stacks, _compile_read)

    def read(self, pools: Sequence[Pools], pages: Sequence[Sequence[int]]) -> list[HostPages]:
        """Return copies of the given pages of each lane, in the processes that need them.

        Args:
            pools: All arrays of the stage; none in a process without devices of it.
            pages: The pages of each lane.
        """
        copied, arrays_of = list[HostPages]({} for _ in pages), [*pools]
        del arrays_of[self._sharded.kv_layout.state_places]
        given = arrays_of or [None for _ in self._stacks]
        for stack, read, arrays in zip(self._stacks, self._compiled, given, strict=True):
            lanes = self._read_stack(stack, read, arrays, pages)
            for lane, copies in zip(copied, lanes, strict=bool(lanes)):
                for layer, _, pool in stack.layers:
                    lane[layer] = LayerPages(stack.num_heads, tuple(copy[pool] for copy in copies))
        return copied

    def _read_stack(
        self,
        stack: _Stack,
        read: jax.stages.Compiled | None,
        arrays: Pools | None,
        pages: Sequence[Sequence[int]],
    ) -> list[tuple[np.ndarray, ...]]:
        """Return the arrays [pools, pages, ...] of each lane; nothing in a process that does not need them."""
        lanes, receivers = list[tuple[np.ndarray, ...]](), self._receivers_of(stack)
        if receivers is None or self._exchange.process in receivers:
            lanes = [
                tuple(np.empty((stack.num_pools, len(each), *array.shape[1:]), array.dtype) for array in stack.structs)
                for each in pages
            ]
        for start in range(0, max(map(len, pages)), stack.capacity):
            outputs: Any = [None for _ in stack.structs]
            if read is not None:
                outputs = read(arrays, _call_pages(self._sharded, pages, start, stack.capacity))
            for i, (array, struct) in enumerate(zip(outputs, _contents(self._sharded, stack), strict=True)):
                whole = self._exchange.whole(array, struct, receivers)
                if whole is None:
                    continue
                parts = whole.reshape(len(pages), stack.num_pools, stack.capacity, *struct.shape[1:])
                for lane, part in zip(lanes, parts, strict=True):
                    end = min(start + stack.capacity, lane[i].shape[1])
                    lane[i][:, start:end] = part[:, : max(end - start, 0)]
        return lanes

    def _receivers_of(self, stack: _Stack) -> frozenset[int] | None:
        if self._receivers is None:
            return None
        return frozenset(process for layer, _, _ in stack.layers for process in self._receivers[layer])


class PageWriter:
    """Writes pages to the pools of a stage.

    Attributes:
        num_programs: Number of compiled programs.

    Args:
        sharded: The stage.
    """

    def __init__(self, sharded: ShardedModel):
        self._sharded = sharded
        self._stacks = _Stack.all_of(sharded)
        self._compiled, self.num_programs = _compile_kinds(sharded, self._stacks, _compile_write)

    def write(self, pools: Sequence[Pools], writes: Sequence[Sequence[PageWrite]]) -> tuple[Pools, ...]:
        """Return all arrays of the stage with the given pages of each lane written. Donates those of pages."""
        if not pools:
            return ()
        written, arrays_of, places = list[Pools](), [*pools], self._sharded.kv_layout.state_places
        states = arrays_of[places]
        del arrays_of[places]
        targets = [[each.target for each in lane] for lane in writes]
        for stack, write, arrays in zip(self._stacks, self._compiled, arrays_of, strict=True):
            for start in range(0, max(map(len, writes)), stack.capacity):
                part = [lane[start : start + stack.capacity] for lane in writes]
                rows = tuple(np.concatenate([_rows(stack, i, lane) for lane in part]) for i in range(len(arrays)))
                arrays = write(arrays, _call_pages(self._sharded, targets, start, stack.capacity), rows)
            written.append(arrays)
        written[places.start : places.start] = states
        return tuple(written)


def _compile_kinds(
    sharded: ShardedModel, stacks: Sequence[_Stack], compile_one: Callable[[ShardedModel, _Stack], jax.stages.Compiled]
) -> tuple[list[Any], int]:
    """Return a compiled program for each stack, and how many there are: equal stacks share one. In a process without
    devices of the stage there are none."""
    if not own_devices(sharded.mesh):
        return [None for _ in stacks], 0
    kinds = {stack.structs: stack for stack in stacks}
    compiled = {key: compile_one(sharded, stack) for key, stack in kinds.items()}
    return [compiled[stack.structs] for stack in stacks], len(compiled)


def _compile_read(sharded: ShardedModel, stack: _Stack) -> jax.stages.Compiled:
    """Compile the program that reads pages in all layers of a kind; its arguments are (pools, pages)."""

    def read(pools: Pools, pages: Int[Array, " C"]) -> Pools:
        places = _places(pages, stack.num_pools, stack.pool_pages)
        return tuple(pool[places] for pool in pools)

    pages = sharded.rows_struct((stack.capacity,), jnp.int32)
    return sharded.trace(read, (stack.structs, pages), out_shardings=shardings(stack.structs)).lower().compile()


def _compile_write(sharded: ShardedModel, stack: _Stack) -> jax.stages.Compiled:
    """Compile the program that writes pages in all layers of a kind; its arguments are (pools, pages, contents)."""

    def write(pools: Pools, pages: Int[Array, " C"], contents: Pools) -> Pools:
        places = _places(pages, stack.num_pools, stack.pool_pages)
        return tuple(pool.at[places].set(rows) for pool, rows in zip(pools, contents, strict=True))

    pages = sharded.rows_struct((stack.capacity,), jnp.int32)
    arguments = (stack.structs, pages, _contents(sharded, stack))
    return sharded.trace(write, arguments, out_shardings=shardings(stack.structs), donated=[0]).lower().compile()


def _contents(sharded: ShardedModel, stack: _Stack) -> tuple[Any, ...]:
    """Return shapes and shardings of the pages of a call."""
    num_rows = sharded.num_lanes * stack.num_pools * stack.capacity
    return tuple(
        jax.ShapeDtypeStruct((num_rows, *pool.shape[1:]), pool.dtype, sharding=pool.sharding) for pool in stack.structs
    )


def _places(pages: Int[Array, " C"], count: int, num_pages: int) -> Int[Array, " P"]:
    """Return the indices of pages in an array of ``count`` pools of ``num_pages`` pages each."""
    return (num_pages * jnp.arange(count, dtype=jnp.int32)[:, None] + pages).ravel()


def _call_pages(sharded: ShardedModel, pages: Sequence[Sequence[int]], start: int, capacity: int) -> np.ndarray:
    """Return the pages of a call, with the page for padding where a lane has fewer."""
    padded = np.full((len(pages), capacity), sharded.num_pages + 1, np.int32)
    for lane, each in zip(padded, pages, strict=True):
        part = each[start : start + capacity]
        lane[: len(part)] = part
    return padded.ravel()


def _rows(stack: _Stack, index: int, writes: Sequence[PageWrite]) -> np.ndarray:
    """Return what a call writes for one lane to one array of a stack; pages for padding get zeros."""
    shape, heads, dtype = stack.structs[index].shape[1:], stack.head_dimensions[index], stack.structs[index].dtype
    rows = np.zeros((stack.num_pools, stack.capacity, *shape), dtype)
    alike = collections.defaultdict[tuple[int, int], list[int]](list)
    for place, write in enumerate(writes):
        alike[id(write.pages), write.table].append(place)
    for (_, table), places in alike.items():
        pages, numbers = writes[places[0]].pages, [writes[place].number for place in places]
        for layer, own_table, pool in stack.layers:
            if own_table != table:
                continue
            copied = pages[layer].arrays[index][numbers]
            if heads is not None:
                copied = _with_heads(copied, heads, pages[layer].num_heads, stack.num_heads)
            rows[pool, places] = copied
    return rows.reshape(-1, *shape)


def _with_heads(pages: np.ndarray, axis: int, old: int, new: int) -> np.ndarray:
    """Return pages with other numbers of copies of each head, which are consecutive.

    The number of different heads divides both lengths, so in groups of the largest common divisor all copies are of
    one head: one of them is kept, and repeated as often as needed.
    """
    if old == new:
        return pages
    common = math.gcd(old, new)
    shape = list(pages.shape)
    width = shape[axis] // old
    grouped = pages.reshape(*shape[:axis], common, old // common, width, *shape[axis + 1 :])
    kept = np.take(grouped, [0] * (new // common), axis=axis + 1)
    return kept.reshape(*shape[:axis], new * width, *shape[axis + 1 :])
