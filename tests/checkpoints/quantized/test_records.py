"""Rows of records: each format's tensors, read without decoding, hold the same weights."""

from pathlib import Path

import numpy as np
import pytest

from checkpoints import Piece, TensorRecipe
from checkpoints.quantized.gguf_blocks import UNPACK, planes_of, records_of
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.records import SPANS, Kept, Records
from checkpoints.tensor_info import whole_index
from jaxserve.layers.weight_forms import form_of_records
from pallas_kernels.quantized import decode, parts_of
from pallas_kernels.quantized import records_of as joined
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
def test_records_hold_the_weights_of_the_file(case: str, tmp_path: Path) -> None:
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
            box = (slice(3, 9), slice(size, 3 * size))
            np.testing.assert_array_equal(reader.read(NAME, box), rows[box])


@pytest.mark.parametrize("name", UNPACK)
def test_records_of_blocks_hold_their_weights(name: str) -> None:
    kind = TYPES[NUMBERS[name]]
    blocks = random_blocks(name, 3 * 4, kind.num_bytes, np.random.default_rng(0)).reshape(3, -1)
    planes = planes_of(kind, blocks, slice(0, 4 * kind.block))
    records = records_of(kind, has_factors=False)
    for span in SPANS:
        if records.group % span:
            continue
        found = decode(records.pack(planes, span), form_of_records(records, span))
        np.testing.assert_array_equal(np.asarray(found), planes.decode())


def test_a_recipe_of_records_turns_transposed_pieces() -> None:
    pieces = (Piece("x", (1, 32, 5), (2, 0), (3, 64), is_transposed=True),)
    recipe = TensorRecipe((6, 64), pieces, (("x", (4, 96, 8)),)).in_records(32, {"x": 20})
    assert recipe.pieces == (Piece("x", (1, 5, 20), (2, 0), (3, 40)),)
    assert recipe.shape == (6, 40) and recipe.sources == (("x", (4, 8, 60)),)
