"""Which pools and page tables layers get."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layers.kv_layout import KVIndices, KVSpec, lay_out_kv

WIDE = KVSpec(8, 4, 16, "float32", None)
NARROW = KVSpec(8, 1, 16, "float32", None)


def windowed(*windows: int | None) -> list[KVSpec]:
    return [WIDE._replace(window=window) for window in windows]


def test_layers_with_one_window_have_one_table_and_pools_of_their_own() -> None:
    for window in (None, 7):
        layout = lay_out_kv(windowed(*[window] * 5))
        assert layout.layer_indices == tuple(KVIndices(layer, 0) for layer in range(5))
        assert (layout.pools, layout.windows) == ((WIDE.pool,) * 5, (window,))


@pytest.mark.parametrize(
    ("full", "sliding", "num_tables", "num_pools"),
    [(21, 7, 4, 7), (18, 18, 2, 18), (4, 22, 7, 4), (29, 27, 2, 29), (1, 1, 2, 1)],
)
def test_tables_have_as_many_layers_as_wastes_little(full: int, sliding: int, num_tables: int, num_pools: int) -> None:
    layout = lay_out_kv(windowed(*[None] * full, *[9] * sliding))
    assert (len(layout.windows), len(layout.pools)) == (num_tables, num_pools)


def test_a_window_that_no_context_fills_is_none() -> None:
    assert lay_out_kv(windowed(None, 64), 64).windows == (None,)
    assert lay_out_kv(windowed(None, 63), 64).windows == (None, 63)


def test_kinds_of_layers_have_pools_of_their_own() -> None:
    layout = lay_out_kv([WIDE, NARROW, WIDE])
    assert layout.pools == (WIDE.pool, NARROW.pool, WIDE.pool) and layout.windows == (None,)
    stacked = layout.stacked(10)
    assert (stacked.pools, stacked.counts) == ((WIDE.pool, NARROW.pool), (2, 1))
    assert stacked.layer_indices == (KVIndices(0, 0), KVIndices(1, 0), KVIndices(0, 0, 10))


@given(
    st.lists(st.tuples(st.sampled_from([WIDE, NARROW]), st.sampled_from([None, 3, 5])), min_size=1, max_size=70),
    st.booleans(),
)
def test_layers_share_only_what_they_may(kinds: list[tuple[KVSpec, int | None]], is_stacked: bool) -> None:
    specs = [spec._replace(window=window) for spec, window in kinds]
    layout = lay_out_kv(specs)
    sizes = collections.Counter(place.table for place in layout.layer_indices)
    assert len(layout.windows) * max(sizes.values()) <= len(specs) + len(specs) // 8
    if is_stacked:
        layout = layout.stacked(4)
    for spec, place in zip(specs, layout.layer_indices, strict=True):
        assert place.table is not None and place.pool is not None
        assert layout.windows[place.table] == spec.window
        assert layout.pools[place.pool] == spec.pool
        assert place.first_page in range(0, 4 * layout.counts[place.pool], 4)
    assert len(set(layout.layer_indices)) == len(specs), "layers of one table never share pools"


def test_a_layer_that_reads_another_has_its_pages() -> None:
    wide, narrow = KVSpec(4, 2, 16, "float32", None), KVSpec(4, 2, 8, "float32", 16)
    specs = [narrow, wide, narrow._replace(reads=0), wide._replace(reads=1), narrow._replace(reads=0)]
    found = lay_out_kv(specs)
    assert found.layer_indices[2] == found.layer_indices[4] == found.layer_indices[0]
    assert found.layer_indices[3] == found.layer_indices[1] != found.layer_indices[0]
    assert len(found.pools) == 2 and sorted(map(str, found.windows)) == ["16", "None"]
