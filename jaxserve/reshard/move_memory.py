"""Check that the memory suffices while an engine moves to another mesh."""

import collections
import math
from collections.abc import Collection, Sequence

from jaxserve.api.errors import MemoryPlanError
from jaxserve.device.build import EnginePlan
from jaxserve.device.memory import device_memory_bytes, gib, resident_bytes, usable_fraction
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.models.abstract import AbstractModel
from jaxserve.reshard.resident_weights import keepers, move_steps
from sharding import own_device
from sharding.mesh import Device
from sharding.plan import bytes_per_device

_LARGEST_COPIES = 3  # of the largest parameter: its old arrays joined, its new part, and the packed new part


def host_room(old: EnginePlan, new: EnginePlan, utilization: float, num_processes: int = 1) -> int:
    """Return the bytes of host memory that copies of cached pages and states may take while weights move; see
    ``check_move_memory``. For GPUs, it is twice the size of both.

    Each of several processes may have all copies, and they may all be on this host.
    """
    device = _device(old)
    if device.platform != "cpu":
        return 2 * sum(sharded.pool_bytes * sharded.mesh.devices.size for sharded in old.models)
    free = _free_host_bytes(device, utilization) - (num_processes - 1) * resident_bytes()
    return max(0, free - _needed_host_bytes(old, new)) // num_processes


def check_move_memory(old: EnginePlan, new: EnginePlan, utilization: float) -> None:
    """Raise an error unless the weights and pages of the new plan fit while they replace those of the old one.

    Pages and states of the prefix cache go first, to the host as far as it has room; then the old pools are freed. Then
    each parameter moves, and is freed as soon as its new arrays are complete.

    Raises:
        MemoryPlanError: They do not fit; the message has the sizes.
    """
    device = _device(old)
    total = device_memory_bytes(device)
    if device.platform == "cpu":
        needed, free = _needed_host_bytes(old, new), _free_host_bytes(device, utilization)
        bound = f"{gib(needed)} more than it frees, but {gib(max(free, 0))} are free"
    else:
        needed, free = max(_peaks(old, new).values()), int(total * usable_fraction(device, utilization))
        bound = f"{gib(needed)} on a device, which may use {gib(free)}"
    if needed > free:
        raise MemoryPlanError(
            f"cannot reshard: moving {gib(new.needs.weights)} of weights per device, for "
            f"{gib(new.models[0].pool_bytes)} of KV pages, needs {bound} (gpu_memory_utilization={utilization} of "
            f"{gib(total)}); use a mesh with less per device or fewer replicas"
        )


def _needed_host_bytes(old: EnginePlan, new: EnginePlan) -> int:
    """Return the bytes that virtual CPU devices and the host need during the move, beyond those in use before it."""
    before = sum(sharded.mesh.devices.size * (sharded.weight_bytes + _state_bytes(sharded)) for sharded in old.models)
    return _peaks(old, new, is_shared=True)[None] + _LARGEST_COPIES * _largest(new) - before


def _peaks(old: EnginePlan, new: EnginePlan, is_shared: bool = False) -> dict[Device | None, int]:
    """Return the most bytes of weights and state on each device at any time of the move; None stands for all together
    if they share their memory. Weights of old replicas that are not taken are freed before (see ``keepers``)."""
    now: collections.Counter[Device | None] = collections.Counter()
    most: collections.Counter[Device | None] = collections.Counter()

    kept = [*zip(old.replicas, keepers(old.replicas), strict=True)]

    def add(sharded: ShardedModel, size: int, processes: Collection[int] | None = None) -> None:
        devices = sharded.mesh.devices.flat
        for device in devices if processes is None else [each for each in devices if each.process_index in processes]:
            key = None if is_shared else device
            now[key] += size
            most[key] = max(most[key], now[key])

    held = [(sharded, processes) for stages, processes in kept for sharded in stages]
    for sharded, processes in held:
        add(sharded, sharded.weight_bytes, processes)
    for step in move_steps(old.replicas[0], new.replicas[0]):
        for stages in new.replicas:
            add(stages[step.new_stage], _bytes(stages[step.new_stage].abstract_model, step.new_path))
        for stages, processes in kept if step.is_last else ():
            add(stages[step.old_stage], -_bytes(stages[step.old_stage].abstract_model, step.old_path), processes)
    for stages in new.replicas:
        add(stages[-1], _drafter_bytes(stages))
    for stages, processes in kept:
        add(stages[-1], -_drafter_bytes(stages), processes)
    for sharded in new.models:
        add(sharded, _state_bytes(sharded))
    return dict(most)


def _drafter_bytes(stages: Sequence[ShardedModel]) -> int:
    """Return the bytes of the drafter's parameters per device of the last stage."""
    drafter = stages[-1].drafter
    return 0 if drafter is None else drafter.sharded.weight_bytes


def _state_bytes(sharded: ShardedModel) -> int:
    """Return the bytes of pages and slots per device."""
    return sharded.pool_bytes + sharded.slot_state_bytes


def _bytes(model: AbstractModel, path: str) -> int:
    """Return the bytes of a parameter's arrays per device."""
    structs = [model.params[name] for name in model.logical[path].arrays]
    return sum(bytes_per_device(each.shape, each.dtype.itemsize, each.sharding) for each in structs)


def _largest(plan: EnginePlan) -> int:
    """Return the bytes of the largest parameter, as it is in checkpoints."""
    logical = [param for sharded in plan.replicas[0] for param in sharded.abstract_model.logical.values()]
    return max(math.prod(param.struct.shape) * param.struct.dtype.itemsize for param in logical)


def _device(plan: EnginePlan) -> Device:
    return own_device(plan.models[0].mesh)


def _free_host_bytes(device: Device, utilization: float) -> int:
    return int(device_memory_bytes(device) * utilization) - resident_bytes()
