"""Mesh shapes, slices, and what is said where devices are missing."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sharding import MESH_AXES, MeshError, MeshShape, data_slices, ensure_cpu_devices, make_mesh, stage_slices
from tests.conftest import NUM_CPU_DEVICES


@pytest.mark.parametrize("axis", MESH_AXES)
@pytest.mark.parametrize("size", [0, -1, True])
def test_axis_sizes_are_whole_numbers(axis: str, size: int) -> None:
    with pytest.raises(MeshError, match=rf"mesh axis '{axis}': expected an integer >= 1, got {size!r}"):
        MeshShape(**{axis: size})


def test_slices_of_stages_are_neighbors() -> None:
    (first, second) = data_slices(make_mesh(MeshShape(data=2, stage=2, tensor=2)))
    ids = [[device.id for device in stage.devices.flat] for half in (first, second) for stage in stage_slices(half)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dict(stage_slices(second)[1].shape) == {"data": 1, "stage": 1, "tensor": 2, "expert": 1}


def test_mesh_has_all_axes_in_order() -> None:
    shape = MeshShape(data=2, tensor=4)
    assert shape.sizes == (2, 1, 4, 1) and shape.num_devices == 8
    mesh = make_mesh(shape)
    assert mesh.axis_names == MESH_AXES == ("data", "stage", "tensor", "expert")
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "tensor": 4, "expert": 1}
    assert list(mesh.devices.flat) == jax.devices(), "devices in order, neighbours along tensor"
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_neighbors_share_a_tensor_axis() -> None:
    mesh = make_mesh(MeshShape(data=2, tensor=2, expert=2))
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "tensor": 2, "expert": 2}
    ids = [[device.id for device in mesh.devices[data, 0, :, expert]] for data in range(2) for expert in range(2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_mesh_takes_the_first_devices_or_those_given() -> None:
    assert list(make_mesh(MeshShape(tensor=2)).devices.flat) == jax.devices()[:2]
    given = jax.devices()[:4:-1]
    assert list(make_mesh(MeshShape(data=3), given).devices.flat) == given


@pytest.mark.parametrize("shape", [MeshShape(tensor=16), MeshShape(data=3, tensor=3)])
def test_more_devices_than_exist(shape: MeshShape) -> None:
    asked = shape.num_devices
    message = rf"{asked} devices, but JAX has 8 cpu device\(s\); set jax.config.update"
    with pytest.raises(MeshError, match=rf"{message}\('jax_num_cpu_devices', {asked}\) before the first JAX operation"):
        make_mesh(shape)


def test_more_devices_than_given() -> None:
    with pytest.raises(MeshError, match="the mesh needs 4 devices, but JAX has 3"):
        make_mesh(MeshShape(tensor=4), jax.devices()[:3])


def test_slices_cover_the_mesh() -> None:
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    slices = data_slices(mesh)
    assert [dict(slice_.shape) for slice_ in slices] == [{"data": 1, "stage": 1, "tensor": 2, "expert": 1}] * 4
    assert [device for slice_ in slices for device in slice_.devices.flat] == list(mesh.devices.flat)
    assert all(slice_.axis_types == mesh.axis_types for slice_ in slices)


def test_devices_cannot_be_added_to_a_running_backend() -> None:
    assert jax.device_count() == NUM_CPU_DEVICES
    ensure_cpu_devices(1)
    ensure_cpu_devices(NUM_CPU_DEVICES)
    ensure_cpu_devices(2)
    assert jax.device_count() == NUM_CPU_DEVICES
    with pytest.raises(MeshError, match="the mesh needs 9 devices, but JAX has 8 cpu"):
        ensure_cpu_devices(9)


@pytest.mark.parametrize(
    ("before", "asked", "found"),
    [
        ("", 3, 3),
        ("", 1, 1),
        ("jax.config.update('jax_num_cpu_devices', 4)", 2, 4),
        ("os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'", 2, 4),
        ("os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'", 4, 4),
    ],
)
def test_devices_are_created_before_the_backend_starts(repository: Path, before: str, asked: int, found: int) -> None:
    """As many as are asked for; never fewer than the user has set, since another engine may want them."""
    code = f"import os, jax; {before}\nimport sharding; sharding.ensure_cpu_devices({asked}); print(jax.device_count())"
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(found)], done.stderr
