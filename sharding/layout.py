"""A layout is data: which mesh axis each logical axis of an array is split over."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.axes import LOGICAL_AXES, MESH_AXES


class LayoutError(ValueError):
    """A layout names an unknown axis, or puts one mesh axis on two dimensions of an array."""


@dataclasses.dataclass(frozen=True)
class ShardingLayout:
    """A frozen map from logical axes to mesh axes.

    Attributes:
        name: The layout's name in ``sharding.registry``.
        rules: Mesh axis of each split logical axis; one left out is replicated.
        all_reduces_per_layer: All-reduces a decoder layer does over ``tensor`` (norms over all heads add one).
        all_reduces_per_step: All-reduces a step does besides.
        all_gathers_per_step: All-gathers a step does.
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
        """Return the mesh axis a logical axis is split over, or None."""
        if logical not in LOGICAL_AXES:
            raise LayoutError(f"layout {self.name!r}: unknown logical axis {logical!r}; known: {LOGICAL_AXES}")
        return self.rules.get(logical)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the partition of an array from its logical axes, one a dimension (None: replicated).

        Raises:
            LayoutError: Two dimensions land on the same mesh axis.
        """
        entries = [None if axis is None else self.mesh_axis(axis) for axis in axes]
        used = [entry for entry in entries if entry is not None]
        if len(used) != len(set(used)):
            raise LayoutError(f"layout {self.name!r} puts two dimensions of {axes} on one mesh axis: {entries}")
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh, *axes: str | None) -> NamedSharding:
        """``spec`` bound to a mesh."""
        return NamedSharding(mesh, self.spec(*axes))

    def on(self, mesh: Mesh) -> "ShardingLayout":
        """This layout without the rules whose mesh axis has one device, so that their collectives vanish."""
        sizes = dict(mesh.shape)
        kept = {logical: axis for logical, axis in self.rules.items() if sizes[axis] > 1}
        if kept == dict(self.rules):
            return self
        return dataclasses.replace(
            self, rules=kept, all_reduces_per_layer=0, all_reduces_per_step=0, all_gathers_per_step=0
        )


def stacked(sharding: Sharding) -> Sharding:
    """Return the sharding of arrays behind a new first dimension that is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
