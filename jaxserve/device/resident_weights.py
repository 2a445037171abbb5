"""Move a model's weights from one layout to another, one parameter at a time, without reading the checkpoint again.

The old arrays of a parameter are converted back to the checkpoint's tensors, from which the new arrays are made as
at loading. So the layouts and storage methods may differ in any way, and no bit changes.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from checkpoints import Bounds, Index, Piece, TensorInfo, TensorRecipe, index_bounds, read_shard
from jaxserve.device.program import ModelProgram
from jaxserve.errors import ConfigError
from jaxserve.models.abstract import LogicalParam
from sharding.mesh import Device


class ParameterReader:
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

    def __enter__(self) -> "ParameterReader":
        """Return the reader."""
        return self

    def __exit__(self, *details: object) -> None:
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


def check_same_parameters(old: ModelProgram, new: ModelProgram) -> None:
    """Raise ConfigError unless two programs of a model make the same parameters of the same tensors."""
    kept, made = old.abstract_model.logical, new.abstract_model.logical
    differs = [path for path in kept.keys() | made.keys() if _origin(kept.get(path)) != _origin(made.get(path))]
    if differs:
        raise ConfigError(
            f"cannot reshard from layout {old.layout.name!r} to {new.layout.name!r}: they store other parameters or "
            f"element types, such as {min(differs)}; start an engine with the new layout instead"
        )


def _origin(param: LogicalParam | None) -> object:
    return None if param is None else (sorted(param.recipe.sources), param.struct.dtype)


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
        is_same = (param.recipe, param.stored) == (self.param.recipe, self.param.stored)
        if is_same and wanted.keys() <= self.parts.keys():
            return {bounds: self.parts[bounds] for bounds in wanted}
        reader, dtype = ParameterReader(self.param.recipe, self._whole()), param.struct.dtype
        return {bounds: param.fill(read_shard(reader, param.recipe, bounds, dtype)) for bounds in wanted}

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
    """The weights of an old program, which are freed as they are taken.

    Args:
        program: The old program.
        packed: Its packed parameters; the caller must keep no other reference.
    """

    def __init__(self, program: ModelProgram, packed: Iterable[jax.Array]):
        self._packed = dict(enumerate(packed))
        self._logical = program.abstract_model.logical
        self._positions: dict[str, tuple[int, int | None]] = {}
        names = list(program.abstract_model.params)
        for number, group in enumerate(program.packing.groups):
            for layer, i in enumerate(group):
                self._positions[names[i]] = number, layer if len(group) > 1 else None
        self._num_left = collections.Counter(self._positions[name][0] for name in self._positions)
        self._host: dict[int, dict[Device, np.ndarray]] = {}

    def take(self, path: str) -> "TakenParameter":
        """Return a parameter's parts on the host; each parameter may be taken once."""
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
    """The weights of new programs that differ only in their devices, made one parameter at a time.

    Args:
        programs: The new programs.
    """

    def __init__(self, programs: Sequence[ModelProgram]):
        self._programs = programs
        first = programs[0]
        self._model, self._groups = first.abstract_model, first.packing.groups
        names = list(self._model.params)
        self._group_of = {names[i]: number for number, group in enumerate(self._groups) for i in group}
        self._waiting: dict[int, dict[str, dict[Bounds, np.ndarray]]] = {
            number: {} for number in range(len(self._groups))
        }
        self._packed: list[dict[int, jax.Array]] = [{} for _ in programs]

    @property
    def paths(self) -> list[str]:
        """Parameters in an order that completes one stacked argument after the other."""
        logical = self._model.logical
        return sorted(logical, key=lambda path: self._group_of[logical[path].arrays[0]])

    def put(self, path: str, taken: TakenParameter) -> None:
        """Make the arrays of a parameter; put complete arguments on the devices of all programs."""
        param = self._model.logical[path]
        stored = taken.parts_for(param)
        for name, *parts in zip(param.arrays, *stored.values(), strict=True):
            number = self._group_of[name]
            self._waiting[number][name] = dict(zip(stored, parts, strict=True))
            if len(self._waiting[number]) == len(self._groups[number]):
                self._put_group(number, path)

    def finish(self) -> list[tuple[jax.Array, ...]]:
        """Return the packed parameters of each program."""
        return [tuple(packed[number] for number in range(len(self._groups))) for packed in self._packed]

    def _put_group(self, number: int, path: str) -> None:
        """Put a complete argument on the devices; the parameter at ``path`` is one of those it holds."""
        members, names = self._waiting.pop(number), list(self._model.params)
        layers = [members[names[i]] for i in self._groups[number]]
        first = layers[0]
        stacks = first if len(layers) == 1 else {each: np.stack([layer[each] for layer in layers]) for each in first}
        for program, packed in zip(self._programs, self._packed, strict=True):
            struct = program.abstract_params[number]
            bounds = _bounds_of(program.abstract_model.logical[path])
            shards = [jax.device_put(stacks[each], device) for device, each in bounds.items()]
            packed[number] = jax.make_array_from_single_device_arrays(
                struct.shape, struct.sharding, jax.block_until_ready(shards)
            )


def move_weights(source: WeightSource, programs: Sequence[ModelProgram]) -> list[tuple[jax.Array, ...]]:
    """Return the packed parameters of new programs that differ only in their devices; frees those of the old program.

    Needs additional memory for about three times the largest parameter; on GPUs, where layers are stacked, host memory
    for the parameters of one kind.
    """
    target = WeightTarget(programs)
    for path in target.paths:
        target.put(path, source.take(path))
    return target.finish()
