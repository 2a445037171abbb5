"""Reads the compiler's texts of a program: host launches and copies."""

import math
import re

_ELEMENT_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}


def launched_segments(thunks: str) -> tuple[str, ...]:
    """Return the kinds of host launches, in order; kernels inside graphs or loops are not launches.

    Args:
        thunks: XLA's dump of a program's thunk sequence.
    """
    return tuple(re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE))


def graph_kernels(thunks: str) -> tuple[str, ...]:
    """Return the names of all kernels, including those in graphs and loops."""
    return tuple(re.findall(r"kCustomKernel\s+\[.*?\] (\S+)", thunks))


def copied_bytes(text: str) -> list[int]:
    """Return the sizes of a program's copies: explicit ones, and kernels that only slice (and convert).

    Args:
        text: The optimized program.
    """
    copies = re.findall(r"= (\S+) copy\(", text)
    slices = re.findall(r"= (\([^=]*?\)|\S+) fusion\([^)]*\), kind=kLoop, calls=%(?:fused_slice|wrapped_slice)", text)
    return [_num_bytes(result) for result in copies + slices]


def _num_bytes(result: str) -> int:
    """Return the bytes of a result, such as ``(bf16[2,3]{1,0}, f32[])``."""
    total = 0
    for element, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", result):
        sizes = [int(size) for size in dimensions.split(",") if size]
        total += math.prod(sizes) * _ELEMENT_BYTES.get(element, 4)
    return total
