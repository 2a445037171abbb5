"""What a compiler's texts say of a program: what the host launches, what is copied, what is communicated."""

import math
import re

_COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
_ELEMENT_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}


def launched_segments(thunks: str) -> tuple[str, ...]:
    """Kinds of what the host launches, in order; a kernel inside a graph or a loop is none.

    Args:
        thunks: XLA's dump of a program's thunk sequence.
    """
    return tuple(re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE))


def graph_kernels(thunks: str) -> tuple[str, ...]:
    """Names of all kernels, those of graphs and loops included."""
    return tuple(re.findall(r"kCustomKernel\s+\[.*?\] (\S+)", thunks))


def copied_bytes(text: str) -> list[int]:
    """Sizes of what a program copies: by a copy of its own, or by a kernel that only slices (and converts).

    Args:
        text: The optimized program.
    """
    copies = re.findall(r"= (\S+) copy\(", text)
    slices = re.findall(r"= (\([^=]*?\)|\S+) fusion\([^)]*\), kind=kLoop, calls=%(?:fused_slice|wrapped_slice)", text)
    return [_num_bytes(result) for result in copies + slices]


def compiled_collectives(text: str) -> dict[str, int]:
    """Operands of every collective: XLA joins several into one with a tuple for a result.

    Args:
        text: The optimized program.
    """
    counts: dict[str, int] = {}
    for result, kind in re.findall(rf"= (\([^=]*?\)|\S+) ({_COLLECTIVES})(?:-start)?\(", text):
        num_arrays = len(re.findall(r"\w+\[", result))
        num_operands = num_arrays // 2 if result.startswith("((") else num_arrays  # a start gives operands and results
        counts[kind] = counts.get(kind, 0) + num_operands
    return counts


def _num_bytes(result: str) -> int:
    """Memory of a result, such as ``(bf16[2,3]{1,0}, f32[])``."""
    total = 0
    for element, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", result):
        sizes = [int(size) for size in dimensions.split(",") if size]
        total += math.prod(sizes) * _ELEMENT_BYTES.get(element, 4)
    return total
