"""Move states of recurrent layers from an engine's stages to those of another one, through host memory.

On the host a state is that of the whole model: devices share its heads and the channels of its convolution, and have
those channels in an order of their own, some of them on several devices. What follows the heads must be alike in both
engines, as kernels lay it out. Each compiled program is called with a fixed number of states.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.structs import shardings
from jaxserve.layers.attention import Pools
from jaxserve.layers.kv_layout import StateArray
from jaxserve.reshard.exchange import Exchange
from sharding import own_devices

_CALL_BYTES = 16 << 20  # of the states that one call moves

HostStates = dict[int, tuple[np.ndarray, ...]]
"""States of one lane in host memory: arrays [states, ...] of each recurrent layer of the whole model."""


class StateWrite(NamedTuple):
    """Writes a state of the host to a state page of a lane.

    Attributes:
        states: The states on the host.
        number: Index of the state in them.
        target: The page of the lane.
    """

    states: HostStates
    number: int
    target: int


class StateReader:
    """Reads states of a stage.

    Args:
        sharded: The stage, which has recurrent layers.
        exchange: Leads to the other processes; None if this one has all devices.
        receivers: The processes that need the states of each layer; None if there is one process.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        exchange: Exchange | None = None,
        receivers: Mapping[int, Collection[int]] | None = None,
    ):
        self._layers, self._calls = _layers(sharded), _Calls(sharded)
        self._exchange = exchange or Exchange()
        self._receivers = (
            None if receivers is None else {process for layer, _ in self._layers for process in receivers[layer]}
        )
        self._copies = sharded.abstract_recurrent(self._calls.capacity)
        self._read: Any = None
        if not own_devices(sharded.mesh):
            return
        structs, pages = self._calls.structs, self._calls.pages

        def read(arrays: tuple[Pools, ...], pages: Int[Array, " C"]) -> tuple[Pools, ...]:
            return jax.tree.map(lambda array: jnp.take(array, pages, axis=0, mode="clip"), arrays)

        traced = sharded.trace(read, (structs, pages), out_shardings=shardings(structs))
        self._read = traced.lower().compile()

    def read(self, pools: Sequence[Pools], pages: Sequence[Sequence[int]]) -> list[HostStates]:
        """Return copies of the given state pages of each lane, in the processes that need them.

        Args:
            pools: All arrays of the stage; none in a process without devices of it.
            pages: The state pages of each lane.
        """
        calls, found = self._calls, list[HostStates]({} for _ in pages)
        if self._receivers is None or self._exchange.process in self._receivers:
            for lane, each in zip(found, pages, strict=True):
                lane |= {layer: tuple(_empty(one, len(each)) for one in arrays) for layer, arrays in self._layers}
        for start in range(0, max(map(len, pages)), calls.capacity):
            outputs = jax.tree.map(lambda _: None, self._copies)
            if self._read is not None:
                outputs = self._read(tuple(pools[calls.places]), calls.padded(pages, start))
            for (layer, arrays), copies, structs in zip(self._layers, outputs, self._copies, strict=True):
                for index, (array, copied, struct) in enumerate(zip(arrays, copies, structs, strict=True)):
                    whole = self._exchange.whole(copied, struct, self._receivers)
                    if whole is None:
                        continue
                    lanes = np.split(whole, len(pages))
                    for states, lane in zip(found, lanes, strict=True):
                        target = states[layer][index][start : start + calls.capacity]
                        _gather(array, lane[: len(target)], target)
        return found


class StateWriter:
    """Writes states of a stage.

    Args:
        sharded: The stage, which has recurrent layers.
    """

    def __init__(self, sharded: ShardedModel):
        self._layers, self._calls = _layers(sharded), _Calls(sharded)
        self._write: Any = None
        if not own_devices(sharded.mesh):
            return
        structs, pages, capacity = self._calls.structs, self._calls.pages, self._calls.capacity

        def write(arrays: tuple[Pools, ...], pages: Int[Array, " C"], contents: tuple[Pools, ...]) -> tuple[Pools, ...]:
            return jax.tree.map(lambda array, rows: array.at[pages].set(rows, mode="drop"), arrays, contents)

        contents = sharded.abstract_recurrent(capacity)
        traced = sharded.trace(write, (structs, pages, contents), out_shardings=shardings(structs), donated=[0])
        self._write = traced.lower().compile()

    def write(self, pools: Sequence[Pools], writes: Sequence[Sequence[StateWrite]]) -> tuple[Pools, ...]:
        """Return all arrays of the stage with the given states of each lane written. Donates those of states."""
        if not pools:
            return ()
        calls, written = self._calls, [*pools]
        targets = [[each.target for each in lane] for lane in writes]
        for start in range(0, max(map(len, writes)), calls.capacity):
            part = [lane[start : start + calls.capacity] for lane in writes]
            contents = tuple(
                tuple(self._rows(layer, index, array, part) for index, array in enumerate(arrays))
                for layer, arrays in self._layers
            )
            written[calls.places] = self._write(tuple(written[calls.places]), calls.padded(targets, start), contents)
        return tuple(written)

    def _rows(self, layer: int, index: int, array: StateArray, writes: Sequence[Sequence[StateWrite]]) -> np.ndarray:
        """Return what a call writes to an array of a layer, lane after lane; unused rows are zeros."""
        struct = self._calls.structs[[each for each, _ in self._layers].index(layer)][index]
        rows = np.zeros((len(writes), self._calls.capacity, *struct.shape[1:]), struct.dtype)
        for lane, each in zip(rows, writes, strict=True):
            for row, write in zip(lane, each, strict=False):
                row[...] = _scatter(array, write.states[layer][index][write.number])
        return rows.reshape(-1, *struct.shape[1:])


class _Calls:
    """Shapes of the calls of a stage's programs.

    Args:
        sharded: The stage.
    """

    def __init__(self, sharded: ShardedModel):
        self.places = sharded.kv_layout.state_places
        self.structs: tuple[Any, ...] = sharded.abstract_recurrent(sharded.num_states)
        self.capacity = max(1, min(sharded.num_states, _CALL_BYTES // state_bytes(sharded)))
        self.pages = sharded.rows_struct((self.capacity,), jnp.int32)
        self._num_states = sharded.num_states

    def padded(self, pages: Sequence[Sequence[int]], start: int) -> np.ndarray:
        """Return the pages of a call, filled up with one that there is not."""
        padded = np.full((len(pages), self.capacity), self._num_states, np.int32)
        for lane, each in zip(padded, pages, strict=True):
            part = each[start : start + self.capacity]
            lane[: len(part)] = part
        return padded.ravel()


def has_states(sharded: ShardedModel) -> bool:
    """Return whether a stage has recurrent layers."""
    return any(sharded.state_specs)


def receivers_of_states(stages: Sequence[ShardedModel]) -> dict[int, frozenset[int]]:
    """Return the processes that have devices with states of each recurrent layer.

    Args:
        stages: The stages of all replicas.
    """
    return processes_of_layers((layer, each) for each in stages if has_states(each) for layer, _ in _layers(each))


def processes_of_layers(layers: Iterable[tuple[int, ShardedModel]]) -> dict[int, frozenset[int]]:
    """Return the processes that have devices of each layer, from the layers of each stage."""
    found = dict[int, frozenset[int]]()
    for layer, sharded in layers:
        own = frozenset(int(device.process_index) for device in sharded.mesh.devices.flat)
        found[layer] = found.get(layer, frozenset()) | own
    return found


def can_share_states(old: Sequence[ShardedModel], new: Sequence[ShardedModel]) -> bool:
    """Return whether states can move: whether both engines lay out those of a head and of a channel in the same way."""
    return _forms(old) == _forms(new)


def state_bytes(sharded: ShardedModel) -> int:
    """Return the bytes of one state in all layers of a stage, on all devices of a lane."""
    structs = jax.tree.leaves(sharded.abstract_recurrent(1))
    return sum(struct.size * struct.dtype.itemsize for struct in structs) // sharded.num_lanes


def _forms(stages: Sequence[ShardedModel]) -> dict[int, tuple[tuple[tuple[int, ...], str], ...]]:
    """Return shape and element type of a whole model's state, by layer."""
    return {
        layer: tuple((_whole_shape(array), array.dtype) for array in arrays)
        for sharded in stages
        for layer, arrays in _layers(sharded)
    }


def _layers(sharded: ShardedModel) -> list[tuple[int, tuple[StateArray, ...]]]:
    """Return the arrays of each recurrent layer of a stage, by its index in the whole model.

    Their shapes are those of all devices together.
    """
    size, found = sharded.parallel.num_head_parts, list[tuple[int, tuple[StateArray, ...]]]()
    for layer, spec in zip(sharded.layers, sharded.state_specs, strict=True):
        if spec:
            found.append((layer, tuple(_on_all_devices(array, size) for array in spec)))
    return found


def _on_all_devices(array: StateArray, num_parts: int) -> StateArray:
    """Return an array as all devices have it together."""
    if array.split is None:
        return array
    shape = [*array.shape]
    shape[array.split] *= num_parts
    return array._replace(shape=tuple(shape))


def _whole_shape(array: StateArray) -> tuple[int, ...]:
    """Return the shape of the whole model's array, in which nothing is repeated."""
    shape = [*array.shape]
    if array.split is not None and array.parts:
        shape[array.split] = max(part.stop for part in array.parts)
    return tuple(shape)


def _empty(array: StateArray, count: int) -> np.ndarray:
    return np.empty((count, *_whole_shape(array)), array.dtype)


def _gather(array: StateArray, states: np.ndarray, target: np.ndarray) -> None:
    """Copy states, as devices have them, to an array of whole ones."""
    if array.split is None or not array.parts:
        target[...] = states
        return
    own, whole, first = np.moveaxis(states, 1 + array.split, 0), np.moveaxis(target, 1 + array.split, 0), 0
    for part in array.parts:
        whole[part.start : part.stop] = own[first : first + len(part)]
        first += len(part)


def _scatter(array: StateArray, state: np.ndarray) -> np.ndarray:
    """Return a whole state as devices have it."""
    if array.split is None or not array.parts:
        return state
    order = np.concatenate([np.arange(part.start, part.stop) for part in array.parts])
    return np.take(state, order, axis=array.split)
