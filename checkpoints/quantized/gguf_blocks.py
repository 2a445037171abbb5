"""Unpacks the blocks of GGUF files to codes, scales and biases.

A weight is ``code * scale + bias``, or ``table[code] * scale``, with the scale of its group: exactly what llama.cpp's
reference computes in float32. The layouts are those of the structs in ``ggml-common.h``, whose names the parts have:
``d`` is a float16 scale of the block, ``qs`` has the low bits of the codes and ``qh`` the high ones. A function takes
uint8 [N, bytes of a block] and returns arrays with N rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from checkpoints.quantized.format import group_indices
from checkpoints.quantized.gguf_grids import grid
from checkpoints.quantized.gguf_types import GgufType
from checkpoints.quantized.planes import Blocks, Factored, Fields, Planes, bit_fields
from checkpoints.quantized.records import Records


class Unpacked(NamedTuple):
    """Blocks as codes and what they are multiplied with.

    Attributes:
        codes: int8 [N, elements of a block], or how the blocks hold them.
        scales: float32 [N, groups]; a group is a run of elements, all of one length.
        biases: float32, like the scales; None for none.
        table: float32 value of each code; None: the codes are the values.
        factored: What scales and biases were computed from, [N, groups]; None: they are stored themselves.
    """

    codes: np.ndarray | Blocks
    scales: np.ndarray
    biases: np.ndarray | None = None
    table: np.ndarray | None = None
    factored: Factored | None = None


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of OCP's microscaling formats; scales are halved."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_PARITY = np.array([bits | (bits.bit_count() & 1) << 7 for bits in range(128)], np.uint8)
"""Eight signs of which seven are stored: the number of negative ones is even."""
_SIGNS = (1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")).astype(np.int8)
"""The factors that the bits of a byte stand for, the lowest first."""


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Return the parts of blocks, of these sizes in bytes, each contiguous."""
    ends = np.cumsum(sizes)
    return [np.ascontiguousarray(blocks[:, end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _with_factors(
    codes: Blocks,
    d: np.ndarray,
    scales: np.ndarray,
    dmin: np.ndarray | None = None,
    mins: np.ndarray | None = None,
    table: np.ndarray | None = None,
) -> Unpacked:
    """Return blocks whose scales are integers times ``d``, and whose biases are integers times minus ``dmin``; both
    are the bytes of float16 numbers."""
    factors, d = np.broadcast_to(_float16(d), scales.shape), _half(d)
    if dmin is None or mins is None:
        return Unpacked(codes, d * scales, None, table, Factored(scales, factors))
    minus = (_float16(dmin).view(np.uint16) ^ np.uint16(1 << 15)).view(np.float16)
    factored = Factored(scales, factors, mins, np.broadcast_to(minus, mins.shape))
    return Unpacked(codes, d * scales, -_half(dmin) * mins, table, factored)


def _float16(data: np.ndarray) -> np.ndarray:
    """Return the numbers that bytes are."""
    return np.ascontiguousarray(data).view("<f2")


def _half(data: np.ndarray) -> np.ndarray:
    """Return float16 numbers in float32."""
    return _float16(data).astype(np.float32)


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    """Return codes minus their zero as int8, in place."""
    codes -= np.uint8(zero)  # wraps
    return codes.view(np.int8)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(2, 4, 16), zero=8), _half(blocks[:, :2]))


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(4, 4, 16)), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(6, 4, 16), Fields(2, 1, 1), 16), _half(blocks[:, :2]))


def _q5_1(blocks: np.ndarray) -> Unpacked:
    codes = Blocks(Fields(8, 4, 16), high=Fields(4, 1, 1))
    return Unpacked(codes, _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(2, 8, 32)), _half(blocks[:, :2]))


def _q2_k(blocks: np.ndarray) -> Unpacked:
    # A byte for each group of 16: the low nibble is the scale, the high one the offset.
    scales = np.ascontiguousarray(blocks[:, :16])
    return _with_factors(Blocks(Fields(16, 2, 32)), blocks[:, 80:82], scales & 15, blocks[:, 82:], scales >> 4)


def _q3_k(blocks: np.ndarray) -> Unpacked:
    scales, d = blocks[:, 96:108], blocks[:, 108:]
    six_bits = bit_fields(scales[:, :8], 4, 8) | bit_fields(scales[:, 8:], 2, 4) << np.uint8(4)
    codes = Blocks(Fields(32, 2, 32), Fields(0, 1, 32), 4)
    return _with_factors(codes, d, _signed(six_bits, 32))


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 8 scales and 8 offsets of 6 bits from 12 bytes: four whole ones of each, whose top bits are those of the
    other four; then the low bits of these."""
    words = np.ascontiguousarray(packed).view("<u4")  # of four bytes each, which are computed at once
    first, second, rest = (np.ascontiguousarray(words[:, place]) for place in range(3))
    low, high, six = (np.uint32(bits * 0x01010101) for bits in (0x0F, 0x30, 0x3F))
    shift = np.uint32(2)
    scales = np.stack([first & six, rest & low | first >> shift & high], axis=1)
    mins = np.stack([second & six, rest >> np.uint32(4) & low | second >> shift & high], axis=1)
    return scales.astype("<u4", copy=False).view(np.uint8), mins.astype("<u4", copy=False).view(np.uint8)


def _q4_k(blocks: np.ndarray) -> Unpacked:
    head = np.ascontiguousarray(blocks[:, :16])
    scales, mins = _scales_and_mins(head[:, 4:])
    return _with_factors(Blocks(Fields(16, 4, 32)), head[:, :2], scales, head[:, 2:4], mins)


def _q5_k(blocks: np.ndarray) -> Unpacked:
    head = np.ascontiguousarray(blocks[:, :16])
    scales, mins = _scales_and_mins(head[:, 4:])
    codes = Blocks(Fields(48, 4, 32), high=Fields(16, 1, 32))
    return _with_factors(codes, head[:, :2], scales, head[:, 2:4], mins)


def _q6_k(blocks: np.ndarray) -> Unpacked:
    codes = Blocks(Fields(0, 4, 64), Fields(128, 2, 32), 32)
    return _with_factors(codes, blocks[:, 208:], np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))


def _ternary(data: np.ndarray, run: int, digits: int) -> np.ndarray:
    """Return the ternary digits of bytes, which hold them as a fraction of 256: runs of bytes give the first digit of
    each, then the second of each."""
    powers = np.array([3**digit for digit in range(digits)], np.uint8)[:, None]
    fractions = data.reshape(len(data), -1, 1, run) * powers  # wraps
    return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)


def _tq1_0(blocks: np.ndarray) -> Unpacked:
    first, second, third, d = _split(blocks, 32, 16, 4, 2)
    codes = np.concatenate([_ternary(first, 32, 5), _ternary(second, 16, 5), _ternary(third, 4, 4)], axis=1)
    return Unpacked(_signed(codes, 1), _half(d))


def _tq2_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(0, 2, 32), zero=1), _half(blocks[:, 64:]))


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    exponent = blocks[:, :1]
    scales = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    codes = Blocks(Fields(1, 4, 16))
    return Unpacked(codes, np.where(exponent == 255, np.float32(np.nan), scales), table=_E2M1)


def _nvfp4(blocks: np.ndarray) -> Unpacked:
    scales = blocks[:, :4]
    exponent, mantissa = (scales >> 3 & 15).astype(np.int32), (scales & 7).astype(np.float32)
    # Half of a float of 4 exponent and 3 mantissa bits; the sign is ignored, and all ones are 0 as in llama.cpp.
    halves = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8), np.maximum(exponent, 1) - 11)
    codes = Blocks(Fields(4, 4, 8))
    return Unpacked(codes, np.where(scales == 127, np.float32(0), halves), table=_E2M1)


def _iq4_nl(blocks: np.ndarray) -> Unpacked:
    return Unpacked(Blocks(Fields(2, 4, 16)), _half(blocks[:, :2]), table=_IQ4)


def _iq4_xs(blocks: np.ndarray) -> Unpacked:
    six_bits = bit_fields(blocks[:, 4:8], 4, 1) | bit_fields(blocks[:, 2:4], 2, 1) << np.uint8(4)
    return _with_factors(Blocks(Fields(8, 4, 16)), blocks[:, :2], _signed(six_bits, 32), table=_IQ4)


def _points(name: str, indices: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    """Return the points of a grid as codes, negative where a bit of ``signs`` is set."""
    points = _gather(grid(name), indices)
    if signs is not None:
        points *= _gather(_SIGNS, signs.reshape(len(signs), -1))
    return points


def _gather(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return rows of an int8 table of 4 or 8 columns, one after the other for each row of indices."""
    words = table.view(np.uint32 if table.shape[1] == 4 else np.uint64).reshape(-1)
    return words[indices].view(np.int8)


def _iq_scales(d: np.ndarray, nibbles: np.ndarray, step: float) -> np.ndarray:
    return _half(d) * (np.float32(0.5) + nibbles.astype(np.float32)) * np.float32(step)


def _signs_and_scales(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return four bytes of signs and a scale from each word: four times 7 bits, and 4 bits."""
    return _PARITY[words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127], words >> 28


def _iq2_xxs(blocks: np.ndarray) -> Unpacked:
    # For each 32 elements four indices of points, and a word of signs and scale.
    d, qs = _split(blocks, 2, 64)
    signs, scales = _signs_and_scales(qs.view("<u4")[:, 1::2])
    indices = qs.reshape(len(qs), 8, 8)[:, :, :4].reshape(len(qs), -1)
    return Unpacked(_points("IQ2_XXS", indices, signs), _iq_scales(d, scales, 0.25))


def _iq2_xs(blocks: np.ndarray) -> Unpacked:
    # 16 bits for each 8 elements: the index of a point, and 7 signs.
    d, qs, scales = _split(blocks, 2, 64, 8)
    words = qs.view("<u2")
    codes = _points("IQ2_XS", words & 511, _PARITY[words >> 9])
    return Unpacked(codes, _iq_scales(d, bit_fields(scales, 4, 1), 0.25))


def _iq2_s(blocks: np.ndarray) -> Unpacked:
    d, qs, signs, qh, scales = _split(blocks, 2, 32, 32, 8, 8)
    indices = qs | bit_fields(qh, 2, 1).astype(np.uint16) << 8
    return Unpacked(_points("IQ2_S", indices, signs), _iq_scales(d, bit_fields(scales, 4, 1), 0.25))


def _iq3_xxs(blocks: np.ndarray) -> Unpacked:
    d, qs, words = _split(blocks, 2, 64, 32)
    signs, scales = _signs_and_scales(words.view("<u4"))
    return Unpacked(_points("IQ3_XXS", qs, signs), _iq_scales(d, scales, 0.5))


def _iq3_s(blocks: np.ndarray) -> Unpacked:
    d, qs, qh, signs, scales = _split(blocks, 2, 64, 8, 32, 4)
    indices = qs | bit_fields(qh, 1, 1).astype(np.uint16) << 8
    return Unpacked(_points("IQ3_S", indices, signs), _half(d) * (1 + 2 * bit_fields(scales, 4, 1)))


def _iq1(indices: np.ndarray, is_lower: np.ndarray, scales: np.ndarray) -> Unpacked:
    """Return points shifted by an eighth up or, where ``is_lower``, down; codes count eighths.

    Args:
        indices: Of points of 8 elements.
        is_lower: For runs of elements.
        scales: For other runs of elements.
    """
    codes = _points("IQ1_S", indices, None) * np.int8(8)
    shifts = np.where(is_lower, np.int8(-1), np.int8(1))
    codes.reshape(*shifts.shape, -1)[...] += shifts[..., None]
    return Unpacked(codes, scales * np.float32(0.125))


def _iq1_s(blocks: np.ndarray) -> Unpacked:
    # 16 bits for each 32 elements: high bits of four indices, 3 bits of scale, and the shift.
    d, qs, qh = _split(blocks, 2, 32, 16)
    words = qh.view("<u2")
    high = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    indices = qs | high.reshape(qs.shape) << 8
    return _iq1(indices, words >> 15 != 0, _half(d) * (2 * (words >> 12 & 7) + 1))


def _iq1_m(blocks: np.ndarray) -> Unpacked:
    # The high nibbles of four words of scales are the block's scale; below are four scales of 3 bits.
    qs, qh, scales = _split(blocks, 32, 16, 8)
    words = scales.view("<u2")
    nibbles = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    steps = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(len(words), -1)
    nibbles = bit_fields(qh, 4, 1)
    indices = qs | (nibbles & 7).astype(np.uint16) << 8
    return _iq1(indices, nibbles & 8 != 0, d * (2 * steps + 1))


UNPACK: dict[str, Callable[[np.ndarray], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""By the name of the type."""


_EXACT_SCALES = dict.fromkeys(
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "NVFP4", "IQ4_NL"), "float16"
) | {"MXFP4": "bfloat16"}
"""Types that hold the scales and biases of a type of blocks exactly, where float32 is not needed."""


def records_of(kind: GgufType, has_factors: bool) -> Records:
    """Return what rows of records of a type of blocks hold; with factors, scales are multiplied by other numbers."""
    found = UNPACK[kind.name](np.zeros((1, kind.num_bytes), np.uint8))
    scales = "float32" if has_factors else _EXACT_SCALES.get(kind.name, "float32")
    biases, table = None if found.biases is None else scales, found.table
    group, factors = kind.block // found.scales.shape[1], None
    if found.factored is not None and not has_factors:
        scales, factors = found.factored.scales.dtype.name, "float16"
        biases = None if found.factored.biases is None else found.factored.biases.dtype.name
    if isinstance(found.codes, Blocks) and found.codes.low.width + found.codes.high.width <= 4:
        values = None if table is None else tuple(map(float, table))
        own = Records("uint4", group, scales, found.codes.zero, biases=biases, table=values)
    else:
        assert table is None, kind
        own = Records("int8", group, scales, biases=biases)
    return own if factors is None else own._replace(factors=factors, factor_group=kind.block)


def planes_of(kind: GgufType, data: np.ndarray, columns: slice) -> Planes:
    """Return a box of rows, not decoded.

    Args:
        kind: The type of their blocks.
        data: uint8 [R, bytes], whole blocks.
        columns: The elements of each row that belong to the box.
    """
    found = UNPACK[kind.name](data.reshape(-1, kind.num_bytes))
    groups, needed = group_indices(columns.start, columns.stop, kind.block // found.scales.shape[1])

    def in_rows(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(data), -1)

    scales = in_rows(found.scales)[:, needed]
    factored = None
    if found.factored is not None:
        factored = found.factored.map(lambda each: in_rows(each)[:, needed])
    biases = None if found.biases is None else in_rows(found.biases)[:, needed]
    if isinstance(found.codes, Blocks):
        blocks = found.codes._replace(
            num_bytes=kind.num_bytes,
            num_codes=kind.block,
            first=columns.start,
            num_columns=columns.stop - columns.start,
        )
        return Planes(data, scales, None, biases, found.table, columns=groups, blocks=blocks, factored=factored)
    return Planes(in_rows(found.codes)[:, columns], scales, None, biases, found.table, columns=groups)
