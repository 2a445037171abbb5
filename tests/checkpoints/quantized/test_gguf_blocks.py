"""Blocks of GGUF files: what is unpacked equals, bit for bit, what the package ``gguf`` decodes."""

import numpy as np
import pytest

from checkpoints.quantized.gguf_blocks import UNPACK
from checkpoints.quantized.gguf_grids import grid
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.planes import Planes

NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Return blocks of random bytes, with scales that are finite."""
    kind = TYPES[NUMBERS[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.num_bytes), np.uint8)
    halves = {
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "MXFP4": (),
        "NVFP4": (),
        "IQ1_M": (),
    }.get(name, (0,))
    for at in halves:
        scale = rng.uniform(-2.0, 2.0, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if name == "IQ1_M":  # the highest bits of the scale that its four parts make
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x30
    if name == "MXFP4":  # 255 is no number, and 252 to 254 overflow
        blocks[:, 0] %= 252
    return blocks


def decode(name: str, blocks: np.ndarray) -> np.ndarray:
    unpacked = UNPACK[name](blocks)
    groups = np.arange(unpacked.codes.shape[1]) // (unpacked.codes.shape[1] // unpacked.scales.shape[1])
    assert unpacked.codes.dtype.itemsize == 1 and unpacked.scales.dtype == np.float32
    return Planes(
        unpacked.codes, unpacked.scales, biases=unpacked.biases, table=unpacked.table, columns=groups
    ).decode()


def test_every_type_is_a_plain_one_or_is_unpacked() -> None:
    assert {kind.name for kind in TYPES.values() if kind.dtype is None} == set(UNPACK)


@pytest.mark.parametrize("name", UNPACK)
def test_blocks_equal_those_of_the_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="the package gguf, the reference, is not installed")
    constants = pytest.importorskip("gguf.constants")
    kind = constants.GGMLQuantizationType(NUMBERS[name])
    assert constants.GGML_QUANT_SIZES[kind] == (TYPES[NUMBERS[name]].block, TYPES[NUMBERS[name]].num_bytes)
    blocks = random_blocks(name, 700)
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
