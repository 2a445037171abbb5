"""The element types of GGUF files: how many bytes a block of elements takes, and which are plain numbers.

Numbers and sizes are those of ggml (``ggml_type`` and the structs of ``ggml-common.h``).
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class GgufType(NamedTuple):
    """A type of elements.

    Attributes:
        name: Its name in llama.cpp.
        block: Elements of a block; blocks never span rows.
        num_bytes: Bytes of a block.
        dtype: Type of plain numbers; None if blocks are to be decoded.
    """

    name: str
    block: int
    num_bytes: int
    dtype: np.dtype | None = None


def _plain(name: str, dtype: type) -> GgufType:
    return GgufType(name, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


TYPES: dict[int, GgufType] = {
    0: _plain("F32", np.float32),
    1: _plain("F16", np.float16),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", 32, 18),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136),
    24: _plain("I8", np.int8),
    25: _plain("I16", np.int16),
    26: _plain("I32", np.int32),
    27: _plain("I64", np.int64),
    28: _plain("F64", np.float64),
    29: GgufType("IQ1_M", 256, 56),
    30: _plain("BF16", ml_dtypes.bfloat16),
    34: GgufType("TQ1_0", 256, 54),
    35: GgufType("TQ2_0", 256, 66),
    39: GgufType("MXFP4", 32, 17),
    40: GgufType("NVFP4", 64, 36),
}
"""By number in the file."""

REFUSED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}
"""Names of types that are not read, for messages: removed from the format, or only of intermediate results."""
