"""Unpacks the blocks of GGUF files to codes, scales and biases.

A weight is ``code * scale + bias``, or ``table[code] * scale``, with the scale of its group: exactly what llama.cpp's
reference computes in float32. The layouts are those of the structs in ``ggml-common.h``, whose names the parts have:
``d`` is a float16 scale of the block, ``qs`` has the low bits of the codes and ``qh`` the high ones. A function takes
uint8 [N, bytes of a block] and returns arrays with N rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from checkpoints.quantized.gguf_grids import grid


class Unpacked(NamedTuple):
    """Blocks as codes and what they are multiplied with.

    Attributes:
        codes: [N, elements of a block], int8, or uint8 with a table.
        scales: float32 [N, groups]; a group is a run of elements, all of one length.
        biases: float32, like the scales; None for none.
        table: float32 value of each code; None: the codes are the values.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None = None
    table: np.ndarray | None = None


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


def _half(data: np.ndarray) -> np.ndarray:
    """Return float16 numbers in float32."""
    return data.view("<f2").astype(np.float32)


def _fields(data: np.ndarray, width: int, run: int) -> np.ndarray:
    """Return the bit fields of bytes: runs of bytes hold the lowest field of each, then the next field of each.

    Args:
        data: uint8 [N, bytes].
        width: Bits of a field.
        run: Bytes of a run.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts
    fields &= np.uint8((1 << width) - 1)
    return fields.reshape(len(data), -1)


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    """Return codes minus their zero as int8, in place."""
    codes -= np.uint8(zero)  # wraps
    return codes.view(np.int8)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    d, qs = _split(blocks, 2, 16)
    return Unpacked(_signed(_fields(qs, 4, 16), 8), _half(d))


def _q4_1(blocks: np.ndarray) -> Unpacked:
    d, m, qs = _split(blocks, 2, 2, 16)
    return Unpacked(_fields(qs, 4, 16), _half(d), _half(m))


def _high_bits(qh: np.ndarray) -> np.ndarray:
    """Return the fifth bit of each of 32 codes, shifted to its place."""
    return np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> Unpacked:
    d, qh, qs = _split(blocks, 2, 4, 16)
    return Unpacked(_signed(_fields(qs, 4, 16) | _high_bits(qh), 16), _half(d))


def _q5_1(blocks: np.ndarray) -> Unpacked:
    d, m, qh, qs = _split(blocks, 2, 2, 4, 16)
    return Unpacked(_fields(qs, 4, 16) | _high_bits(qh), _half(d), _half(m))


def _q8_0(blocks: np.ndarray) -> Unpacked:
    d, qs = _split(blocks, 2, 32)
    return Unpacked(qs.view(np.int8), _half(d))


def _q2_k(blocks: np.ndarray) -> Unpacked:
    # A byte for each group of 16: the low nibble is the scale, the high one the offset.
    scales, qs, d, dmin = _split(blocks, 16, 64, 2, 2)
    return Unpacked(_fields(qs, 2, 32), _half(d) * (scales & 15), -(_half(dmin) * (scales >> 4)))


def _q3_k(blocks: np.ndarray) -> Unpacked:
    hmask, qs, scales, d = _split(blocks, 32, 64, 12, 2)
    six_bits = _fields(scales[:, :8], 4, 8) | _fields(scales[:, 8:], 2, 4) << np.uint8(4)
    codes = _fields(qs, 2, 32) | _fields(hmask, 1, 32) << np.uint8(2)
    return Unpacked(_signed(codes, 4), _half(d) * _signed(six_bits, 32))


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 8 scales and 8 offsets of 6 bits from 12 bytes: four whole ones of each, whose top bits are those of the
    other four; then the low bits of these."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    return scales, np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)


def _q4_k(blocks: np.ndarray) -> Unpacked:
    d, dmin, packed, qs = _split(blocks, 2, 2, 12, 128)
    scales, mins = _scales_and_mins(packed)
    return Unpacked(_fields(qs, 4, 32), _half(d) * scales, -(_half(dmin) * mins))


def _q5_k(blocks: np.ndarray) -> Unpacked:
    d, dmin, packed, qh, qs = _split(blocks, 2, 2, 12, 32, 128)
    scales, mins = _scales_and_mins(packed)
    codes = _fields(qs, 4, 32) | _fields(qh, 1, 32) << np.uint8(4)
    return Unpacked(codes, _half(d) * scales, -(_half(dmin) * mins))


def _q6_k(blocks: np.ndarray) -> Unpacked:
    ql, qh, scales, d = _split(blocks, 128, 64, 16, 2)
    codes = _fields(ql, 4, 64) | _fields(qh, 2, 32) << np.uint8(4)
    return Unpacked(_signed(codes, 32), _half(d) * scales.view(np.int8))


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
    qs, d = _split(blocks, 64, 2)
    return Unpacked(_signed(_fields(qs, 2, 32), 1), _half(d))


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    exponent, qs = _split(blocks, 1, 16)
    scales = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
    return Unpacked(_fields(qs, 4, 16), np.where(exponent == 255, np.float32(np.nan), scales), table=_E2M1)


def _nvfp4(blocks: np.ndarray) -> Unpacked:
    scales, qs = _split(blocks, 4, 32)
    exponent, mantissa = (scales >> 3 & 15).astype(np.int32), (scales & 7).astype(np.float32)
    # Half of a float of 4 exponent and 3 mantissa bits; the sign is ignored, and all ones are 0 as in llama.cpp.
    halves = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8), np.maximum(exponent, 1) - 11)
    return Unpacked(_fields(qs, 4, 8), np.where(scales == 127, np.float32(0), halves), table=_E2M1)


def _iq4_nl(blocks: np.ndarray) -> Unpacked:
    d, qs = _split(blocks, 2, 16)
    return Unpacked(_fields(qs, 4, 16), _half(d), table=_IQ4)


def _iq4_xs(blocks: np.ndarray) -> Unpacked:
    d, high, low, qs = _split(blocks, 2, 2, 4, 128)
    six_bits = _fields(low, 4, 1) | _fields(high, 2, 1) << np.uint8(4)
    return Unpacked(_fields(qs, 4, 16), _half(d) * _signed(six_bits, 32), table=_IQ4)


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
    return Unpacked(codes, _iq_scales(d, _fields(scales, 4, 1), 0.25))


def _iq2_s(blocks: np.ndarray) -> Unpacked:
    d, qs, signs, qh, scales = _split(blocks, 2, 32, 32, 8, 8)
    indices = qs | _fields(qh, 2, 1).astype(np.uint16) << 8
    return Unpacked(_points("IQ2_S", indices, signs), _iq_scales(d, _fields(scales, 4, 1), 0.25))


def _iq3_xxs(blocks: np.ndarray) -> Unpacked:
    d, qs, words = _split(blocks, 2, 64, 32)
    signs, scales = _signs_and_scales(words.view("<u4"))
    return Unpacked(_points("IQ3_XXS", qs, signs), _iq_scales(d, scales, 0.5))


def _iq3_s(blocks: np.ndarray) -> Unpacked:
    d, qs, qh, signs, scales = _split(blocks, 2, 64, 8, 32, 4)
    indices = qs | _fields(qh, 1, 1).astype(np.uint16) << 8
    return Unpacked(_points("IQ3_S", indices, signs), _half(d) * (1 + 2 * _fields(scales, 4, 1)))


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
    nibbles = _fields(qh, 4, 1)
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
