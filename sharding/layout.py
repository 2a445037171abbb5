"""Sharding layouts: which mesh axis each logical axis of an array is split over."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.axes import LOGICAL_AXES, MESH_AXES


class LayoutError(ValueError):
    """A layout names an unknown axis, or maps two dimensions of an array to one mesh axis."""


@dataclasses.dataclass(frozen=True)
class ShardingLayout:
    """A frozen map from logical axes to mesh axes.

    Attributes:
        name: Name of the layout in ``sharding.registry``.
        rules: Mesh axis of each split logical axis; logical axes that are not listed are replicated.
        all_reduces_per_layer: All-reduces over ``tensor`` per decoder layer (query/key norms over all heads add one).
        all_reduces_per_step: Further all-reduces per step.
        all_gathers_per_step: All-gathers per step.
    """

    name: str
    rules: Mapping[str, str]
    all_reduces_per_layer: int = 0
    all_reduces_per_step: int = 0
    all_gathers_per_step: int = 0

    def __post_init__(self):
        for logical, axis in self.rules.items():
            if logical not in LOGICAL_AXES:
                raise LayoutError(f"layout {self.name!r}: unknown logical axis {logical!r}; known: {LOGICAL_AXES}")
            if axis not in MESH_AXES:
                raise LayoutError(f"layout {self.name!r}: unknown mesh axis {axis!r}; known: {MESH_AXES}")
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))

    def mesh_axis(self, logical: str) -> str | None:
        """Return the mesh axis that a logical axis is split over, or None."""
        if logical not in LOGICAL_AXES:
            raise LayoutError(f"layout {self.name!r}: unknown logical axis {logical!r}; known: {LOGICAL_AXES}")
        return self.rules.get(logical)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the partition of an array from its logical axes, one per dimension (None: replicated).

        Raises:
            LayoutError: Two dimensions map to the same mesh axis.
        """
        entries = [None if axis is None else self.mesh_axis(axis) for axis in axes]
        used = [entry for entry in entries if entry is not None]
        if len(used) != len(set(used)):
            raise LayoutError(f"layout {self.name!r} maps two dimensions of {axes} to one mesh axis: {entries}")
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh, *axes: str | None) -> NamedSharding:
        """Return ``spec`` bound to a mesh."""
        return NamedSharding(mesh, self.spec(*axes))

    def on(self, mesh: Mesh) -> "ShardingLayout":
        """Return this layout without rules for mesh axes of one device, whose collectives would do nothing."""
        sizes = dict(mesh.shape)
        kept = {logical: axis for logical, axis in self.rules.items() if sizes[axis] > 1}
        if kept == dict(self.rules):
            return self
        return dataclasses.replace(
            self, rules=kept, all_reduces_per_layer=0, all_reduces_per_step=0, all_gathers_per_step=0
        )


def stacked(sharding: Sharding) -> Sharding:
    """Return the sharding of arrays with a new leading dimension that is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
