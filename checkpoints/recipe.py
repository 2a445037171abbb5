"""How a model's array is assembled from rectangular pieces of checkpoint tensors.

One form covers a plain copy, a vocabulary padded with zeros, KV heads repeated for more devices than heads,
fused projections (Phi-3's `qkv_proj`, Baichuan's `W_pack`) whose rows are reordered per device, and weights that a
checkpoint stores as `[in, out]` (GPT-2): the model's are `[out, in]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A box of `shape` copied from `source_start` of the tensor `source` to `target_start` of the array.

    A source of more dimensions than the array has the same matrix once for each index of its leading ones, as where all
    experts share one tensor; `source_start` then begins with those indices. A transposed piece is the transpose of a
    matrix of its source, whose box has the two lengths of `shape` in the other order.
    """

    source: str
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Lengths of the box in the source."""
        lengths = self.shape[::-1] if self.is_transposed else self.shape
        return (1,) * (len(self.source_start) - len(lengths)) + lengths


@dataclass(frozen=True)
class TensorRecipe:
    """The pieces of one array of the model.

    Attributes:
        shape: shape of the array.
        pieces: boxes copied into it, a later one over an earlier one; elements that no piece covers are zero.
        sources: name and expected full shape of every tensor that a piece copies from.

    Raises:
        ValueError: a piece has another rank than the array or a higher one than its source, reaches outside its source
            or the array, is transposed but not a matrix, or copies from a tensor that is not in `sources`.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]

    def in_records(
        self, span: int, num_bytes: Mapping[str, int], widths: Mapping[str, int] | None = None
    ) -> "TensorRecipe":
        """Return the recipe of the same rows as rows of records, each of ``span`` columns.

        The sources are then records too, and none is transposed. Rows of smaller records end before the last column.

        Args:
            span: Columns of a record.
            num_bytes: Bytes of a record of each source.
            widths: Columns of the rows of records of a source that has them in another order, or more of them; its
                pieces have whole rows.
        """
        shown = widths or {}

        def turned(places: tuple[int, ...], source: str, is_transposed: bool = False) -> tuple[int, ...]:
            *leading, rows, columns = places
            rows, columns = (columns, rows) if is_transposed else (rows, columns)
            assert columns in (0, self.shape[1]) or source not in shown, (places, source)
            columns = shown.get(source, columns) if columns else 0
            assert columns % span == 0, (places, span)
            return (*leading, rows, columns // span * num_bytes[source])

        pieces = tuple(
            Piece(
                piece.source,
                turned(piece.source_start, piece.source, piece.is_transposed),
                turned(piece.target_start, piece.source),
                turned(piece.shape, piece.source),
            )
            for piece in self.pieces
        )
        is_transposed = {piece.source: piece.is_transposed for piece in self.pieces}
        sources = tuple((name, turned(shape, name, is_transposed[name])) for name, shape in self.sources)
        return TensorRecipe(max(turned(self.shape, name) for name, _ in self.sources), pieces, sources)

    def __post_init__(self) -> None:
        source_shapes = dict(self.sources)
        for piece in self.pieces:
            if piece.source not in source_shapes:
                raise ValueError(f"{piece}: its source is not in sources {sorted(source_shapes)}")
            source_shape = source_shapes[piece.source]
            if piece.is_transposed and len(piece.shape) != 2:
                raise ValueError(f"{piece} is transposed, which needs two dimensions, but has {len(piece.shape)}")
            if not _is_box_inside(piece.source_start, piece.source_shape, source_shape):
                raise ValueError(f"{piece} reaches outside its source of shape {list(source_shape)}")
            if not _is_box_inside(piece.target_start, piece.shape, self.shape):
                raise ValueError(f"{piece} reaches outside the array of shape {list(self.shape)}")

    @property
    def num_elements(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    def renamed(self, name: Callable[[str], str]) -> "TensorRecipe":
        """Return the same recipe with other names of its sources; `name` returns the new name of each."""
        pieces = tuple(piece._replace(source=name(piece.source)) for piece in self.pieces)
        return TensorRecipe(self.shape, pieces, tuple((name(source), shape) for source, shape in self.sources))


def whole(source: str, shape: Sequence[int], is_transposed: bool = False) -> TensorRecipe:
    """Return the recipe of an array that equals one checkpoint tensor, or its transpose.

    Args:
        source: name of the tensor.
        shape: the array's shape.
        is_transposed: whether the tensor is the transpose of the array, a matrix.
    """
    shape = tuple(shape)
    origin = (0,) * len(shape)
    piece = Piece(source, origin, origin, shape, is_transposed)
    return TensorRecipe(shape, (piece,), ((source, piece.source_shape),))


def _is_box_inside(start: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(start) == len(lengths) == len(shape):
        return False
    return all(
        begin >= 0 and length >= 0 and begin + length <= limit
        for begin, length, limit in zip(start, lengths, shape, strict=True)
    )
