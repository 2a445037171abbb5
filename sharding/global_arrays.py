"""Puts arrays onto meshes some of whose devices may belong to other processes.

Every process calls these functions for the same arrays in the same order and with the same values, and puts the shards
of its own devices. None of them communicates: ``jax.device_put`` of a host array to devices of several processes would
compare its values in a collective, which hangs all if one process skips it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.mesh import Device, PlannedDevice


def put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Return a host array, which all processes have, as an array on devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=array.dtype)


def put_parts(shape: tuple[int, ...], sharding: Sharding, parts: Mapping[Device, Any]) -> jax.Array:
    """Return an array made of the parts of the devices, in host memory or on any device of this process; those of other
    processes are not needed and not read."""
    own = sharding.addressable_devices
    shards = [jax.device_put(part, device) for device, part in parts.items() if device in own]
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.block_until_ready(shards))


def hand_over(arrays: Any, shardings: Any) -> Any:
    """Copy a tree of arrays to other devices of this process without waiting; equal specs make that asynchronous."""
    return jax.device_put(arrays, shardings)


def can_send(source: Mesh, target: Mesh) -> bool:
    """Return whether the backend can send arrays from one mesh to another whose devices belong to other processes.

    JAX asks for equal specs on as many devices of one kind, and for other processes. XLA sends between processes on
    GPUs (through NCCL), and not on CPUs.
    """
    given, wanted = [*source.devices.flat], [*target.devices.flat]
    return (
        source.devices.shape == target.devices.shape
        and {device.process_index for device in given}.isdisjoint(device.process_index for device in wanted)
        and len({device.device_kind for device in [*given, *wanted]}) == 1
        and getattr(given[0].client, "supports_cross_host_transfers", False)
    )


def send(
    array: jax.Array | None, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Send an array to another mesh by ``jax.device_put``, where ``can_send`` says so, without waiting.

    All processes of both meshes call this for the same arrays in the same order.

    Args:
        array: The array on the source; None in the processes of the target.
        source: Sharding that it has.
        target: Sharding that it gets, with the same spec.
        shape: Its shape.
        dtype: Its data type.
    """
    if array is None:
        array = jax.make_array_from_single_device_arrays(shape, source, [], dtype=dtype)
    return jax.device_put(array, target)


def on_all(mesh: Mesh) -> Callable[[Any], Any]:
    """Return a function that gives every device of a mesh the whole of each array of a tree.

    It compiles a program for each new shape, with an all-gather.
    """
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def is_shared(mesh: Mesh) -> bool:
    """Return whether some devices of a mesh belong to other processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def own_devices(mesh: Mesh) -> list[Device]:
    """Return the devices of a mesh that belong to this process; all of a planned mesh."""
    devices = [*mesh.devices.flat]
    if isinstance(devices[0], PlannedDevice):
        return devices
    return [device for device in devices if device.process_index == jax.process_index()]


def own_device(mesh: Mesh | None = None) -> Device:
    """Return the first device of this process, of a mesh if it has any there; of a planned mesh its first device.

    Only devices of this process can be asked for their memory.
    """
    own = [] if mesh is None else own_devices(mesh)
    return own[0] if own else jax.local_devices()[0]
