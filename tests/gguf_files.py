"""Writes GGUF files for tests, from the description of the format and not with the product's code."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    np.dtype(np.uint8): 0,
    np.dtype(np.int8): 1,
    np.dtype(np.uint32): 4,
    np.dtype(np.int32): 5,
    np.dtype(np.float32): 6,
    np.dtype(np.uint64): 10,
}


class Blocks(NamedTuple):
    """A tensor in the file's form: the logical shape, the number of its type, and its bytes."""

    shape: tuple[int, ...]
    type: int
    data: bytes


def plain(array: np.ndarray) -> Blocks:
    """Return a float32 or float16 tensor as it is."""
    number = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[array.dtype]
    return Blocks(array.shape, number, np.ascontiguousarray(array).tobytes())


def string(text: str | bytes) -> bytes:
    """Return a string: its length and its bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Return the type and the bytes of a metadata value."""
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<Ii", 5, item) if item < 0 else struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", _STRING) + string(item)
    if isinstance(item, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _NUMBERS[item.dtype], len(item)) + item.tobytes()
    assert isinstance(item, Sequence)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(item)) + b"".join(map(string, item))


def header(metadata: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Return a header up to the padding; a tensor is its name, shape, type and offset."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [string(name) + value(item) for name, item in metadata.items()]
    for name, shape, number, offset in tensors:
        lengths = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(string(name) + lengths + struct.pack("<IQ", number, offset))
    return b"".join(parts)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Blocks]) -> bytes:
    """Return a file of these tensors."""
    listed, data = list[tuple[str, tuple[int, ...], int, int]](), bytearray()
    for name, tensor in tensors.items():
        listed.append((name, tensor.shape, tensor.type, len(data)))
        data += tensor.data
        data += bytes(-len(data) % ALIGNMENT)
    head = header(metadata, listed)
    return head + bytes(-len(head) % ALIGNMENT) + bytes(data)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Blocks], parts: int = 1) -> Path:
    """Write a file, or its parts; return the path of the first."""
    if parts == 1:
        path.write_bytes(gguf_bytes(metadata, tensors))
        return path
    names = list(tensors)
    paths = [path.with_name(f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf") for part in range(parts)]
    for part, file in enumerate(paths):
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(names)}
        file.write_bytes(
            gguf_bytes(
                {**(metadata if part == 0 else {}), **split}, {name: tensors[name] for name in names[part::parts]}
            )
        )
    return paths[0]


_HALVES = {
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
}
"""Where a block has scales in float16; others at its start."""


def random_blocks(name: str, count: int, num_bytes: int, rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Return blocks of random bytes, uint8 [count, num_bytes], whose scales are finite and about ``scale``."""
    blocks = rng.integers(0, 256, (count, num_bytes), np.uint8)
    for at in _HALVES.get(name, (0,)):
        halves = rng.uniform(-2.0 * scale, 2.0 * scale, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if name == "IQ1_M":  # the highest bits of the scale that its four parts make
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x30
    if name == "MXFP4":  # the exponent 255 is NaN, and 252 to 254 overflow float32
        blocks[:, 0] = blocks[:, 0] % 252 if scale == 1.0 else 127 + np.int8(np.log2(scale))
    return blocks


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of queries or keys as llama.cpp's older rotary embedding has them: halves of heads alternate."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
