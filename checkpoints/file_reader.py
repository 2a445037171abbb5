"""The base of readers of one file whose tensors lie in it uncompressed."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints.file_ranges import RangeFile, StridedLayout
from checkpoints.reader import BaseReader
from checkpoints.tensor_info import Index, TensorInfo


class FileReader(BaseReader):
    """Reads one file.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, truncated or violates its format; the message names the file and the
            tensor.
    """

    def __init__(self, path: Path) -> None:
        self._file = RangeFile(path)
        try:
            self._layouts = self._read_layouts()
        except BaseException:
            self._file.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(layout.shape, layout.dtype) for name, layout in self._layouts.items()
        }

    @abstractmethod
    def _read_layouts(self) -> Mapping[str, StridedLayout]:
        """Read what the file says about its tensors, and check it."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array.

        Args:
            name: the tensor.
            index: one slice of step 1 for each axis.

        Raises:
            CheckpointError: the file has become shorter since it was opened, or cannot be read.
        """
        return self._file.read_box(self._layouts[name], index)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
