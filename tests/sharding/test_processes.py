"""Which meshes the processes of a group can share."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from sharding import MESH_AXES, MeshError, MeshShape, PlannedDevice, make_mesh
from sharding.global_arrays import is_shared, own_device
from sharding.processes import ALONE, Processes

CHIP = PlannedDevice(0, "cpu", "chip", 1 << 30)


def mesh_of(ranks: list[int]) -> Mesh:
    """A mesh along ``tensor`` of devices of these processes."""
    devices: list[Any] = [dataclasses.replace(CHIP, id=i, process_index=rank) for i, rank in enumerate(ranks)]
    return make_mesh(MeshShape(tensor=len(ranks)), devices)


def test_each_process_has_as_many_devices() -> None:
    assert ALONE.devices_of_each(MeshShape(data=2, stage=2, tensor=2)) == 8
    assert Processes(2).devices_of_each(MeshShape(tensor=4)) == 2
    assert Processes(4, num_on_host=2).devices_of_each(MeshShape(tensor=2, expert=2)) == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            MeshShape(tensor=3),
            r"share a mesh of 3 devices equally \(stage=1, tensor=3, expert=1\); use one of 2",
        ),
        (MeshShape(), "2 processes cannot share a mesh of 1 devices equally"),
        (MeshShape(stage=3), r"share a mesh of 3 devices equally \(stage=3, tensor=1, expert=1\)"),
        (MeshShape(data=2, tensor=2), "mesh axis 'data' of size 2 needs one process"),
    ],
)
def test_a_mesh_that_processes_cannot_share(shape: MeshShape, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Processes(2).devices_of_each(shape)


def test_a_mesh_must_take_as_many_devices_of_each_process() -> None:
    Processes(2).check(mesh_of([0, 0, 1, 1]))
    ALONE.check(mesh_of([0]))
    with pytest.raises(MeshError, match="takes 3, 1 devices of the processes"):
        Processes(2).check(mesh_of([0, 0, 0, 1]))
    with pytest.raises(MeshError, match="takes 2, 0 devices of the processes"):
        Processes(2).check(mesh_of([0, 0]))


def test_a_device_of_this_process() -> None:
    assert own_device(mesh_of([1, 1])).id == 0, "planned devices are nobody's"
    own = make_mesh(MeshShape(tensor=2))
    assert own_device(own) == own_device() == own.devices.flat[0]
    assert is_shared(mesh_of([0, 1])) and not is_shared(own)
    assert isinstance(own.devices, np.ndarray) and own.axis_names == MESH_AXES
