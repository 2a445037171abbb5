"""Check that the memory suffices while an engine moves to another mesh."""

import math
from collections.abc import Sequence

from jaxserve.device.memory import GIB, device_memory_bytes, resident_bytes, usable_fraction
from jaxserve.device.page_transfer import page_bytes
from jaxserve.device.program import ModelProgram
from jaxserve.errors import MemoryPlanError
from jaxserve.models.abstract import AbstractModel, LogicalParam
from sharding.mesh import Device
from sharding.plan import bytes_per_device

_LARGEST_COPIES = 3  # of the largest parameter: its old arrays joined, its new part, and the packed new part


def host_page_limit(old: Sequence[ModelProgram], new: Sequence[ModelProgram], utilization: float) -> int:
    """Return the number of old pages that host memory has room for while weights move; see ``check_move_memory``."""
    device = old[0].mesh.devices.flat[0]
    if device.platform != "cpu":
        return sum(program.num_pages * program.num_lanes for program in old)
    free = _free_host_bytes(device, utilization) - _needed_bytes(old, new)
    return max(0, free) // page_bytes(old[0])


def check_move_memory(old: Sequence[ModelProgram], new: Sequence[ModelProgram], utilization: float) -> None:
    """Raise an error unless the weights and pages of the new programs fit while they replace those of the old ones.

    Pages go first: those in the prefix cache to the host as far as it has room, then the old pools are freed. Then
    each parameter moves, and is freed as soon as its new arrays are complete.

    Raises:
        MemoryPlanError: They do not fit; the message has the sizes.
    """
    device = old[0].mesh.devices.flat[0]
    total = device_memory_bytes(device)
    if device.platform == "cpu":
        needed, free = _needed_bytes(old, new), _free_host_bytes(device, utilization)
        found = f"{_gib(needed)} more than it frees, but {_gib(max(free, 0))} are free"
    else:
        needed, free = _peak(old[0], new[0], 1, 1), int(total * usable_fraction(device, utilization))
        found = f"{_gib(needed)} on each device, which may use {_gib(free)}"
    if needed > free:
        raise MemoryPlanError(
            f"cannot reshard: moving {_gib(_weights(new[0]))} of weights per device, for {_gib(new[0].pool_bytes)} of "
            f"KV pages, needs {found} (gpu_memory_utilization={utilization} of {_gib(total)}); use a mesh with less "
            "per device or fewer replicas"
        )


def _needed_bytes(old: Sequence[ModelProgram], new: Sequence[ModelProgram]) -> int:
    """Return the bytes that all devices and the host need during the move, beyond those in use before it."""
    num_old, num_new = (len(programs) * programs[0].mesh.devices.size for programs in (old, new))
    before = num_old * (_weights(old[0]) + old[0].pool_bytes + old[0].slot_state_bytes)
    return _peak(old[0], new[0], num_old // len(old), num_new) + _LARGEST_COPIES * _largest(new[0]) - before


def _peak(old: ModelProgram, new: ModelProgram, num_old: int, num_new: int) -> int:
    """Return the most bytes of weights and state at any time of the move.

    Args:
        old: Program whose weights move; those of other replicas are freed before.
        new: New program.
        num_old: Devices of the old program to count.
        num_new: Devices of all new programs to count.
    """
    before, after = old.abstract_model, new.abstract_model
    now = most = num_old * _weights(old)
    for path, param in after.logical.items():
        now += num_new * _bytes(after, param)
        most = max(most, now)
        now -= num_old * _bytes(before, before.logical[path])
    return max(most, now + num_new * (new.pool_bytes + new.slot_state_bytes))


def _weights(program: ModelProgram) -> int:
    """Return the bytes of a program's weights per device."""
    model = program.abstract_model
    return sum(_bytes(model, param) for param in model.logical.values())


def _bytes(model: AbstractModel, param: LogicalParam) -> int:
    """Return the bytes of a parameter's arrays per device."""
    structs = [model.params[name] for name in param.arrays]
    return sum(bytes_per_device(each.shape, each.dtype.itemsize, each.sharding) for each in structs)


def _largest(program: ModelProgram) -> int:
    """Return the bytes of the largest parameter, as it is in checkpoints."""
    logical = program.abstract_model.logical.values()
    return max(math.prod(param.struct.shape) * param.struct.dtype.itemsize for param in logical)


def _free_host_bytes(device: Device, utilization: float) -> int:
    return int(device_memory_bytes(device) * utilization) - resident_bytes()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
