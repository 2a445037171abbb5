"""Rows of records: each format's tensors, read without decoding, hold the same weights."""

from pathlib import Path

import numpy as np
import pytest

from checkpoints import Piece, TensorRecipe, loader, whole
from checkpoints.quantized.gguf_blocks import UNPACK, planes_of, records_of
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.planes import Words
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.records import SPANS, Kept, Records
from checkpoints.tensor_info import whole_index
from jaxserve.layers.weight_forms import form_of_records
from jaxserve.models.loading import pack
from pallas_kernels import quantized_linear_native
from pallas_kernels.native_library import unavailable
from pallas_kernels.quantized import decode, parts_of
from pallas_kernels.quantized import records_of as joined
from pallas_kernels.records_native import turned
from tests.checkpoints.quantized.test_formats import NAME, open_case
from tests.gguf_files import random_blocks
from tests.quantized_cases import CASES

NOT_KEPT = {"nf4, blocks across rows"}
"""Cases whose groups no record can hold."""
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def records_in(reader: QuantizedReader) -> Records | None:
    find = reader.quantized[NAME].records
    return None if find is None else find()


@pytest.mark.parametrize("case", CASES)
def test_records_hold_the_weights_of_the_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 200)  # so that boxes of several records are read
    reader, expected = open_case(tmp_path, CASES[case])
    with reader:
        records = records_in(reader)
        assert (records is None) == (case in NOT_KEPT)
        if records is None or records.groups is not None:
            return
        for span in SPANS:
            if (records.group or expected.shape[1]) % span or expected.shape[1] % span:
                continue
            reader.keep({NAME: Kept(records, span)})
            form = form_of_records(records, span)
            shape = reader.tensors[NAME].shape
            rows = reader.read(NAME, whole_index(shape))
            assert rows.dtype == np.uint8 and shape == (expected.shape[0], form.row_bytes(expected.shape[1]))
            np.testing.assert_array_equal(np.asarray(decode(rows, form)), expected)
            np.testing.assert_array_equal(joined(parts_of(rows, form), form), rows)
            size = form.record_bytes
            boxes = [(slice(first, 9), slice(size * first, shape[1])) for first in range(3)]
            reader.pack = pack  # with the native kernel
            for box in (whole_index(shape), *boxes):
                np.testing.assert_array_equal(reader.read(NAME, box), rows[box])
            recipe = whole(NAME, shape)
            np.testing.assert_array_equal(
                loader.read_shard(reader, recipe, ((0, shape[0]), (0, shape[1])), rows.dtype), rows
            )
            reader.pack = Records.pack_into


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("case", [case for case in CASES if "act-order" in case])
def test_records_of_sorted_features_hold_the_weights_of_the_file(case: str, parts: int, tmp_path: Path) -> None:
    reader, expected = open_case(tmp_path, CASES[case])
    with reader:
        records = records_in(reader)
        assert records is not None and records.groups is not None
        own = expected.shape[1] // parts
        groups = np.frombuffer(records.groups, np.int32).reshape(parts, own)
        for span in (8, 16):
            kept = Kept(records, span, parts)
            reader.keep({NAME: kept})
            order = records.order(span, parts)
            form = form_of_records(records, span)._replace(group=order.group)
            shape = reader.tensors[NAME].shape
            assert shape == (len(expected), form.row_bytes(order.columns.size))
            rows = reader.read(NAME, whole_index(shape))
            decoded = np.asarray(decode(rows, form)).reshape(len(rows), parts, -1)
            assert order.group == (16 if parts == 1 else span)
            for part, columns in enumerate(order.indices):
                assert sorted(columns[columns < own]) == list(range(own))
                records_groups = np.where(columns < own, groups[part][np.minimum(columns, own - 1)], -1).reshape(
                    -1, span
                )
                assert all(len({group for group in each if group >= 0}) <= 1 for each in records_groups.tolist())
                np.testing.assert_array_equal(
                    decoded[:, part, columns < own], expected[:, part * own + columns[columns < own]]
                )
            box = (slice(3, 9), slice(form.record_bytes, shape[1] // parts))  # of the first part
            np.testing.assert_array_equal(reader.read(NAME, box), rows[box])
            reader.pack = pack  # with the native kernel
            np.testing.assert_array_equal(reader.read(NAME, whole_index(shape)), rows)
            np.testing.assert_array_equal(reader.read(NAME, box), rows[box])
            reader.pack = Records.pack_into


@pytest.mark.parametrize("name", UNPACK)
def test_records_of_blocks_hold_their_weights(name: str) -> None:
    kind = TYPES[NUMBERS[name]]
    blocks = random_blocks(name, 3 * 4, kind.num_bytes, np.random.default_rng(0)).reshape(3, -1)
    planes = planes_of(kind, blocks, slice(0, 4 * kind.block))
    records = records_of(kind, has_factors=False)
    for span in SPANS:
        if records.group % span:
            continue
        rows = records.pack(planes, span)
        np.testing.assert_array_equal(np.asarray(decode(rows, form_of_records(records, span))), planes.decode())
        size = records.num_bytes(span)
        for first in (0, 1, kind.block // span + 2):  # boxes of other blocks and parts of them
            data, skip = blocks[:, first * span // kind.block * kind.num_bytes :], first * span % kind.block
            found = np.zeros((3, rows.shape[1] - first * size + 2), np.uint8)[:, 1:-1]
            pack(records, planes_of(kind, data, slice(skip, skip + 4 * kind.block - first * span)), span, found)
            np.testing.assert_array_equal(found, rows[:, first * size :])


BITS_IN_MEMORY = {"Q5_0": 6.5, "Q5_1": 7, "Q5_K": 6.625}
"""Bits of a weight where it is not one in 25 more than in the file at most."""
SMALL = ("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Types whose codes of three bits and fewer, or grids, take half a byte or a whole one in memory."""


@pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")
@pytest.mark.parametrize("name", [name for name in UNPACK if name not in SMALL])
def test_blocks_take_as_much_memory_as_in_the_file(name: str) -> None:
    kind, (outer, inner) = TYPES[NUMBERS[name]], (32, 4096)
    records = records_of(kind, has_factors=False)
    form = form_of_records(records, min(records.group, SPANS[0]))
    shape = quantized_linear_native.packed_shape(outer, inner, form)
    most = BITS_IN_MEMORY.get(name, 1.04 * 8 * kind.num_bytes / kind.block)
    assert 8 * np.prod(shape) <= most * outer * inner


@pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (33, 5), (64, 17), (95, 8)])
def test_native_kernel_turns_words(shape: tuple[int, int]) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, shape, np.uint32)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = np.pad(Words(places, 0, 8 * shape[1]).unpack(words), ((0, 0), (0, shape[0] % 2)))
    np.testing.assert_array_equal(turned(words, places), codes[:, ::2] | codes[:, 1::2] << 4)


def test_a_recipe_of_records_turns_transposed_pieces() -> None:
    pieces = (Piece("x", (1, 32, 5), (2, 0), (3, 64), is_transposed=True),)
    recipe = TensorRecipe((6, 64), pieces, (("x", (4, 96, 8)),)).in_records(32, {"x": 20})
    assert recipe.pieces == (Piece("x", (1, 5, 20), (2, 0), (3, 40)),)
    assert recipe.shape == (6, 40) and recipe.sources == (("x", (4, 8, 60)),)
