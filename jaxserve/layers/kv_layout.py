"""Which pools and which page table each layer's keys and values are in.

Layers with the same window hold the same pages of a context, so they can share a page table; layers with another window
hold fewer or more. So that memory goes to whichever needs it, all tables take their pages from one supply: a page is a
place in every pool, and in each pool one layer of the table that holds the page keeps its keys and values there (as in
vLLM's hybrid KV cache manager). For that, tables have equally many layers, and a model may have several tables for one
window: 21 layers that see everything and 7 with a window make four tables, over 7 pools.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple


class PoolKind(NamedTuple):
    """What a token takes in a pool of keys and in one of values: heads on a device, their size H, element type."""

    num_kv_heads: int
    head_dim: int
    dtype: str


class KVSpec(NamedTuple):
    """What a layer keeps of a token.

    Attributes:
        num_heads: Query heads on a device that read it.
        num_kv_heads: Key/value heads on a device.
        head_dim: H.
        dtype: Element type.
        window: Latest tokens that a query sees, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None

    @property
    def pool(self) -> PoolKind:
        """Return the pools it needs."""
        return PoolKind(self.num_kv_heads, self.head_dim, self.dtype)


class KVPlace(NamedTuple):
    """Where a layer's keys and values are: indices of its pools and of its page table.

    The pools begin at page ``first_page`` of their arrays, which may hold others too (``stacked``).
    """

    pool: int
    table: int
    first_page: int = 0


class KVLayout(NamedTuple):
    """Pools and page tables of a model.

    Attributes:
        places: Where each layer's keys and values are.
        pools: What a token takes in each pool.
        windows: For each page table, the latest tokens that its layers see; None for all.
        counts: Of each entry of ``pools``, how many lie in the same arrays, one after the other.
    """

    places: tuple[KVPlace, ...]
    pools: tuple[PoolKind, ...]
    windows: tuple[int | None, ...]
    counts: tuple[int, ...]

    def stacked(self, num_pages: int) -> "KVLayout":
        """Return the same with pools of one kind in the same arrays, of ``num_pages`` pages each, with those for
        padding."""
        kinds = [*dict.fromkeys(self.pools)]
        places = [
            KVPlace(kinds.index(self.pools[pool]), table, num_pages * self.pools[:pool].count(self.pools[pool]))
            for pool, table, _ in self.places
        ]
        return KVLayout(tuple(places), tuple(kinds), self.windows, tuple(self.pools.count(kind) for kind in kinds))


def lay_out_kv(specs: Sequence[KVSpec], max_model_len: int | None = None) -> KVLayout:
    """Return the pools and page tables of layers.

    Where all windows are the same, each layer has pools of its own, and all have one page table.

    Args:
        specs: What each layer keeps of a token.
        max_model_len: Tokens of the longest context, all of which a longer window sees; None for no limit.
    """
    layers_of = collections.defaultdict[int | None, list[int]](list)
    for layer, spec in enumerate(specs):
        sees_all = spec.window is None or (max_model_len is not None and spec.window >= max_model_len)
        layers_of[None if sees_all else spec.window].append(layer)
    size = _table_size([len(layers) for layers in layers_of.values()])
    places, pools, windows = dict[int, KVPlace](), list[PoolKind](), list[int | None]()
    known = dict[tuple[PoolKind, int], int]()
    for window, layers in layers_of.items():
        for start in range(0, len(layers), size):
            num_alike = collections.Counter[PoolKind]()
            for layer in layers[start : start + size]:
                kind = specs[layer].pool
                pool = known.setdefault((kind, num_alike[kind]), len(pools))
                if pool == len(pools):
                    pools.append(kind)
                num_alike[kind] += 1
                places[layer] = KVPlace(pool, len(windows))
            windows.append(window)
    ordered = tuple(places[layer] for layer in range(len(specs)))
    return KVLayout(ordered, tuple(pools), tuple(windows), (1,) * len(pools))


def _table_size(counts: list[int]) -> int:
    """Layers of a page table: the most with which at most an eighth is added to fill the last table of each window.

    Args:
        counts: Layers with each window.
    """

    def padded(size: int) -> int:
        return sum(-(-count // size) * size for count in counts)

    most = sum(counts) + sum(counts) // 8
    return next(size for size in range(max(counts), 0, -1) if padded(size) <= most)
