"""Blocks of GGUF files in other files (safetensors, Orbax): byte for byte, under Hugging Face's names.

The section ``quantization_config`` of config.json says which tensors have which type of blocks, and what else of the
file's metadata is needed to assemble the model's tensors.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints.arranged import ArrangedReader
from checkpoints.quantized.format import QuantizedTensor
from checkpoints.quantized.gguf import Gguf
from checkpoints.quantized.gguf_file import Metadata
from checkpoints.quantized.gguf_names import architecture_of
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.settings import Settings
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Index, TensorInfo, whole_index

METHOD: Final = "gguf"
_FACTORS: Final = "_factors"
_BLOCKS: Final = {kind.name: kind for kind in TYPES.values() if kind.dtype is None}


class StoredGguf:
    """The format of such files.

    Raises:
        CheckpointError: A type is unknown, or the section is not as ``section_of`` writes it.
    """

    name = "GGUF"
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, settings: Settings) -> None:
        self._types = {}
        for name, tensors in settings.nested("types").fields.items():
            if name not in _BLOCKS:
                raise settings.error(f"types: {name!r} is not supported; supported: {', '.join(_BLOCKS)}")
            if not isinstance(tensors, list):
                raise settings.error(f"types: {name}: expected a list of names of tensors, got {tensors!r}")
            self._types |= {str(tensor): _BLOCKS[name] for tensor in tensors}
        self._metadata = Metadata(settings.nested("metadata").fields, Path(settings.where))

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized one: that of the same name, and its factors."""
        return {
            name: tuple(stored for stored in (name, name + _FACTORS) if stored in tensors)
            for name in tensors
            if name in self._types
        }

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        own = name + _FACTORS
        factors = {name: reader.read(own, whole_index(reader.tensors[own].shape))} if own in stored else {}
        return Gguf({name: self._types[name]}, factors, self._metadata).open(name, stored, reader)

    def arranged(self, reader: CheckpointReader) -> CheckpointReader:
        """Return a reader of the model's tensors, given one of those that the file has in their place."""
        arrange = architecture_of(self._metadata).arrange
        return reader if arrange is None else ArrangedReader(reader, lambda inner: arrange(inner, self._metadata))


class BlocksReader(BaseReader):
    """Shows the tensors of a GGUF file as they are stored, and factors as tensors of their own.

    Args:
        reader: The file's tensors with Hugging Face's names; not closed with this reader.
        format: The format of the file.
    """

    def __init__(self, reader: CheckpointReader, format: Gguf) -> None:
        self._reader = reader
        self._factors = {name + _FACTORS: factors for name, factors in format.factors.items()}
        own = {name: TensorInfo(factors.shape, factors.dtype) for name, factors in self._factors.items()}
        self.tensors: Mapping[str, TensorInfo] = {**reader.tensors, **own}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array."""
        return self._factors[name][index] if name in self._factors else self._reader.read(name, index)

    def close(self) -> None:
        """Do nothing."""


def section_of(format: Gguf) -> dict[str, Any]:
    """Return the section ``quantization_config`` of config.json."""
    types: dict[str, list[str]] = {}
    for name, kind in format.types.items():
        types.setdefault(kind.name, []).append(name)
    fields = format.metadata.fields.items()
    metadata = {name: value for name, value in fields if isinstance(value, str | int | float | bool)}
    metadata = {name: value for name, value in metadata.items() if not name.startswith("tokenizer.")}
    return {"quant_method": METHOD, "types": types, "metadata": metadata}
