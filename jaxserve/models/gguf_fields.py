"""Typed access to what the metadata and tensors of a GGUF file say about its model."""

import numpy as np

from checkpoints import CheckpointError
from checkpoints.quantized.gguf_file import GgufFiles
from checkpoints.quantized.gguf_names import architecture_of
from jaxserve.api.errors import UnsupportedModelError


class GgufFields:
    """Reads fields of the architecture of one file.

    Attributes:
        files: The file.
        metadata: Its metadata.
        name: Name of the architecture.
        architecture: The architecture.

    Args:
        files: The file.

    Raises:
        UnsupportedModelError: The architecture is not supported.
    """

    def __init__(self, files: GgufFiles) -> None:
        self.files, self.metadata = files, files.metadata
        try:
            self.architecture = architecture_of(files.metadata)
        except CheckpointError as error:
            raise UnsupportedModelError(str(error)) from error
        self.name = files.metadata.text("general.architecture")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a field of the architecture, the same for all layers."""
        return self.metadata.one_for_all_layers(f"{self.name}.{name}", default)

    def optional_integer(self, name: str) -> int | None:
        """Return a field of the architecture; None if it is missing."""
        return self.metadata.optional_integer(f"{self.name}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field of the architecture."""
        return self.metadata.number(f"{self.name}.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field of the architecture."""
        return self.metadata.flag(f"{self.name}.{name}", default)

    def is_given(self, name: str) -> bool:
        """Return whether the architecture has a field."""
        return f"{self.name}.{name}" in self.metadata.fields

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.files.tensors

    def factors(self, tensor: str) -> list[float] | None:
        """Return the divisors of rotary frequencies that a tensor has; None if there is none."""
        info = self.files.tensors.get(tensor)
        if info is None:
            return None
        values = self.files.read(tensor, tuple(slice(0, length) for length in info.shape))
        return values.astype(np.float64).reshape(-1).tolist()
