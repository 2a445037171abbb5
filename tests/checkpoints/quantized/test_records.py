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
from pallas_kernels.native_library import unavailable
from pallas_kernels.quantized import decode, parts_of
from pallas_kernels.quantized import records_of as joined
from pallas_kernels.records_native import turned
from tests.checkpoints.quantized.test_formats import NAME, open_case
from tests.gguf_files import random_blocks
from tests.quantized_cases import CASES

NOT_KEPT = {"gptq act-order", "gptq act-order, 3 bits", "nf4, blocks across rows"}
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
        if records is None:
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
