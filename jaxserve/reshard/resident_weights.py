"""Move a model's weights from one layout to another, one parameter at a time, without reading the checkpoint again.

The old arrays of a parameter are converted back to the checkpoint's tensors, from which the new arrays are made as
at loading. So the layouts and storage methods may differ in any way, and no bit changes.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from checkpoints import Bounds, CheckpointReader, Index, Piece, TensorInfo, TensorRecipe, index_bounds, read_shard
from checkpoints.reader import BaseReader
from jaxserve.api.errors import ConfigError
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.models.abstract import LogicalParam
from pallas_kernels.quantized import with_columns, with_span
from sharding import put_parts
from sharding.mesh import Device


class _RecordReader(BaseReader):
    """Shows rows of records as another layout has them: of another number of features, or in another order of them.

    Args:
        reader: The rows.
        old: The weight that they are.
        new: The weight in the other layout.
    """

    def __init__(self, reader: "ParameterReader", old: LogicalParam, new: LogicalParam):
        self._reader, self._forms, self._kept = reader, old.forms, (old.kept, new.kept)
        assert new.span is not None, new
        self._span, shapes = new.span, dict(new.recipe.sources)
        self.tensors = {name: TensorInfo(shapes[name], info.dtype) for name, info in reader.tensors.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array; all of its rows are read."""
        form, whole = self._forms[name], self._reader.tensors[name].shape
        rows = self._reader.read(name, (*index[:-1], slice(0, whole[-1])))
        rows_of_records = rows.reshape(-1, whole[-1])
        if name in self._kept[0]:
            found = with_columns(rows_of_records, form, self._span, self._columns(name))
        else:
            found = with_span(rows_of_records, form, self._span)
        return np.ascontiguousarray(found.reshape(*rows.shape[:-1], -1)[..., index[-1]])

    def _columns(self, name: str) -> np.ndarray:
        """Return the column of the old records that each one of the new is, or its complement; see ``ColumnOrder``."""
        old, new = (kept[name].order for kept in self._kept)
        assert old is not None and new is not None, name
        columns = old.of_matrix
        places = np.empty(old.own * len(old.columns), np.int32)
        places[columns[columns >= 0]] = np.flatnonzero(columns >= 0)
        columns = new.of_matrix
        return np.where(columns < 0, ~places[~columns], places[columns])

    def close(self) -> None:
        """Do nothing."""


class ParameterReader(BaseReader):
    """A ``CheckpointReader`` of the tensors that one parameter was made of.

    Args:
        recipe: How the parameter was made.
        whole: The parameter.
    """

    def __init__(self, recipe: TensorRecipe, whole: np.ndarray):
        self._whole = whole
        self._pieces: dict[str, list[Piece]] = {}
        for piece in {(piece.source, piece.source_start, piece.shape): piece for piece in recipe.pieces}.values():
            self._pieces.setdefault(piece.source, []).append(piece)
        self.tensors = {name: TensorInfo(shape, whole.dtype) for name, shape in recipe.sources}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array."""
        bounds = index_bounds(index, self.tensors[name].shape)
        box = np.empty([stop - start for start, stop in bounds], self._whole.dtype)
        num_found = 0
        for piece in self._pieces[name]:
            ends = [start + length for start, length in zip(piece.source_start, piece.source_shape, strict=True)]
            starts = [max(start, first) for start, (first, _) in zip(piece.source_start, bounds, strict=True)]
            stops = [min(end, stop) for end, (_, stop) in zip(ends, bounds, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            part = box[
                tuple(slice(a - first, b - first) for a, b, (first, _) in zip(starts, stops, bounds, strict=True))
            ]
            part[...] = _target_box(self._whole, piece, starts, stops).reshape(part.shape)
            num_found += part.size
        assert num_found == box.size, f"{name}: the parameter has {num_found} of {box.size} elements"
        return box

    def close(self) -> None:
        """Do nothing."""


def _target_box(whole: np.ndarray, piece: Piece, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
    """Return the part of a parameter that comes from a box of a piece's source, with the source's order of axes."""
    extra = len(piece.source_start) - len(piece.shape)
    order = -1 if piece.is_transposed else 1
    skips = [a - start for a, start in zip(starts[extra:], piece.source_start[extra:], strict=True)][::order]
    lengths = [b - a for a, b in zip(starts[extra:], stops[extra:], strict=True)][::order]
    begins = [target + skip for target, skip in zip(piece.target_start, skips, strict=True)]
    box = whole[tuple(slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True))]
    return box.T if piece.is_transposed else box


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
        parts: The part of each stored array, by the bounds of a device's part of the parameter.
    """

    param: LogicalParam
    parts: dict[Bounds, list[np.ndarray]]

    def parts_for(self, param: LogicalParam) -> dict[Bounds, list[np.ndarray]]:
        """Return the parts by which another layout stores the parameter: the same memory if they are the same."""
        wanted = dict.fromkeys(_bounds_of(param).values())
        is_same = (param.recipe, param.stored, param.orders) == (
            self.param.recipe,
            self.param.stored,
            self.param.orders,
        )
        if is_same and wanted.keys() <= self.parts.keys():
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
        return _RecordReader(reader, self.param, param)

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


def _bounds_of(param: LogicalParam) -> dict[Device, Bounds]:
    """Return the bounds of each device's part of a parameter."""
    shape = param.struct.shape
    indices = param.struct.sharding.devices_indices_map(shape)
    return {device: index_bounds(tuple(index or ()), shape) for device, index in indices.items()}


class WeightSource:
    """The weights of an old stage, which are freed as they are taken.

    Args:
        sharded: The old stage.
        packed: Its packed parameters; the caller must keep no other reference.
        wanted: Paths of the parameters that will be taken from it; others are freed at once.
    """

    def __init__(self, sharded: ShardedModel, packed: Iterable[jax.Array], wanted: Iterable[str]):
        self._logical = sharded.abstract_model.logical
        names = list(sharded.abstract_model.params)
        self._positions: dict[str, tuple[int, int | None]] = {}
        for number, group in enumerate(sharded.packing.groups):
            for layer, i in enumerate(group):
                self._positions[names[i]] = number, layer if len(group) > 1 else None
        self._num_left = collections.Counter(
            self._positions[name][0] for path in wanted for name in self._logical[path].arrays
        )
        self._packed = {number: array for number, array in enumerate(packed) if self._num_left[number]}
        self._host: dict[int, dict[Device, np.ndarray]] = {}

    def take(self, path: str) -> TakenParameter:
        """Return a parameter's parts on the host; each wanted parameter may be taken once."""
        param = self._logical[path]
        owners = {bounds: device for device, bounds in reversed(_bounds_of(param).items())}
        arrays = [self._take_array(name, [*owners.values()]) for name in param.arrays]
        return TakenParameter(param, {bounds: [a[device] for a in arrays] for bounds, device in owners.items()})

    def _take_array(self, name: str, devices: Sequence[Device]) -> Mapping[Device, np.ndarray]:
        """Return an array's parts on these devices, which hold all of it; free the argument after its last array."""
        number, layer = self._positions[name]
        if number not in self._host:
            shards = {shard.device: shard.data for shard in self._packed.pop(number).addressable_shards}
            self._host[number] = {device: np.asarray(shards[device]) for device in devices}
        parts = self._host[number]
        self._num_left[number] -= 1
        if not self._num_left[number]:
            del self._host[number]
        return parts if layer is None else {device: part[layer] for device, part in parts.items()}


class WeightTarget:
    """The weights of a new stage of all replicas, made one parameter at a time.

    Args:
        models: The stage of each replica; they differ only in their devices.
    """

    def __init__(self, models: Sequence[ShardedModel]):
        self._models = models
        self._names, self._groups = list(models[0].abstract_model.params), models[0].packing.groups
        self._group_of = _groups_of(models[0])
        self._waiting = [dict[str, dict[Bounds, np.ndarray]]() for _ in self._groups]
        self._packed = [dict[int, jax.Array]() for _ in models]

    def put(self, path: str, taken: TakenParameter) -> None:
        """Make the arrays of a parameter; put complete arguments on the devices of all replicas."""
        param = self._models[0].abstract_model.logical[path]
        stored = taken.parts_for(param)
        for name, *parts in zip(param.arrays, *stored.values(), strict=True):
            number = self._group_of[name]
            self._waiting[number][name] = dict(zip(stored, parts, strict=True))
            if len(self._waiting[number]) == len(self._groups[number]):
                self._put_group(number, path)

    def finish(self) -> list[tuple[jax.Array, ...]]:
        """Return the packed parameters of each replica."""
        return [tuple(packed[number] for number in range(len(self._groups))) for packed in self._packed]

    def _put_group(self, number: int, path: str) -> None:
        """Put a complete argument on the devices; the parameter at ``path`` is one of those it holds."""
        members, self._waiting[number] = self._waiting[number], {}
        layers = [members[self._names[i]] for i in self._groups[number]]
        first = layers[0]
        stacks = first if len(layers) == 1 else {each: np.stack([layer[each] for layer in layers]) for each in first}
        for sharded, packed in zip(self._models, self._packed, strict=True):
            struct = sharded.abstract_params[number]
            bounds = _bounds_of(sharded.abstract_model.logical[path])
            parts = {device: stacks[each] for device, each in bounds.items()}
            packed[number] = put_parts(struct.shape, struct.sharding, parts)


def move_weights(
    old: list[tuple[ShardedModel, tuple[jax.Array, ...]]], new: Sequence[Sequence[ShardedModel]]
) -> list[list[tuple[jax.Array, ...]]]:
    """Return the packed parameters of the stages of each new replica, those of its drafter after those of the last.

    Needs additional memory for about three times the largest parameter; on GPUs, where layers are stacked, host memory
    for the parameters of one kind.

    Args:
        old: The stages of an old replica with their packed parameters, which are freed one after the other. The list
            is emptied; the caller must keep no other reference to them.
        new: The stages of each new replica.
    """
    last, packed = old.pop()
    num_own = len(last.abstract_params)
    drafters = [] if last.drafter is None else [(last.drafter.sharded, packed[num_own:])]
    old.append((last, packed[:num_own]))
    del packed
    params = _move_stages(old, new)
    if drafters:
        targets = [[drafter.sharded for drafter in (stages[-1].drafter,) if drafter is not None] for stages in new]
        for stages, (moved,) in zip(params, _move_stages(drafters, targets), strict=True):
            stages[-1] += moved
    return params


def _move_stages(
    old: list[tuple[ShardedModel, tuple[jax.Array, ...]]], new: Sequence[Sequence[ShardedModel]]
) -> list[list[tuple[jax.Array, ...]]]:
    """Return the packed parameters of the stages of each new replica, without drafters; see ``move_weights``."""
    models = [sharded for sharded, _ in old]
    steps, sources = move_steps(models, new[0]), list[WeightSource]()
    for stage, sharded in enumerate(models):
        wanted = dict.fromkeys(step.old_path for step in steps if step.old_stage == stage)
        sources.append(WeightSource(sharded, old.pop(0)[1], wanted))
    targets = [WeightTarget(stages) for stages in zip(*new, strict=True)]
    held: dict[str, TakenParameter] = {}
    for step in steps:
        if step.path not in held:
            held[step.path] = sources[step.old_stage].take(step.old_path)
        targets[step.new_stage].put(step.new_path, held[step.path])
        if step.is_last:
            del held[step.path]
    return [list(stages) for stages in zip(*(target.finish() for target in targets), strict=True)]
