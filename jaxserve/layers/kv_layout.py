"""Assigns each layer's keys and values to pools and page tables.

Layers with the same window hold the same pages of a context, so they can share a page table; layers with other windows
hold more or fewer. All tables take their pages from one supply, so that memory goes to whichever layers need it: a page
is an index into every pool, and in each pool one layer of the table that holds the page stores its keys and values
there (as in vLLM's hybrid KV cache manager). This requires tables with equally many layers, so a model may have several
tables for one window: 21 layers without a window and 7 with one make four tables, over 7 pools.

A recurrent layer has no keys and values, but a state of fixed size (``StateSpec``), which each step overwrites. The
states of all layers at one token of one context are a *state page*: one index into the state arrays of all layers.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PoolKind(NamedTuple):
    """Shape of one token in a pool of keys and a pool of values: heads per device, head size H, element type."""

    num_kv_heads: int
    head_dim: int
    dtype: str


class KVSpec(NamedTuple):
    """The KV cache that one layer needs per token.

    Attributes:
        num_heads: Query heads per device that read it.
        num_kv_heads: Key/value heads per device.
        head_dim: H.
        dtype: Element type.
        window: Number of latest tokens that a query sees, itself included, or the most if it attends within chunks;
            None for all.
        value_dim: For latents (MLA), the number of leading features that are the value; ``num_kv_heads`` is then 1, and
            every device stores the whole latent. None for keys and values of their own.
        reads: Index of the layer whose keys and values it reads, having none of its own; None for its own.
        selects_as: Index of the layer whose selected tokens it uses, having no index of its own; None for all others.
        in_chunks: Whether a query sees the tokens of its own chunk of the context up to itself, and none before
            (Llama 4).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    value_dim: int | None = None
    reads: int | None = None
    in_chunks: bool = False
    selects_as: int | None = None

    @property
    def operation(self) -> str:
        """Name of the operation in ``pallas_kernels.registry`` that attends to it."""
        return "paged_attention" if self.value_dim is None else "latent_attention"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that implementations of the operation depend on, besides the page size."""
        sizes = {"head_dim": self.head_dim, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return sizes if self.value_dim is None else {**sizes, "value_dim": self.value_dim}

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk, if the layer attends within chunks."""
        return self.window if self.in_chunks else None

    def home(self, layer: int) -> int:
        """Return the index of the layer that has the keys and values of this one, the layer of index ``layer``."""
        return layer if self.reads is None else self.reads

    @property
    def pool(self) -> PoolKind:
        """The kind of pools that the layer needs."""
        return PoolKind(self.num_kv_heads, self.head_dim, self.dtype)


class StateArray(NamedTuple):
    """An array of a recurrent layer's state.

    Attributes:
        shape: Its shape for one sequence on one device.
        dtype: Element type.
        split: Dimension that devices share as they share heads; None: every device has all of it.
        parts: What all devices together have along that dimension, one after the other, as ranges of the whole model's;
            empty if that is all of it in order.
    """

    shape: tuple[int, ...]
    dtype: str
    split: int | None = 0
    parts: tuple[range, ...] = ()


StateSpec = tuple[StateArray, ...]
"""The arrays that a recurrent layer keeps per sequence; empty for a layer without a state."""


class KVIndices(NamedTuple):
    """Indices of one layer's pools, page table and state.

    The layer's pages begin at ``first_page`` of the pool arrays, which other layers may share (``KVLayout.stacked``).

    Attributes:
        pool: Index of its pools; None for a layer without keys and values.
        table: Its page table; 0 for such a layer.
        first_page: As above.
        state: Index of its state's arrays, which follow all pools; None for a layer without a state.
    """

    pool: int | None
    table: int
    first_page: int = 0
    state: int | None = None


def attended(specs: Iterable[KVSpec | None]) -> list[KVSpec]:
    """Return the specs of the layers that have keys and values; for a model without one, that of a layer that could
    be."""
    return [spec for spec in specs if spec is not None] or [KVSpec(1, 1, 16, "float32", None)]


class KVLayout(NamedTuple):
    """Pools and page tables of a model.

    Attributes:
        layer_indices: Pools and page table of each layer.
        pools: Kind of each pool.
        windows: For each page table, the number of latest tokens that its layers see; None for all.
        counts: For each entry of ``pools``, the number of pools stacked in the same arrays.
        chunks: For each page table, the tokens of a chunk if its layers attend within chunks, which never see more of
            the latest tokens; None if they do not.
    """

    layer_indices: tuple[KVIndices, ...]
    pools: tuple[PoolKind, ...]
    windows: tuple[int | None, ...]
    counts: tuple[int, ...]
    chunks: tuple[int | None, ...]

    def stacked(self, num_pages: int) -> "KVLayout":
        """Return the same layout with pools of one kind stacked in the same arrays, ``num_pages`` pages each including
        padding pages."""
        kinds = [*dict.fromkeys(self.pools)]
        indices = [
            each
            if each.pool is None
            else KVIndices(
                kinds.index(self.pools[each.pool]),
                each.table,
                num_pages * self.pools[: each.pool].count(self.pools[each.pool]),
            )
            for each in self.layer_indices
        ]
        counts = tuple(self.pools.count(kind) for kind in kinds)
        return KVLayout(tuple(indices), tuple(kinds), self.windows, counts, self.chunks)

    @property
    def state_places(self) -> slice:
        """Where the arrays of states are among all arrays: after the pools, and before those of a drafter."""
        return slice(len(self.pools), len(self.pools) + sum(each.state is not None for each in self.layer_indices))

    def with_states(self, specs: Sequence[StateSpec]) -> "KVLayout":
        """Return the same layout with indices of the layers' states, ``specs`` in the order of ``layer_indices``."""
        numbers = itertools.count(len(self.pools))
        indices = (
            each._replace(state=next(numbers)) if spec else each
            for each, spec in zip(self.layer_indices, specs, strict=True)
        )
        return self._replace(layer_indices=tuple(indices))


def lay_out_kv(
    specs: Sequence[KVSpec | None], max_model_len: int | None = None, stage: range | None = None
) -> KVLayout:
    """Assign pools and page tables to the layers of a model, or of one of its pipeline stages.

    If all windows are equal, each layer has its own pools, and all layers share one page table. All stages have the
    page tables of the whole model, so that a page has the same number in each; a stage spreads its layers of a window
    over that window's tables, some of which may get none.

    Args:
        specs: KV cache of each layer of the model; None for layers without one. If no layer has one, there is a page
            table without pools.
        max_model_len: Longest context in tokens; a window of at least this size is treated as no window. None: no
            limit.
        stage: Indices of the stage's layers, whose entries the result has; None: all layers.
    """
    stage = range(len(specs)) if stage is None else stage
    layers_of = collections.defaultdict[tuple[int | None, bool], list[int]](list)
    for layer, spec in enumerate(specs):
        if spec is None or spec.reads is not None:
            continue
        sees_all = spec.window is None or (max_model_len is not None and spec.window >= max_model_len)
        layers_of[(None, False) if sees_all else (spec.window, spec.in_chunks)].append(layer)
    if not layers_of:
        return KVLayout((KVIndices(None, 0),) * len(stage), (), (None,), (), (None,))
    known_specs = {layer: spec for layer, spec in enumerate(specs) if spec is not None}
    homes = {known_specs[layer].home(layer) for layer in stage if layer in known_specs}
    size = _table_size([len(layers) for layers in layers_of.values()])
    indices, pools, spans = dict[int, KVIndices](), list[PoolKind](), list[tuple[int | None, bool]]()
    known = dict[tuple[PoolKind, int], int]()
    for span, layers in layers_of.items():
        num_tables = -(-len(layers) // size)
        own = [layer for layer in layers if layer in homes]
        share = -(-len(own) // num_tables)
        for table in range(num_tables):
            num_alike = collections.Counter[PoolKind]()
            for layer in own[table * share : (table + 1) * share]:
                kind = known_specs[layer].pool
                pool = known.setdefault((kind, num_alike[kind]), len(pools))
                if pool == len(pools):
                    pools.append(kind)
                num_alike[kind] += 1
                indices[layer] = KVIndices(pool, len(spans))
            spans.append(span)
    ordered = tuple(
        indices[known_specs[layer].home(layer)] if layer in known_specs else KVIndices(None, 0) for layer in stage
    )
    windows, chunks = zip(*((window, window if in_chunks else None) for window, in_chunks in spans), strict=True)
    return KVLayout(ordered, tuple(pools), windows, (1,) * len(pools), chunks)


def _table_size(counts: list[int]) -> int:
    """Return the largest number of layers per page table that pads the tables of each window by at most an eighth.

    Args:
        counts: Number of layers with each window.
    """

    def padded(size: int) -> int:
        return sum(-(-count // size) * size for count in counts)

    most = sum(counts) + sum(counts) // 8
    return next(size for size in range(max(counts), 0, -1) if padded(size) <= most)
