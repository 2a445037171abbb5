"""The processes of one JAX job that share a mesh: which meshes they can have, and what each has of one."""

import collections
import dataclasses

from jax.sharding import Mesh

from sharding.mesh import MeshError, MeshShape


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that have the devices of a mesh.

    Attributes:
        count: Number of processes.
        num_on_host: Those on the host of this one, itself included.
        has_slices: Whether a mesh may have data slices, as that of an engine that has moved.
    """

    count: int = 1
    num_on_host: int = 1
    has_slices: bool = False

    def devices_of_each(self, shape: MeshShape) -> int:
        """Return the number of devices of a mesh that each process has.

        Raises:
            MeshError: The processes cannot share the mesh equally, or it has data slices and may not.
        """
        if self.count == 1:
            return shape.num_devices
        if shape.data > 1 and not self.has_slices:
            raise MeshError(
                f"mesh axis 'data' of size {shape.data} needs one process, but the group has {self.count}; use only "
                "the axes 'stage', 'tensor' and 'expert', and reshard the engine to data slices once it runs"
            )
        if shape.num_devices % self.count:
            fitting = ", ".join(str(self.count * each) for each in (1, 2, 4))
            sizes = f"data={shape.data}, " if shape.data > 1 else ""
            sizes += f"stage={shape.stage}, tensor={shape.tensor}, expert={shape.expert}"
            raise MeshError(
                f"{self.count} processes cannot share a mesh of {shape.num_devices} devices equally ({sizes}); use one "
                f"of {fitting} or another multiple of {self.count}"
            )
        return shape.num_devices // self.count

    def check(self, mesh: Mesh) -> None:
        """Raise MeshError unless every process has equally many devices of the mesh."""
        if self.count == 1:
            return
        counts = collections.Counter(device.process_index for device in mesh.devices.flat)
        each = [counts[rank] for rank in range(self.count)]
        if len({*each}) > 1:
            raise MeshError(
                f"the mesh of {mesh.devices.size} devices takes {', '.join(map(str, each))} devices of the processes "
                "in the order of their ranks; it must take as many of each, so give each process only as many devices "
                f"(CUDA_VISIBLE_DEVICES) or use a mesh of all"
            )


ALONE = Processes()
"""One process has all devices."""
