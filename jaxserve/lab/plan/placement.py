"""Where the devices of a mesh are: on which host, and which link connects those along an axis."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.api.errors import ConfigError
from jaxserve.lab.devices import Device
from jaxserve.lab.links import Link
from sharding import MESH_AXES, MeshShape

_INNERMOST_FIRST = ("tensor", "expert", "stage", "data")  # as ``make_mesh`` numbers devices


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a mesh on hosts, consecutive devices on one host.

    Attributes:
        shape: Devices along each axis.
        device: Kind of device.
        hosts: Number of hosts.

    Raises:
        ConfigError: The hosts would have different numbers of devices.
    """

    shape: MeshShape
    device: Device
    hosts: int = 1

    def __post_init__(self):
        total = self.shape.num_devices
        if isinstance(self.hosts, bool) or not isinstance(self.hosts, int) or self.hosts < 1 or total % self.hosts:
            valid = ", ".join(str(hosts) for hosts in range(1, total + 1) if total % hosts == 0)
            raise ConfigError(f"hosts={self.hosts!r} does not divide the {total} devices of the mesh; valid: {valid}")

    @property
    def devices_per_host(self) -> int:
        """Number of devices of each host."""
        return self.shape.num_devices // self.hosts

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return dict(zip(MESH_AXES, self.shape.sizes, strict=True))

    def crosses_hosts(self, axes: Sequence[str]) -> bool:
        """Return whether the devices along some axes are on several hosts."""
        span, reached = 1, 1
        for axis in _INNERMOST_FIRST:
            span *= self.sizes[axis]
            if axis in axes and self.sizes[axis] > 1:
                reached = span
        return self.devices_per_host % reached != 0

    def link(self, axes: Sequence[str]) -> Link:
        """Return the slowest link between devices along some axes."""
        return self.device.host_link if self.crosses_hosts(axes) else self.device.link

    @property
    def links(self) -> Mapping[str, Link]:
        """The link of each axis of more than one device."""
        return {axis: self.link([axis]) for axis, size in self.sizes.items() if size > 1}
