"""GGUF, llama.cpp's files: blocks of 32 to 256 weights of a row with scales of their own (``gguf_blocks``).

A file is opened in four steps: its tensors of bytes (``gguf_file``), with Hugging Face's names and order of rows
(``gguf_names``), decoded, and assembled where Hugging Face has other pieces (``gguf_architectures``).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints.arranged import ArrangedReader
from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, group_indices
from checkpoints.quantized.gguf_blocks import planes_of, records_of
from checkpoints.quantized.gguf_file import GgufFiles, Metadata
from checkpoints.quantized.gguf_names import Source, architecture_of, scale_of, sources
from checkpoints.quantized.gguf_types import GgufType
from checkpoints.quantized.planes import Factored, Planes
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Index, TensorInfo, index_bounds, whole_index


def open_gguf(path: Path) -> CheckpointReader:
    """Open a GGUF file, or the first part of a split one, as the float tensors that it stands for.

    Raises:
        CheckpointError: The file is damaged, or of an architecture or type that is not supported.
    """
    files = GgufFiles(path)
    try:
        named = RenamedReader(files, sources(files.metadata, files.tensors))
        types = {name: files.stored[source.stored].type for name, source in named.sources.items()}
        blocks = {name: kind for name, kind in types.items() if kind.dtype is None}
        factors = _factors(files, named.sources)
        arrange = architecture_of(files.metadata).arrange
    except BaseException:
        files.close()
        raise
    reader = QuantizedReader(named, Gguf(blocks, factors, files.metadata)) if blocks else named
    return reader if arrange is None else ArrangedReader(reader, lambda inner: arrange(inner, files.metadata))


def _factors(files: GgufFiles, sources: Mapping[str, Source]) -> dict[str, np.ndarray]:
    """Return the factors of NVFP4 tensors: one number each, or one for each expert of a tensor that has all."""
    found: dict[str, np.ndarray] = {}
    for name, source in sources.items():
        stored = scale_of(source.stored)
        if stored not in files.tensors or not source.stored.endswith(".weight"):
            continue
        weight, info = files.stored[source.stored], files.tensors[stored]
        kind, experts = weight.type.name, weight.shape[0] if len(weight.shape) > 2 else 1
        if kind != "NVFP4" or info.dtype != np.float32 or info.num_bytes not in (4, 4 * experts):
            raise CheckpointError(
                f"{files.metadata.path}: tensor {stored!r} is {info.dtype} {list(info.shape)}, expected one float32 or "
                f"one for each of {experts} experts, of an NVFP4 tensor; {source.stored!r} is {kind}"
            )
        values = files.read(stored, whole_index(info.shape)).reshape(-1)
        found[name] = values if values.size == 1 or source.expert is None else values[source.expert, None]
    return found


class RenamedReader(BaseReader):
    """Shows the tensors of a file with Hugging Face's names and shapes, and rows in their order.

    Args:
        reader: The file; closed with this reader.
        sources: Where each tensor is.
    """

    def __init__(self, reader: CheckpointReader, sources: Mapping[str, Source]) -> None:
        self._reader, self.sources = reader, sources
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(source.shape, reader.tensors[source.stored].dtype) for name, source in sources.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.
        """
        source = self.sources[name]
        bounds = index_bounds(index, source.shape)
        shape = tuple(stop - start for start, stop in bounds)
        if 0 in shape:
            return np.empty(shape, self.tensors[name].dtype)
        box = tuple(slice(*each) for each in bounds)
        if source.num_heads:
            return self._read_interleaved(source, box)
        if source.first_row:
            rows = slice(box[-2].start + source.first_row, box[-2].stop + source.first_row)
            box = (*box[:-2], rows, box[-1])
        if source.expert is not None:
            box = (slice(source.expert, source.expert + 1), *box)
        stored_rank = len(self._reader.tensors[source.stored].shape)
        values = self._reader.read(source.stored, box[len(box) - stored_rank :]).reshape(shape)
        return values - values.dtype.type(source.offset) if source.offset else values

    def _read_interleaved(self, source: Source, box: Index) -> np.ndarray:
        """Read the whole heads that a box has rows of, and take these."""
        size = source.shape[0] // source.num_heads
        heads, whole = group_indices(box[0].start, box[0].stop, size)
        half, pair = np.divmod(np.arange(box[0].start, box[0].stop) % size, size // 2)
        values = self._reader.read(source.stored, (slice(whole.start * size, whole.stop * size), *box[1:]))
        return values[heads * size + 2 * pair + half]

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


class Gguf:
    """The format of one file.

    Args:
        types: Type of each tensor that is stored in blocks.
        factors: What some tensors are multiplied by: a number, or one for each expert.
        metadata: Those of the file.
    """

    name = "GGUF"
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, types: Mapping[str, GgufType], factors: Mapping[str, np.ndarray], metadata: Metadata) -> None:
        self.types, self.factors, self.metadata = types, factors, metadata

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensor of each quantized one; they have the same name."""
        return {name: (name,) for name in tensors if name in self.types}

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        kind = self.types[name]
        *rows, row_bytes = reader.tensors[name].shape
        factors = self.factors.get(name)

        def planes(box: Box) -> Planes:
            _, blocks = group_indices(box.columns.start, box.columns.stop, kind.block)
            index = (*(slice(at, at + 1) for at in box.leading), box.rows)
            part = slice(blocks.start * kind.num_bytes, blocks.stop * kind.num_bytes)
            data = reader.read(name, (*index, part)).reshape(box.rows.stop - box.rows.start, -1)
            skip = blocks.start * kind.block
            found = planes_of(kind, data, slice(box.columns.start - skip, box.columns.stop - skip))
            if factors is None:
                return found
            factor = factors[box.leading[0]] if factors.size > 1 else factors.reshape(())
            factored = Factored(found.scales, np.broadcast_to(factor, found.scales.shape))
            return found._replace(scales=found.scales * factor, factored=factored)

        shape = (*rows, row_bytes // kind.num_bytes * kind.block)
        return QuantizedTensor(shape, stored, planes, records=lambda: records_of(kind, factors is not None))
