"""The named device mesh, its slices along ``data`` and ``stage``, and virtual CPU devices for testing layouts."""

import dataclasses
import os
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.axes import MESH_AXES, MeshAxis

Device = Any  # jax.Device, which type checkers treat as a variable


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A device that need not exist: what planning, tracing and the choice of kernels read of a ``jax.Device``.

    Attributes:
        id: Index.
        platform: JAX platform name.
        device_kind: The device's own name.
        memory_bytes: Total memory.
        process_index: Index of its host.
    """

    id: int
    platform: str
    device_kind: str
    memory_bytes: int
    process_index: int = 0


class MeshError(ValueError):
    """A mesh size is invalid, or there are too few devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each mesh axis; an axis of size 1 costs nothing."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {axis!r}: expected an integer >= 1, got {size!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``MESH_AXES``."""
        return self.data, self.stage, self.tensor, self.expert

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole mesh."""
        return int(np.prod(self.sizes))


def ensure_cpu_devices(num_devices: int) -> None:
    """Request virtual CPU devices if the platform is CPU and no JAX backend has been initialized.

    Call before the first JAX operation of the process. Keeps a larger number that is already configured; on platforms
    other than CPU it has no effect.

    Args:
        num_devices: Number of devices that the mesh needs.

    Raises:
        MeshError: A backend with fewer devices is already initialized.
    """
    # JAX's CPU collectives deadlock when many sharded steps are queued on few threads. The flag is read once, when
    # the backend starts.
    os.environ.setdefault("PJRT_NPROC", str(max(16, os.cpu_count() or 1)))
    if num_devices <= max(1, _configured_cpu_devices()):
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        if jax.device_count() < num_devices:
            raise MeshError(_too_few(num_devices)) from None


def make_mesh(shape: MeshShape, devices: list[Device] | None = None) -> Mesh:
    """Build the mesh over the first devices of the platform; consecutive devices are neighbors along ``tensor``.

    Args:
        shape: Size of each axis.
        devices: Devices to use in mesh order; None takes ``jax.devices()``.

    Raises:
        MeshError: Fewer devices exist than the shape needs.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.num_devices:
        raise MeshError(_too_few(shape.num_devices, len(devices)))
    grid = np.array(devices[: shape.num_devices], dtype=object)
    grid = grid.reshape(shape.data, shape.stage, shape.expert, shape.tensor).swapaxes(2, 3)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def data_slices(mesh: Mesh) -> list[Mesh]:
    """Return one sub-mesh per index along ``data``, each with all four axes (``data`` of size 1)."""
    return _slices(mesh, "data")


def stage_slices(mesh: Mesh) -> list[Mesh]:
    """Return one sub-mesh per index along ``stage``, each with all four axes (``stage`` of size 1)."""
    return _slices(mesh, "stage")


def _slices(mesh: Mesh, axis: MeshAxis) -> list[Mesh]:
    devices, dimension = mesh.devices, MESH_AXES.index(axis)
    parts = np.split(devices, devices.shape[dimension], dimension)
    return [Mesh(part, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)) for part in parts]


def _configured_cpu_devices() -> int:
    """Return the number of virtual CPU devices in the current settings."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    set_so_far: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    return max(set_so_far, int(flag[1]) if flag else 0)


def _too_few(asked: int, found: int | None = None) -> str:
    found = jax.device_count() if found is None else found
    platform = jax.default_backend()
    hint = (
        f"; set jax.config.update('jax_num_cpu_devices', {asked}) before the first JAX operation"
        if platform == "cpu"
        else ""
    )
    return f"the mesh needs {asked} devices, but JAX has {found} {platform} device(s){hint}"
