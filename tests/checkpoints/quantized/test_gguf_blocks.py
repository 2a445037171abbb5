"""Blocks of GGUF files: what is unpacked equals, bit for bit, what the package ``gguf`` decodes."""

import numpy as np
import pytest

from checkpoints.quantized.gguf_blocks import UNPACK, planes_of
from checkpoints.quantized.gguf_grids import grid
from checkpoints.quantized.gguf_types import TYPES
from tests.gguf_files import random_blocks

NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def decode(name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the weights of blocks."""
    kind = TYPES[NUMBERS[name]]
    planes = planes_of(kind, blocks, slice(0, kind.block))
    assert planes.unpacked.codes.dtype.itemsize == 1 and planes.scales.dtype == np.float32
    return planes.decode()


def test_every_type_is_a_plain_one_or_is_unpacked() -> None:
    assert {kind.name for kind in TYPES.values() if kind.dtype is None} == set(UNPACK)


@pytest.mark.parametrize("name", UNPACK)
def test_blocks_equal_those_of_the_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="the package gguf, the reference, is not installed")
    constants = pytest.importorskip("gguf.constants")
    kind = constants.GGMLQuantizationType(NUMBERS[name])
    assert constants.GGML_QUANT_SIZES[kind] == (TYPES[NUMBERS[name]].block, TYPES[NUMBERS[name]].num_bytes)
    blocks = random_blocks(name, 700, TYPES[NUMBERS[name]].num_bytes, np.random.default_rng(0))
    expected = quants.dequantize(blocks, kind).astype(np.float32)
    np.testing.assert_array_equal(decode(name, blocks), expected)


def test_plain_types_are_those_of_the_package() -> None:
    constants = pytest.importorskip("gguf.constants", reason="the package gguf, the reference, is not installed")
    sizes = {int(kind): size for kind, size in constants.GGML_QUANT_SIZES.items()}
    assert all((kind.block, kind.num_bytes) == sizes[number] for number, kind in TYPES.items())


@pytest.mark.parametrize(("name", "points"), [("IQ2_XXS", 256), ("IQ2_XS", 512), ("IQ3_XXS", 256), ("IQ1_S", 2048)])
def test_grids_have_as_many_points_as_indices(name: str, points: int) -> None:
    assert len(grid(name)) == points == len(np.unique(grid(name), axis=0))


def test_a_block_by_hand() -> None:
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.array([0.5], np.float16).view(np.uint8)
    block[0, 2:] = 0x88  # zero
    block[0, 2], block[0, 17] = 0xF0, 0x1A  # elements 0 and 16; 15 and 31
    expected = np.zeros(32, np.float32)
    expected[[0, 16, 15, 31]] = [-4.0, 3.5, 1.0, -3.5]
    np.testing.assert_array_equal(decode("Q4_0", block)[0], expected)
