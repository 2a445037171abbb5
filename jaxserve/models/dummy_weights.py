"""Small random numbers in place of a checkpoint, for `load_format="dummy"`: nothing is read from disk."""

import zlib
from collections.abc import Mapping

import numpy as np

from checkpoints import Index, Listing, TensorInfo, index_bounds
from checkpoints.reader import BaseReader

_PERIOD = 65521  # a prime, so that rows of any length begin at different numbers
_SCALE = 1e-3


class DummyReader(BaseReader):
    """A checkpoint of random numbers from -0.001 to 0.001, the same for the same name, shape and position.

    Args:
        tensors: Shape of each tensor by name.
    """

    def __init__(self, tensors: Listing) -> None:
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, np.dtype(np.float32)) for name, shape in tensors.items()
        }
        values = np.random.default_rng(0).uniform(-_SCALE, _SCALE, _PERIOD)
        self._values = values.astype(np.float32)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array."""
        bounds = index_bounds(index, self.tensors[name].shape)
        positions = np.full((1,) * len(bounds), zlib.crc32(name.encode()) % _PERIOD, np.int64)
        stride = 1
        for axis in reversed(range(len(bounds))):
            along = np.arange(*bounds[axis], dtype=np.int64) * stride % _PERIOD
            positions = positions + along.reshape([-1 if other == axis else 1 for other in range(len(bounds))])
            stride = stride * self.tensors[name].shape[axis] % _PERIOD
        return self._values[positions % _PERIOD]

    def close(self) -> None:
        """Do nothing: no file is open."""
