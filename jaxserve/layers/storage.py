"""Storage methods: how a matmul weight is kept in memory.

A method stores one logical weight ``[out, in]`` as one or more arrays, fills them from the checkpoint's weight,
multiplies by them, and restores the logical weight. ``METHODS`` has one line per method.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.linear import Fused
from pallas_kernels.quantized import Form

METHODS: dict[str, str] = {
    "plain": "jaxserve.layers.plain_storage",
    "quantized": "jaxserve.layers.quantized_storage",
}
"""The module of each method."""


class Segment(NamedTuple):
    """Outputs of a quantized weight that have one form.

    Attributes:
        num_outputs: Their number on each device.
        form: What they hold.
        num_sorted: Features that each device has of them in another order, which an array says: sorted by group, and
            filled up; 0: they are the weight's, in order.
    """

    num_outputs: int
    form: Form
    num_sorted: int = 0


class Experts(NamedTuple):
    """A matrix for each of several experts.

    Attributes:
        num_experts: On all devices.
        per_token: Experts that compute each token.
    """

    num_experts: int
    per_token: int


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight ``[outer, inner]``, or one for each expert, before a method stores it.

    Attributes:
        outer: Outputs on all devices.
        inner: Features on all devices.
        axes: Logical axes of outputs and features.
        parts: Devices that outputs and features are split over.
        dtype: Element type of the matrix that ``fill`` takes.
        kernel: Implementation of the method's operation: ``linear``, ``grouped_matmul``, or one for quantized weights.
        method: Name of the storage method.
        is_gated: Whether the matmul is followed by gating with an activation.
        experts: The experts that have such a matrix each; None for a single matrix.
        segments: The outputs of a quantized weight, by what they hold, in order; ``fill`` takes rows of records, those
            of shorter rows filled up with zeros. Empty for others.
    """

    outer: int
    inner: int
    axes: tuple[str | None, str | None]
    parts: tuple[int, int]
    dtype: str
    kernel: str
    method: str
    is_gated: bool = False
    experts: Experts | None = None
    segments: tuple[Segment, ...] = ()

    @property
    def local(self) -> tuple[int, int]:
        """Outputs and features per device."""
        return self.outer // self.parts[0], self.inner // self.parts[1]

    @property
    def outputs_per_token(self) -> int:
        """Outputs per token on one device, of all experts that compute it."""
        return self.local[0] * (1 if self.experts is None else self.experts.per_token)


class StoredArray(NamedTuple):
    """One array of a stored weight.

    Attributes:
        shape: On all devices.
        dtype: Element type.
        axes: Logical axis of each dimension; None where it is not split.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


Arrays = Mapping[str, Any]
"""A stored weight's arrays by name; a method's only array is called ``weight``."""


@runtime_checkable
class StorageMethod(Protocol):
    """The functions that the module of a method provides."""

    def arrays(self, weight: Weight) -> dict[str, StoredArray]:
        """Return shape, dtype and axes of the arrays that store a weight."""
        ...

    def fill(self, weight: Weight, part: Float[np.ndarray, "outer inner"]) -> dict[str, np.ndarray]:
        """Convert one device's part of the weight, or of its rows of records, to its part of each array, on the host.

        May overwrite ``part`` and return its memory, so that a large weight is not in memory twice.
        """
        ...

    def restore(self, weight: Weight, arrays: Mapping[str, np.ndarray]) -> Float[np.ndarray, "outer inner"]:
        """Convert one device's part of each array back to its part of the weight, on the host; lossy methods stay
        lossy."""
        ...

    def matmul(
        self,
        weight: Weight,
        arrays: Arrays,
        x: Float[Array, "T inner"],
        *,
        fused: Fused,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T results"]:
        """Compute one device's ``x @ weight.T`` with fused operations; see
        :class:`pallas_kernels.linear.LinearKernel`."""
        ...

    def rows(self, weight: Weight, arrays: Arrays, indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
        """Read rows of one device's part of the weight, in its dtype; indices are in range."""
        ...

    def grouped_matmul(
        self, weight: Weight, arrays: Arrays, x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "T results"]:
        """Multiply each row by the matrix of its expert; see :class:`pallas_kernels.grouped_matmul.GroupedMatmul`."""
        ...


def load_method(name: str) -> StorageMethod:
    """Return the module of a storage method."""
    return cast(StorageMethod, importlib.import_module(METHODS[name]))


def matmul(
    param: nnx.Param[Any], x: Float[Array, "T inner"], *, fused: Fused, num_rows: Int[Array, ""] | None = None
) -> Float[Array, "T results"]:
    """Multiply by one device's part of a stored weight; see :class:`StorageMethod`."""
    weight: Weight = param.get_metadata("weight")
    return load_method(weight.method).matmul(weight, _arrays(param), x, fused=fused, num_rows=num_rows)


def grouped_matmul(
    param: nnx.Param[Any], x: Float[Array, "T inner"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T results"]:
    """Multiply rows, ordered by expert, by one device's part of its experts' matrices; see :class:`StorageMethod`."""
    weight: Weight = param.get_metadata("weight")
    return load_method(weight.method).grouped_matmul(weight, _arrays(param), x, group_sizes)


def rows(param: nnx.Param[Any], indices: Int[Array, " T"]) -> Float[Array, "T inner"]:
    """Read rows of one device's part of a stored weight; see :class:`StorageMethod`."""
    weight: Weight = param.get_metadata("weight")
    return load_method(weight.method).rows(weight, _arrays(param), indices)


def _arrays(param: nnx.Param[Any]) -> Arrays:
    """Return the arrays that a stored weight's parameter holds, by name."""
    value = param.get_value()
    return value if isinstance(value, Mapping) else {"weight": value}
