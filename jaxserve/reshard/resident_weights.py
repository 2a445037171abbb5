"""Move a model's weights from one layout to another, one parameter at a time, without reading the checkpoint again.

The old arrays of a parameter are converted back to the checkpoint's tensors, from which the new arrays are made as
at loading. So the layouts and storage methods may differ in any way, and no bit changes.
"""

import collections
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from checkpoints import Bounds, CheckpointReader, index_bounds, read_shard
from jaxserve.api.errors import ConfigError
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.models.abstract import LogicalParam
from jaxserve.reshard.exchange import Exchange, Part
from jaxserve.reshard.parameter_reader import ParameterReader, RecordReader
from sharding import own_devices, put_parts
from sharding.mesh import Device


def check_same_parameters(old: Sequence[ShardedModel], new: Sequence[ShardedModel]) -> None:
    """Raise ConfigError unless the stages of two engines make the same parameters of the same tensors."""
    kept, made = _origins(old), _origins(new)
    if old[-1].drafter is not None and new[-1].drafter is not None:
        check_same_parameters([old[-1].drafter.sharded], [new[-1].drafter.sharded])
    differs = [path for path in kept.keys() | made.keys() if kept.get(path) != made.get(path)]
    if differs:
        raise ConfigError(
            f"cannot reshard from layout {old[0].layout.name!r} to {new[0].layout.name!r}: they store other parameters "
            f"or element types, such as {min(differs)}; start an engine with the new layout instead"
        )


def _origins(stages: Sequence[ShardedModel]) -> dict[str, object]:
    """Return source tensors and element type of each parameter by its path in the whole model."""
    return {
        sharded.whole_path(path): (sorted(param.sources), param.struct.dtype)
        for sharded in stages
        for path, param in sharded.abstract_model.logical.items()
    }


def keepers(replicas: Sequence[Sequence[ShardedModel]]) -> list[set[int]]:
    """Return the processes from which the weights of each replica are taken: those that have none of an earlier one.

    The weights of the others are freed before. So each process keeps what it has of one replica, in one process the
    first, and needs no other for it.

    Args:
        replicas: The stages of each replica.
    """
    found, earlier = list[set[int]](), set[int]()
    for stages in replicas:
        own = {int(device.process_index) for sharded in stages for device in sharded.mesh.devices.flat}
        found.append(own - earlier)
        earlier |= own
    return found


class MoveStep(NamedTuple):
    """One parameter's way to a new stage.

    Attributes:
        path: Its path in the whole model.
        old_stage: Index of an old stage that has it.
        old_path: Its path in that stage.
        new_stage: Index of the new stage.
        new_path: Its path there.
        is_last: Whether no later step needs the old parameter.
    """

    path: str
    old_stage: int
    old_path: str
    new_stage: int
    new_path: str
    is_last: bool


def move_steps(old: Sequence[ShardedModel], new: Sequence[ShardedModel]) -> list[MoveStep]:
    """Return the steps in which parameters move, in an order that completes one stacked argument after the other.

    Args:
        old: The stages of an old replica.
        new: The stages of a new one.
    """
    holders: dict[str, tuple[int, str]] = {}
    for stage, sharded in enumerate(old):
        for path in sharded.abstract_model.logical:
            holders.setdefault(sharded.whole_path(path), (stage, path))
    steps: list[MoveStep] = []
    for stage, sharded in enumerate(new):
        group_of, logical = _groups_of(sharded), sharded.abstract_model.logical
        for path in sorted(logical, key=lambda path: group_of[logical[path].arrays[0]]):
            whole = sharded.whole_path(path)
            steps.append(MoveStep(whole, *holders[whole], stage, path, is_last=False))
    last = {step.path: step.new_stage for step in steps}
    return [step._replace(is_last=last[step.path] == step.new_stage) for step in steps]


def _groups_of(sharded: ShardedModel) -> dict[str, int]:
    """Return the index of the packed argument of each array, by its path in the stage's module."""
    names = list(sharded.abstract_model.params)
    return {names[i]: number for number, group in enumerate(sharded.packing.groups) for i in group}


class TakenParameter(NamedTuple):
    """A parameter on the host.

    Attributes:
        param: The parameter.
        parts: The part of each stored array, by the bounds of a device's part of the parameter: all of them, or those
            that the devices of this process need.
    """

    param: LogicalParam
    parts: dict[Bounds, list[np.ndarray]]

    def parts_for(self, params: Sequence[LogicalParam]) -> dict[Bounds, list[np.ndarray]]:
        """Return the parts by which another layout stores the parameter on devices of this process: the same memory if
        they are the same.

        Args:
            params: The parameter of each new replica.
        """
        own, param = jax.process_index(), params[0]
        bounds_of_devices = [pair for each in params for pair in _bounds_of(each).items()]
        wanted = {bounds: None for device, bounds in bounds_of_devices if device.process_index == own}
        if _is_stored_alike(self.param, param) and wanted.keys() <= self.parts.keys():
            return {bounds: self.parts[bounds] for bounds in wanted}
        reader, dtype = self._reader(param), param.struct.dtype
        return {bounds: param.fill(read_shard(reader, param.recipe, bounds, dtype), bounds) for bounds in wanted}

    def _reader(self, param: LogicalParam) -> CheckpointReader:
        """Return a reader of the parameter's tensors as another layout reads them."""
        reader = ParameterReader(self.param.recipe, self._whole())
        if param.span is None or self.param.span is None:
            return reader
        if param.span == self.param.span and param.kept == self.param.kept:
            return reader
        return RecordReader(reader, self.param, param)

    def _whole(self) -> np.ndarray:
        """Return the parameter as its recipe describes it."""
        struct = self.param.struct
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            return self.param.restore(part).reshape(struct.shape)
        whole = np.empty(struct.shape, struct.dtype)
        for bounds, part in self.parts.items():
            whole[tuple(slice(*each) for each in bounds)] = self.param.restore(part)
        return whole


def _is_stored_alike(old: LogicalParam, new: LogicalParam) -> bool:
    """Return whether equal bounds of a parameter mean equal bytes in two layouts."""
    return (old.recipe, old.stored, old.orders) == (new.recipe, new.stored, new.orders)


def _wanted_by(old: LogicalParam, new: Iterable[LogicalParam]) -> dict[int, list[Bounds]]:
    """Return the bounds of the parts of an old parameter that each process needs to make its parts of the new ones.

    Where they are stored in another way, it needs all of the parameter.
    """
    kept, wanted, differs = dict.fromkeys(_bounds_of(old).values()), dict[int, dict[Bounds, None]](), set[int]()
    for param in new:
        is_alike = _is_stored_alike(old, param)
        for device, bounds in _bounds_of(param).items():
            process = int(device.process_index)
            wanted.setdefault(process, {})[bounds] = None
            if not is_alike or bounds not in kept:
                differs.add(process)
    return {process: [*(kept if process in differs else bounds)] for process, bounds in wanted.items()}


def _bounds_of(param: LogicalParam) -> dict[Device, Bounds]:
    """Return the bounds of each device's part of a parameter."""
    shape = param.struct.shape
    indices = param.struct.sharding.devices_indices_map(shape)
    return {device: index_bounds(tuple(index or ()), shape) for device, index in indices.items()}


class OldStage(NamedTuple):
    """A stage of an old replica.

    Attributes:
        sharded: The stage.
        packed: Its packed parameters; none in a process from which they are not taken.
        processes: The processes from which they are taken; see ``keepers``.
    """

    sharded: ShardedModel
    packed: tuple[jax.Array, ...]
    processes: Collection[int]


class WeightSource:
    """The weights of an old stage, which are freed as they are taken.

    Args:
        copies: The stage of each old replica; the caller must keep no reference to the parameters.
        wanted: Paths of the parameters that will be taken from it; others are freed at once.
        exchange: Leads to the other processes.
    """

    def __init__(self, copies: Sequence[OldStage], wanted: Iterable[str], exchange: Exchange):
        sharded = copies[0].sharded
        self._exchange = exchange
        self._logical, self._structs = sharded.abstract_model.logical, sharded.abstract_model.params
        self._copies = [(copy.sharded.abstract_model.logical, copy.processes) for copy in copies]
        kept = [copy.sharded for copy in copies if exchange.process in copy.processes]
        self._own = [device for each in kept for device in own_devices(each.mesh)]
        names = list(sharded.abstract_model.params)
        self._positions: dict[str, tuple[int, int | None]] = {}
        for number, group in enumerate(sharded.packing.groups):
            for layer, i in enumerate(group):
                self._positions[names[i]] = number, layer if len(group) > 1 else None
        self._num_left = collections.Counter(
            self._positions[name][0] for path in wanted for name in self._logical[path].arrays
        )
        self._packed = dict[int, list[jax.Array]]()
        for copy in copies:
            for number, array in enumerate(copy.packed):
                if self._num_left[number]:
                    self._packed.setdefault(number, []).append(array)
        self._host: dict[int, dict[Device, np.ndarray]] = {}

    def take(self, path: str, wanted: Mapping[int, Sequence[Bounds]]) -> TakenParameter:
        """Return a parameter's parts on the host; each wanted parameter may be taken once.

        Args:
            path: The parameter.
            wanted: The bounds of the parts that each process wants.
        """
        param = self._logical[path]
        owners = dict[Bounds, list[Device]]()
        for logical, processes in self._copies:
            for device, bounds in _bounds_of(logical[path]).items():
                if device.process_index in processes:
                    owners.setdefault(bounds, []).append(device)
        own = {
            bounds: next((each for each in devices if each in self._own), None) for bounds, devices in owners.items()
        }
        held = [self._take_array(name, [each for each in own.values() if each is not None]) for name in param.arrays]
        structs, parts = [self._structs[name] for name in param.arrays], dict[tuple[Bounds, int], Part]()
        for bounds, devices in owners.items():
            holders = tuple(dict.fromkeys(int(device.process_index) for device in devices))
            for index, (struct, arrays) in enumerate(zip(structs, held, strict=True)):
                shape = struct.sharding.shard_shape(struct.shape)
                read = functools.partial(arrays.__getitem__, own[bounds])
                parts[bounds, index] = Part(holders, shape, struct.dtype, read)
        keys = {process: [(each, i) for each in bounds for i in range(len(held))] for process, bounds in wanted.items()}
        found = self._exchange.share(parts, keys)
        taken = dict.fromkeys(bounds for bounds, _ in found)
        return TakenParameter(param, {bounds: [found[bounds, i] for i in range(len(held))] for bounds in taken})

    def _take_array(self, name: str, devices: Sequence[Device]) -> Mapping[Device, np.ndarray]:
        """Return an array's parts on devices of this process; free the argument after its last array."""
        if not devices:
            return {}
        number, layer = self._positions[name]
        if number not in self._host:
            arrays = self._packed.pop(number)
            shards = {shard.device: shard.data for array in arrays for shard in array.addressable_shards}
            self._host[number] = {device: np.asarray(shards[device]) for device in devices}
        parts = self._host[number]
        self._num_left[number] -= 1
        if not self._num_left[number]:
            del self._host[number]
        return parts if layer is None else {device: part[layer] for device, part in parts.items()}


class WeightTarget:
    """The weights of a new stage of all replicas on the devices of this process, made one parameter at a time.

    Args:
        models: The stage of each replica; they differ only in their devices.
    """

    def __init__(self, models: Sequence[ShardedModel]):
        self._models = models
        self._is_here = any(own_devices(sharded.mesh) for sharded in models)
        self._names, self._groups = list(models[0].abstract_model.params), models[0].packing.groups
        self._group_of = _groups_of(models[0])
        self._waiting = [dict[str, dict[Bounds, np.ndarray]]() for _ in self._groups]
        self._packed = [dict[int, jax.Array]() for _ in models]

    def put(self, path: str, taken: TakenParameter) -> None:
        """Make the arrays of a parameter; put complete arguments on the devices of all replicas."""
        if not self._is_here:
            return
        params = [sharded.abstract_model.logical[path] for sharded in self._models]
        stored = taken.parts_for(params)
        for name, *parts in zip(params[0].arrays, *stored.values(), strict=True):
            number = self._group_of[name]
            self._waiting[number][name] = dict(zip(stored, parts, strict=True))
            if len(self._waiting[number]) == len(self._groups[number]):
                self._put_group(number, path)

    def finish(self) -> list[tuple[jax.Array, ...]]:
        """Return the packed parameters of each replica; none in a process without devices of its stage."""
        numbers = range(len(self._groups))
        return [tuple(packed[number] for number in numbers) if packed else () for packed in self._packed]

    def _put_group(self, number: int, path: str) -> None:
        """Put a complete argument on the devices; the parameter at ``path`` is one of those it holds."""
        members, self._waiting[number] = self._waiting[number], {}
        layers = [members[self._names[i]] for i in self._groups[number]]
        first = layers[0]
        stacks = first if len(layers) == 1 else {each: np.stack([layer[each] for layer in layers]) for each in first}
        for sharded, packed in zip(self._models, self._packed, strict=True):
            struct = sharded.abstract_params[number]
            bounds, own = _bounds_of(sharded.abstract_model.logical[path]), own_devices(sharded.mesh)
            if own:
                parts = {device: stacks[bounds[device]] for device in own}
                packed[number] = put_parts(struct.shape, struct.sharding, parts)


def move_weights(
    old: list[list[tuple[ShardedModel, tuple[jax.Array, ...]]]],
    new: Sequence[Sequence[ShardedModel]],
    exchange: Exchange | None = None,
) -> list[list[tuple[jax.Array, ...]]]:
    """Return the packed parameters of the stages of each new replica, those of its drafter after those of the last.

    Needs additional memory for about three times the largest parameter; on GPUs, where layers are stacked, host memory
    for the parameters of one kind.

    Args:
        old: The stages of each old replica with their packed parameters, which are freed one after the other. The list
            is emptied; the caller must keep no other reference to them.
        new: The stages of each new replica.
        exchange: Leads to the other processes; None if this one has all devices.
    """
    exchange = exchange or Exchange()
    replicas, drafters = list[list[OldStage]](), list[list[OldStage]]()
    for processes in keepers([[sharded for sharded, _ in stages] for stages in old]):
        is_kept = exchange.process in processes
        stages = [OldStage(sharded, packed if is_kept else (), processes) for sharded, packed in old.pop(0)]
        last = stages.pop()
        num_own = len(last.sharded.abstract_params)
        if last.sharded.drafter is not None:
            drafters.append([OldStage(last.sharded.drafter.sharded, last.packed[num_own:], processes)])
        replicas.append([*stages, last._replace(packed=last.packed[:num_own])])
        del stages, last
    params = _move_stages(replicas, new, exchange)
    if drafters:
        targets = [[drafter.sharded for drafter in (stages[-1].drafter,) if drafter is not None] for stages in new]
        for stages, (moved,) in zip(params, _move_stages(drafters, targets, exchange), strict=True):
            stages[-1] += moved
    return params


def _move_stages(
    old: list[list[OldStage]], new: Sequence[Sequence[ShardedModel]], exchange: Exchange
) -> list[list[tuple[jax.Array, ...]]]:
    """Return the packed parameters of the stages of each new replica, without drafters; see ``move_weights``."""
    models = [stage.sharded for stage in old[0]]
    steps, sources = move_steps(models, new[0]), list[WeightSource]()
    for stage in range(len(models)):
        wanted = dict.fromkeys(step.old_path for step in steps if step.old_stage == stage)
        sources.append(WeightSource([stages.pop(0) for stages in old], wanted, exchange))
    targets = [WeightTarget(stages) for stages in zip(*new, strict=True)]
    held: dict[str, TakenParameter] = {}
    made = dict[str, list[LogicalParam]]()
    for step in steps:
        for stages in new:
            made.setdefault(step.path, []).append(stages[step.new_stage].abstract_model.logical[step.new_path])
    for step in steps:
        if step.path not in held:
            param = models[step.old_stage].abstract_model.logical[step.old_path]
            held[step.path] = sources[step.old_stage].take(step.old_path, _wanted_by(param, made[step.path]))
        targets[step.new_stage].put(step.new_path, held[step.path])
        if step.is_last:
            del held[step.path]
    return [list(stages) for stages in zip(*(target.finish() for target in targets), strict=True)]
