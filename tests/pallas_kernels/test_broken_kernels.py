"""Break each kernel on purpose: the comparison with the reference must notice, as it must pass the kernel as it is.

``operation.compare`` is all that says on a GPU whether a kernel is right, so it is tested as code is: by faults. A
fault is a function that patches a kernel, or what it is launched with; each table gives faults by name. Kernels that
need Triton's interpreter are broken in ``test_jax_triton.py``.
"""

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    decode_attention_mosaic,
    decode_attention_triton,
    latent_attention_mosaic,
    latent_decode_mosaic,
    mosaic_support,
    native_library,
    paged_attention,
    paged_attention_pages,
    prefill_attention_mosaic,
    prefill_attention_triton,
    qkv_write,
    qkv_write_triton,
    quantized_linear,
    quantized_linear_native,
    registry,
    truncation,
    truncation_triton,
)
from pallas_kernels.attention_scores import MASKED
from pallas_kernels.attention_tiles import Pages
from pallas_kernels.latent_attention_mosaic import LatentKernels
from pallas_kernels.mosaic_ring import Splits
from pallas_kernels.operation import Comparison
from pallas_kernels.paged_attention_cases import Case as AttentionCase
from pallas_kernels.paged_attention_pages import PagedKernels
from pallas_kernels.qkv_write_triton import TritonQkvWriter
from pallas_kernels.quantized import Form, parts_of, records_of
from pallas_kernels.quantized_linear import AWQ, Q4_K, Q8_0
from pallas_kernels.truncation_triton import TritonTruncation
from tests.compiled import compiled

Fault = Callable[[pytest.MonkeyPatch], None]
KEY = jax.random.key(0)


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """Return a fault that puts ``make(owner.name)`` in place of ``owner.name``."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def together(*faults: Fault) -> Fault:
    """Return a fault that consists of several."""

    def patch(monkeypatch):
        for fault in faults:
            fault(monkeypatch)

    return patch


@functools.cache
def problem(name: str, row: str, case: Any) -> tuple[Any, Any, Any]:
    """Return a case's inputs, what the implementation is given, and the reference's result."""
    op, implementation = registry.operation(name), registry.load(name, row)
    inputs = compiled(op.make_inputs, case)(KEY)
    prepared = compiled(op.prepare, implementation, case)(inputs)
    return inputs, prepared, compiled(op.expected, case)(inputs)


def compared(name: str, row: str, case: Any) -> Comparison:
    """Run an implementation, with the patches of the moment, and compare its result with the reference's."""
    op, implementation = registry.operation(name), registry.load(name, row)
    inputs, prepared, expected = problem(name, row, case)
    found = jax.jit(functools.partial(op.run, implementation, case))(prepared)
    return op.compare(case, inputs, found, expected)


@functools.cache
def unbroken(name: str, row: str, case: Any, num_splits: int | None) -> Comparison:
    """Return ``compared`` before anything is patched but the number of splits."""
    del num_splits
    return compared(name, row, case)


def assert_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, row: str, case: Any, fault: Fault, num_splits: int | None = None
) -> None:
    """Compare the implementation as it is, which must be right, and broken, which must not."""
    if num_splits is not None:
        monkeypatch.setattr(paged_attention_pages, "decode_splits", lambda *sizes: num_splits)
    right = unbroken(name, row, case, num_splits)
    assert right.is_right and right.num_rows > 0, right
    fault(monkeypatch)
    broken = compared(name, row, case)
    assert not broken.is_right and broken.num_rows == right.num_rows, broken


# ---------------------------------------------------------------- attention: faults of what is launched

# Row 0 or 1 has the long context. Its neighbour of one token has an attention as long as a value, beside which the
# errors of the long row are small.
LONG = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16", "spare_rows": 1}
ATTENTION_CASES = {
    "decode": AttentionCase(rows=((2100, 1), (1, 1), (1100, 1)), **LONG),
    "prefill": AttentionCase(rows=((1, 1), (2100, 20), (70, 70)), **LONG),
    "decode_window": AttentionCase(rows=((2100, 1), (1, 1), (1100, 1)), window=200, **LONG),
    "prefill_window": AttentionCase(rows=((1, 1), (2100, 20), (70, 70)), window=200, **LONG),
    "decode_sinks": AttentionCase(rows=((2100, 1), (1, 1), (1100, 1)), has_sinks=True, **LONG),
    "prefill_sinks": AttentionCase(rows=((1, 1), (2100, 20), (70, 70)), has_sinks=True, **LONG),
}


def changed_launch(
    batch: Callable[[Any], Any] = lambda batch: batch, window: int = 0, owner: type = PagedKernels
) -> Fault:
    """Return a fault that changes the batch which attention kernels are launched with, or widens their window."""

    def make(attend):
        def broken(self, query, pools, own_batch, **settings):
            if window:
                settings["window"] += window
            return attend(self, query, pools, batch(own_batch), **settings)

        return broken

    return replaced(owner, "attend", make)


def changed_sinks(change: Callable[[Any], Any]) -> Fault:
    """Return a fault that changes the sinks which attention kernels are launched with."""

    def make(attend):
        def broken(self, query, pools, batch, *, sinks, **settings):
            return attend(self, query, pools, batch, sinks=change(sinks), **settings)

        return broken

    return replaced(PagedKernels, "attend", make)


def longer_contexts(change: int, owner: type = PagedKernels) -> Fault:
    """Return a fault that shifts the end of each context, and the diagonal of each chunk."""
    return changed_launch(
        lambda batch: batch._replace(
            context_lens=jnp.where(batch.context_lens > 1, batch.context_lens + change, batch.context_lens)
        ),
        owner=owner,
    )


def wrong_page(column: int, row: int | None = None) -> Fault:
    """Return a fault that gives each row, at one column, the page before it or the same column's page of a row."""

    def change(batch):
        table = batch.page_table
        wrong = table[:, column - 1] if row is None else table[row, column]
        is_long = batch.context_lens > column * LONG["page_size"]
        return batch._replace(page_table=table.at[:, column].set(jnp.where(is_long, wrong, table[:, column])))

    return changed_launch(change)


def without_tile(first: int, count: int) -> Fault:
    """Return a fault that leaves ``count`` pages from ``first`` on out of each context that has more."""

    def change(batch):
        table, lens = batch.page_table, batch.context_lens
        is_long = lens > (first + count) * LONG["page_size"] + batch.query_lens
        shorter = jnp.concatenate([table[:, :first], table[:, first + count :], table[:, -count:]], axis=1)
        return batch._replace(
            page_table=jnp.where(is_long[:, None], shorter, table),
            context_lens=jnp.where(is_long, lens - count * LONG["page_size"], lens),
        )

    return changed_launch(change)


LAUNCH_FAULTS: dict[str, Fault] = {
    "token_too_many": longer_contexts(1),
    "token_too_few": longer_contexts(-1),
    "page_before": wrong_page(column=9),
    "page_of_another_row": wrong_page(column=3, row=2),
    "tile_left_out": without_tile(8, 4),
}
WINDOW_FAULTS: dict[str, Fault] = {
    "window_too_wide": changed_launch(window=1),
    "window_too_narrow": changed_launch(window=-1),
}
SINKS_FAULTS: dict[str, Fault] = {
    "sinks_ignored": changed_sinks(lambda sinks: None),
    "sinks_of_other_heads": changed_sinks(lambda sinks: sinks[::-1]),
}


# ---------------------------------------------------------------- attention: faults in Pallas-Triton kernels

SHORT_TILES = 4  # contexts of so many tiles or fewer are spared by faults that would leave nothing of them


def skipped_tile(tile: int) -> Fault:
    """Return a fault that leaves a tile out of the walk over a context of several tiles."""

    def make(walk):
        def broken(self, refs, row, head, tiles, begun, score):
            is_skipped = tiles[1] > SHORT_TILES
            before, after = (jnp.clip(tile + i, *tiles) for i in (0, jnp.where(is_skipped, 1, 0)))
            begun = walk(self, refs, row, head, (tiles[0], before), begun, score)
            return walk(self, refs, row, head, (after, tiles[1]), begun, score)

        return broken

    return replaced(Pages, "walk", make)


def wrong_ids(tile: int, other_tile: int = 0, other_row: int = 0) -> Fault:
    """Return a fault that reads a tile from the pages of another tile or of another row."""

    def make(ids):
        def broken(self, table_ref, row, i):
            is_wrong = i == tile
            return ids(self, table_ref, row + jnp.where(is_wrong, other_row, 0), i + jnp.where(is_wrong, other_tile, 0))

        return broken

    return replaced(Pages, "_ids", make)


def changed_tiles(change: Callable[..., tuple[Any, Any, Any]]) -> Fault:
    """Return a fault that changes which tiles a context has and how many a split takes; short contexts are spared.

    Args:
        change: Return the first tile, the one after the last, and the tiles per split, from the right ones and the
            number of splits.
    """

    def make(split_tiles):
        def broken(self, length):
            right = split_tiles(self, length)
            wrong = change(*right, self.num_splits)
            return tuple(jnp.where(right[1] > SHORT_TILES, *pair) for pair in zip(wrong, right, strict=True))

        return broken

    return replaced(decode_attention_triton._Plan, "split_tiles", make)


def swapped_heads(module: Any) -> Fault:
    """Return a fault that stores the first head of each group as the second, and the other way round."""

    def make(store_heads):
        def broken(ref, index, value, is_used, head_dim):
            row = jnp.arange(value.shape[0])
            store_heads(ref, index, value[jnp.where(row < 2, 1 - row, row)], is_used, head_dim)

        return broken

    return replaced(module, "store_heads", make)


def changed_logs(change: Callable[[Any, Any], Any]) -> Fault:
    """Return a fault that changes the logarithms with which the splits of a row are combined."""

    def make(pltriton):
        def load(place, **options):
            logs = pltriton.load(place, **options)
            return change(logs, jnp.arange(logs.shape[0]))

        return SimpleNamespace(**{**vars(pltriton), "load": load})

    return replaced(decode_attention_triton, "pltriton", make)


TRITON_FAULTS: dict[str, Fault] = {
    "tile_skipped": skipped_tile(11),
    "first_tile_skipped": skipped_tile(0),
    "tile_of_the_tile_before": wrong_ids(11, other_tile=-1),
    "tile_of_another_row": wrong_ids(11, other_row=1),
    "heads_swapped": together(swapped_heads(decode_attention_triton), swapped_heads(prefill_attention_triton)),
}
TILE_FAULTS: dict[str, Fault] = {
    "last_tile_left_out": changed_tiles(lambda first, last, per_split, _: (first, last - 1, per_split)),
    "first_tile_left_out": changed_tiles(lambda first, last, per_split, _: (first + 1, last, per_split)),
}
COMBINE_FAULTS: dict[str, Fault] = {
    "tiles_per_split_rounded_down": changed_tiles(
        lambda first, last, _, splits: (first, last, jnp.maximum((last - first) // splits, 1))
    ),
    "split_dropped": changed_logs(lambda logs, split: jnp.where(split == 1, MASKED, logs)),
    "weight_too_large": changed_logs(lambda logs, split: jnp.where(split == 1, logs + 0.25, logs)),
    "logs_ignored": changed_logs(lambda logs, _: jnp.where(logs > MASKED, 0.0, logs)),
    "logs_of_the_next_split": changed_logs(lambda logs, split: jnp.where(split == 0, logs[1], logs)),
}
BROKEN_ATTENTION = [
    *[("decode", 1, table, fault) for table in (LAUNCH_FAULTS, TRITON_FAULTS, TILE_FAULTS) for fault in table],
    *[("decode", 4, table, fault) for table in (TRITON_FAULTS, TILE_FAULTS, COMBINE_FAULTS) for fault in table],
    *[("prefill", 1, table, fault) for table in (LAUNCH_FAULTS, TRITON_FAULTS) for fault in table],
    *[(case, 4, WINDOW_FAULTS, fault) for case in ("decode_window", "prefill_window") for fault in WINDOW_FAULTS],
    *[("decode_sinks", splits, SINKS_FAULTS, fault) for splits in (1, 4) for fault in SINKS_FAULTS],
    *[("prefill_sinks", 1, SINKS_FAULTS, fault) for fault in SINKS_FAULTS],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, num_splits, table, fault",
    BROKEN_ATTENTION,
    ids=[f"{case}-{num_splits}-{fault}" for case, num_splits, _, fault in BROKEN_ATTENTION],
)
def test_broken_triton_attention_is_noticed(monkeypatch, case, num_splits, table, fault):
    assert_noticed(monkeypatch, "paged_attention", "pallas-interpret", ATTENTION_CASES[case], table[fault], num_splits)


# ---------------------------------------------------------------- attention: faults in Mosaic kernels

SMALL = {**LONG, "num_heads": 2, "num_kv_heads": 1}
MOSAIC_CASES = {
    "decode": AttentionCase(rows=((330, 1), (1, 1)), **SMALL),
    "prefill": AttentionCase(rows=((330, 20),), **SMALL),
    "decode_window": AttentionCase(rows=((330, 1), (1, 1)), window=200, **SMALL),
    "prefill_window": AttentionCase(rows=((330, 20),), window=200, **SMALL),
    "decode_sinks": AttentionCase(rows=((330, 1), (1, 1)), has_sinks=True, **SMALL),
    "prefill_sinks": AttentionCase(rows=((330, 20),), has_sinks=True, **SMALL),
}


def changed_span(**changes: int) -> Fault:
    """Return a fault that adds to fields of the part of a context that a split reads; short contexts are spared."""

    def make(span):
        def broken(self, length, split):
            right = span(self, length, split)
            fields = {name: jnp.maximum(getattr(right, name) + change, 0) for name, change in changes.items()}
            return right._replace(
                **{name: jnp.where(length > self.tile, field, getattr(right, name)) for name, field in fields.items()}
            )

        return broken

    return replaced(Splits, "span", make)


class StalePages:
    """A row of a page table that names, at one column, the page before it."""

    def __init__(self, pages_ref: Any) -> None:
        self.pages_ref = pages_ref

    def __getitem__(self, column: Any) -> Any:
        return self.pages_ref[jnp.where(column == 9, 8, column)]


def stale_copy(module: Any) -> Fault:
    """Return a fault that copies, in place of a page of a context, the page before it."""

    def make(copy_tiles):
        return lambda tiles, span, ring, pages_ref, *others: copy_tiles(
            tiles, span, ring, StalePages(pages_ref), *others
        )

    return replaced(module, "copy_tiles", make)


MOSAIC_FAULTS: dict[str, Fault] = {
    **{name: LAUNCH_FAULTS[name] for name in ("token_too_many", "token_too_few", "tile_left_out")},
    "stale_copy": together(stale_copy(decode_attention_mosaic), stale_copy(prefill_attention_mosaic)),
}
SPAN_FAULTS: dict[str, Fault] = {
    "last_tile_of_a_split_left_out": changed_span(num_tiles=-1),
    "split_one_tile_too_early": changed_span(first=-1),
}
BROKEN_MOSAIC = [
    *[("decode", table, fault) for table in (MOSAIC_FAULTS, SPAN_FAULTS) for fault in table],
    *[("prefill", MOSAIC_FAULTS, fault) for fault in MOSAIC_FAULTS],
    *[(case, WINDOW_FAULTS, fault) for case in ("decode_window", "prefill_window") for fault in WINDOW_FAULTS],
    *[(case, SINKS_FAULTS, "sinks_of_other_heads") for case in ("decode_sinks", "prefill_sinks")],
]


@pytest.fixture
def clean_interpreter():
    """Forget compiled kernels, which would hide patches, and reset the interpreter of Mosaic GPU kernels."""
    kernels: list[Any] = [
        decode_attention_mosaic.decode_attention,
        prefill_attention_mosaic.prefill_attention,
        latent_decode_mosaic.decode_latents,
    ]
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")

    def forget():
        for kernel in kernels:
            kernel.clear_cache()

    yield forget
    forget()
    callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.skipif(mosaic_support.missing_jax() is not None, reason=str(mosaic_support.missing_jax()))
@pytest.mark.parametrize(
    "case, table, fault", BROKEN_MOSAIC, ids=[f"{case}-{fault}" for case, _, fault in BROKEN_MOSAIC]
)
def test_broken_mosaic_attention_is_noticed(monkeypatch, clean_interpreter, case, table, fault):
    def patch(monkeypatch):
        clean_interpreter()
        table[fault](monkeypatch)

    assert_noticed(monkeypatch, "paged_attention", "mosaic-interpret", MOSAIC_CASES[case], patch, num_splits=2)


# ---------------------------------------------------------------- attention over latents: faults in its Mosaic kernel

LATENT_CASE = AttentionCase(
    rows=((330, 1), (1, 1)), num_heads=5, num_kv_heads=1, head_dim=192, value_dim=128, dtype="bfloat16", spare_rows=1
)


def stale_latents(copy_lanes):
    return lambda tiles, span, pages_ref, *others: copy_lanes(tiles, span, StalePages(pages_ref), *others)


def without_rotated_key(compute_weights):
    return lambda plan, *others: compute_weights(plan._replace(head_dim=plan.value_dim), *others)


def columns_of_the_other_adder(add_values):
    def broken(plan, span, lane, weights, first_column):
        return add_values(plan, span, lane, weights, plan.part - first_column)

    return broken


def wrong_factor(mosaic_gpu):
    """Rescale the sums of earlier tiles by too little where a later tile has a larger score."""

    def load(ref, **options):
        factor = mosaic_gpu().load(ref, **options)
        return jnp.where(factor < 1, 1.1 * factor, factor)

    return lambda: SimpleNamespace(**{**vars(mosaic_gpu()), "load": load})


def changed_combination(change: Callable[[Any], Any]) -> Fault:
    """Return a fault that changes the logarithms with which the splits of a row are combined."""

    def make(combine_splits):
        return lambda parts, lse, lens, **settings: combine_splits(parts, change(lse), lens, **settings)

    return replaced(latent_decode_mosaic, "combine_splits", make)


LATENT_FAULTS: dict[str, Fault] = {
    "token_too_many": longer_contexts(1, LatentKernels),
    "token_too_few": longer_contexts(-1, LatentKernels),
    "stale_copy": replaced(latent_decode_mosaic, "copy_lanes", stale_latents),
    "rotated_key_ignored": replaced(latent_decode_mosaic, "_compute_weights", without_rotated_key),
    "columns_of_the_other_adder": replaced(latent_decode_mosaic, "_add_values", columns_of_the_other_adder),
    "wrong_factor": replaced(latent_decode_mosaic, "mosaic_gpu", wrong_factor),
    "split_dropped": changed_combination(lambda lse: lse.at[:, :, 1].set(MASKED)),
    "weight_too_large": changed_combination(lambda lse: lse.at[:, :, 1].add(0.25)),
    "last_tile_of_a_split_left_out": SPAN_FAULTS["last_tile_of_a_split_left_out"],
}


@pytest.mark.skipif(mosaic_support.missing_jax() is not None, reason=str(mosaic_support.missing_jax()))
@pytest.mark.parametrize("fault", LATENT_FAULTS)
def test_broken_mosaic_attention_over_latents_is_noticed(monkeypatch, clean_interpreter, fault):
    def patch(monkeypatch):
        clean_interpreter()
        LATENT_FAULTS[fault](monkeypatch)

    monkeypatch.setattr(latent_attention_mosaic, "decode_splits", lambda *sizes: 2)
    assert_noticed(monkeypatch, "latent_attention", "mosaic-interpret", LATENT_CASE, patch)


# ---------------------------------------------------------------- writing keys and values

QKV_CASE = qkv_write.Case(9, head_dim=64, is_normed=True, num_padding=2)
TOKEN = 3  # that faults are about; token 4 is its neighbour


def changed_places(change: Callable[[Any, Any], tuple[Any, Any]]) -> Fault:
    """Return a fault that writes tokens to other pages and offsets."""

    def make(write):
        def broken(self, qkv, pools, batch, **settings):
            pages, offsets = change(batch.token_pages, batch.token_offsets)
            return write(self, qkv, pools, batch._replace(token_pages=pages, token_offsets=offsets), **settings)

        return broken

    return replaced(TritonQkvWriter, "write", make)


def wrong_angles(rotated):
    return lambda parts, lanes, token, rotation: rotated(
        parts, lanes, jnp.where(token == TOKEN, TOKEN + 1, token), rotation
    )


def head_without_norm(normed):
    def broken(parts, lanes, weight_ref, layout):
        scaled = normed(parts, lanes, weight_ref, layout)
        return [jnp.where(lane.heads == 1, *pair) for lane, *pair in zip(lanes, parts, scaled, strict=True)]

    return broken


def swapped_key_and_value(load):
    """Load, for key/value head 1 of every token, the key as value and the value as key."""
    first_key = QKV_CASE.num_heads
    other = {first_key: QKV_CASE.num_kv_heads, first_key + QKV_CASE.num_kv_heads: -QKV_CASE.num_kv_heads}

    def broken(qkv_ref, token, first_head, lanes):
        shift = jnp.where(lanes.heads == 1, other.get(first_head, 0), 0)
        return load(qkv_ref, token, first_head, lanes._replace(heads=lanes.heads + shift))

    return broken


WRITE_FAULTS: dict[str, Fault] = {
    "written_to_the_next_place": changed_places(
        lambda pages, offsets: (pages, offsets.at[TOKEN].set(offsets[TOKEN] ^ 1))
    ),
    "written_to_another_page": changed_places(
        lambda pages, offsets: (pages.at[TOKEN].set((pages[TOKEN] + 1) % 4), offsets)
    ),
    "not_written": changed_places(lambda pages, offsets: (pages.at[TOKEN].set(pages[-1]), offsets)),
    "angles_of_the_next_token": replaced(qkv_write_triton, "_rotated", wrong_angles),
    "head_without_norm": replaced(qkv_write_triton, "_normed", head_without_norm),
    "key_and_value_swapped": replaced(qkv_write_triton, "_load", swapped_key_and_value),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_broken_writer_is_noticed(monkeypatch, fault):
    assert_noticed(monkeypatch, "qkv_write", "pallas-interpret", QKV_CASE, WRITE_FAULTS[fault])


# ---------------------------------------------------------------- truncation

TRUNCATION_CASE = truncation.CASES["odd"]


def changed_top_k(change: int) -> Fault:
    """Return a fault that keeps a token more or less in each row that top-k cuts."""

    def make(floor):
        return lambda self, scores, top_k, *others: floor(
            self, scores, jnp.where(top_k > 1, top_k + change, top_k), *others
        )

    return replaced(TritonTruncation, "floor", make)


def traced_anew(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that JAX has not traced yet: a trace from before a patch would hide it, and outlive it."""

    @functools.wraps(kernel)
    def copy(*refs):
        kernel(*refs)

    return copy


def dropped_chunk(chunk: int) -> Fault:
    """Return a fault that does not count a chunk of the vocabulary."""

    def make(load):
        return lambda scores_ref, row, index: jnp.where(index == chunk, -jnp.inf, load(scores_ref, row, index))

    return together(
        replaced(truncation_triton, "_chunk", make),
        replaced(truncation_triton, "_sum_kernel", traced_anew),
        replaced(truncation_triton, "_gather_kernel", traced_anew),
    )


TRUNCATION_FAULTS: dict[str, Fault] = {
    "a_token_too_many": changed_top_k(1),
    "a_token_too_few": changed_top_k(-1),
    "first_chunk_not_counted": dropped_chunk(0),
    "last_chunk_not_counted": dropped_chunk(1),
}


@pytest.mark.parametrize("fault", TRUNCATION_FAULTS)
def test_broken_truncation_is_noticed(monkeypatch, fault):
    assert_noticed(monkeypatch, "truncation", "pallas-interpret", TRUNCATION_CASE, TRUNCATION_FAULTS[fault])


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_each_floor_may_be_off_by_no_token(direction):
    """Move the floor of one row at a time so that it drops the last token to keep, or keeps the first to drop."""
    inputs, _, expected = problem("truncation", "pallas-interpret", TRUNCATION_CASE)
    found = jax.jit(functools.partial(truncation.run, truncation_triton.INTERPRETED, TRUNCATION_CASE))(inputs)
    assert truncation.compare(TRUNCATION_CASE, inputs, found, expected).is_right
    num_moved = 0
    for row, scores in enumerate(np.asarray(inputs.scores)):
        kept, dropped = scores[scores >= expected.most[row]], scores[scores < expected.least[row]]
        if direction == "lower" and dropped.size == 0:
            continue
        wrong = np.nextafter(kept.min(), np.float32(np.inf)) if direction == "higher" else dropped.max()
        broken = truncation.compare(TRUNCATION_CASE, inputs, found.at[row].set(wrong), expected)
        assert not broken.is_right and broken.place.startswith(f"row {row}: 1 token"), broken
        num_moved += 1
    assert num_moved == len(truncation.SETTINGS) - (2 if direction == "lower" else 0)


def test_any_floor_between_those_of_a_tie_is_right():
    """Three quarters are the mass of exactly two tokens: rounding may add the third, but no fourth."""
    scores = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))
    inputs = truncation.Inputs(scores, jnp.array([0]), jnp.array([0.75]), jnp.array([0.0]))
    case = truncation.Case(vocab_size=5, num_rows=1, settings=((0, 0.75, 0.0),))
    expected = truncation.expected(case, inputs)
    assert expected.least[0] == scores[0, 2] and expected.most[0] == scores[0, 1]
    for share, is_right in ((0.0, True), (0.3, True), (1.0, True), (-0.1, True), (-1.1, False), (1.1, False)):
        floor = expected.least + share * (expected.most - expected.least)
        assert truncation.compare(case, inputs, floor, expected).is_right == is_right, share
    assert truncation.compare(case, inputs, truncation_triton.INTERPRETED.floor(*inputs), expected).is_right


# ---------------------------------------------------------------- the comparison itself


@pytest.mark.parametrize("context", [512, 2048, 8192])
def test_tile_dropped_from_a_long_context_is_noticed(context):
    """Leave 64 tokens out of a plain reference in bfloat16, beside a row of one token.

    For 512, 2048 and 8192 tokens the error is about 48, 24 and 10 times what a row is allowed, but 3, 0.8 and 0.2 % of
    the largest value of all rows: a tolerance of 2 % of that value, as there was once, notices the first only.
    """
    case = AttentionCase(((context, 1), (1, 1)), num_heads=8, head_dim=128, dtype="bfloat16", spare_rows=0)
    inputs = compiled(paged_attention.make_inputs, case)(KEY)
    expected = compiled(paged_attention.expected, case)(inputs)
    right = expected.astype(case.dtype)
    assert paged_attention.compare(case, inputs, right, expected).is_right
    # The short row sees its first token only, which thus has to stay; the tile after it goes.
    keys, values = (jnp.delete(dense, np.arange(1, 65), axis=1) for dense in (inputs.keys, inputs.values))
    batch = inputs.batch._replace(context_lens=inputs.batch.context_lens - jnp.array([64, 0]))
    broken = compiled(paged_attention.expected, case)(paged_attention.Inputs(inputs.query, keys, values, batch))
    broken = broken.astype(case.dtype)
    comparison = paged_attention.compare(case, inputs, broken, expected)
    assert not comparison.is_right and comparison.place.startswith("attention[0,"), comparison
    share_of_largest = float(jnp.abs(broken - expected).max() / jnp.abs(expected).max())
    assert (share_of_largest <= 2e-2) == (context > 512), share_of_largest


# ---------------------------------------------------------------- quantized weights: faults of what is packed


def changed_records(change: Callable[[np.ndarray, Form], np.ndarray]) -> Callable[[np.ndarray, Form], np.ndarray]:
    """Return a fault that packs other records than those of the weight."""
    return lambda records, form: change(np.array(records), form)


def changed_field(field: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, Form], np.ndarray]:
    """Return a fault of one number of each group, [outputs, records]."""

    def make(records, form):
        parts = parts_of(records, form)
        return records_of({**parts, field: change(parts[field])}, form)

    return changed_records(make)


def swapped_halves(records, form):
    parts = parts_of(records, form)
    return records_of({**parts, "codes": parts["codes"] >> 4 | parts["codes"] << 4}, form)


QUANTIZED_FAULTS = {
    "swapped_nibbles": (AWQ, changed_records(swapped_halves)),
    "scale_of_the_next_output": (AWQ, changed_field("scale", lambda scales: np.roll(scales, 1, axis=0))),
    "scale_of_the_next_group": (Q8_0, changed_field("scale", lambda scales: np.roll(scales, 1, axis=1))),
    "zero_point_off_by_one": (AWQ, changed_field("zero", lambda zeros: zeros + 1)),
    "factor_of_the_next_block": (Q4_K, changed_field("scale_factor", lambda factors: np.roll(factors, 8, axis=1))),
}


@pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
def test_a_broken_order_of_features_is_noticed():
    case = quantized_linear.CASES["awq_order_filled"]
    inputs = compiled(quantized_linear.make_inputs, case)(KEY)
    expected = compiled(quantized_linear.expected, case)(inputs)
    prepared = quantized_linear.prepare(quantized_linear_native, case, inputs)
    assert inputs.order is not None
    for order, is_right in ((inputs.order, True), (jnp.roll(inputs.order, 1), False), (inputs.order % 230, False)):
        result = quantized_linear.run(quantized_linear_native, case, prepared._replace(order=order))
        assert quantized_linear.compare(case, inputs, result, expected).is_right == is_right


@pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
@pytest.mark.parametrize("activations", [None, "group"])
@pytest.mark.parametrize("fault", QUANTIZED_FAULTS)
def test_broken_quantized_weights_are_noticed(fault, activations):
    form, change = QUANTIZED_FAULTS[fault]
    case = quantized_linear.Case(3, form._replace(activations=activations), num_in=512, num_out=64)
    inputs = compiled(quantized_linear.make_inputs, case)(KEY)
    expected = compiled(quantized_linear.expected, case)(inputs)
    found = {}
    for name, records in {"right": inputs.weight, "broken": change(np.asarray(inputs.weight), form)}.items():
        packed = jnp.asarray(quantized_linear_native.pack(np.asarray(records), case.form))
        result = quantized_linear.run(quantized_linear_native, case, inputs._replace(weight=packed))
        found[name] = quantized_linear.compare(case, inputs, result, expected)
    assert found["right"].is_right and not found["broken"].is_right, found
