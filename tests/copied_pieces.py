"""What a loader makes of a recipe's pieces, in plain NumPy."""

from collections.abc import Mapping

import numpy as np

from checkpoints import Piece


def copy_piece(piece: Piece, tensors: Mapping[str, np.ndarray], array: np.ndarray) -> tuple[slice, ...]:
    """Copies a piece of a checkpoint's tensors into an array; returns where."""
    source = tuple(
        slice(start, start + size) for start, size in zip(piece.source_start, piece.source_shape, strict=True)
    )
    target = tuple(slice(start, start + size) for start, size in zip(piece.target_start, piece.shape, strict=True))
    values = tensors[piece.source][source]
    array[target] = (values.T if piece.is_transposed else values).reshape(piece.shape)
    return target
