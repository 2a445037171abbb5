"""Matrices of experts as checkpoints have them, [experts, out, in], for implementations of ``grouped_matmul``."""

import numpy as np
from jaxtyping import Float


def packed_shape(outer: int, inner: int, dtype: str, is_gated: bool = False) -> tuple[int, ...]:
    """Return the shape of one expert's own matrix."""
    del dtype, is_gated
    return outer, inner


def pack(matrices: Float[np.ndarray, "E outer inner"], is_gated: bool = False) -> Float[np.ndarray, "E outer inner"]:
    """Return the matrices themselves."""
    del is_gated
    return matrices


def unpack(
    packed: Float[np.ndarray, "E outer inner"], outer: int, inner: int, is_gated: bool = False
) -> Float[np.ndarray, "E outer inner"]:
    """Return the matrices themselves."""
    del is_gated
    assert packed.shape[1:] == (outer, inner), packed.shape
    return packed
