"""The hand-over from one pipeline stage to another, whose devices may belong to other processes.

Hidden states go through the backend where it sends between processes (CUDA, through NCCL, if no process has devices of
both stages). XLA:CPU does not; there, shards travel as bytes over a link. They are read once the device has computed
them, by a thread of the link; who launches a stage that another process feeds waits for its shards.

The latest tokens, which go against that direction, always take the link: a device runs its sends and receives one after
the other, and two processes that sent to each other could each wait for the other's receive. Tokens are a few bytes.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding import Moves, can_send, find_moves, hand_over, mesh_devices, own_devices, put_parts, send


class ShardLink(Protocol):
    """Carries shards between the processes of an engine. Those of a channel come in the order in which they went."""

    def send(self, process: int, channel: int, shards: Sequence[jax.Array | np.ndarray]) -> None:
        """Send shards, each on one device or in host memory, once they are computed; return at once."""
        ...

    def receive(self, process: int, channel: int) -> list[bytes]:
        """Wait for the next shards of a channel.

        Raises:
            OSError: The process has ended.
        """
        ...


class StageLink(ShardLink, Protocol):
    """Carries what the stages of a data slice hand over to each other."""

    def renew(self) -> None:
        """Drop what was sent before every process has called this as often."""
        ...


class StageLinks(Protocol):
    """Leads to the processes that have other stages of an engine."""

    def of_slice(self, index: int) -> StageLink:
        """Return what carries shards between the stages of a data slice."""
        ...


class _Half(NamedTuple):
    """Arrays of a hand-over whose source this process may have, on their way.

    Attributes:
        arrays: The arrays on the source; None if this process has none of it. Through the backend: on the target.
        structs: The arrays on the target.
        moves: What this process does with each.
    """

    arrays: Sequence[jax.Array] | None
    structs: Sequence[Any]
    moves: Sequence[Moves]


class HandOver:
    """What goes from one stage to another, step by step.

    Args:
        source: Devices of the stage that computes it.
        target: Devices of the stage that needs it.
        channel: Number that no other hand-over has.
        link: Carries shards to and from other processes; None if one process has all devices.
        is_forward: Whether it leads from a stage to the next one, and may go through the backend.
    """

    def __init__(self, source: Mesh, target: Mesh, channel: int, link: StageLink | None, *, is_forward: bool = False):
        self._source = source
        self._channel = channel
        self._link = link
        self._has_target = bool(own_devices(target))
        self._is_own = link is None or len(own_devices(source)) == len(own_devices(target)) == target.devices.size
        self._is_sent = link is not None and is_forward and can_send(source, target)
        self._on_way: list[_Half] = []

    def __call__(self, arrays: Sequence[jax.Array] | None, structs: Sequence[Any]) -> list[jax.Array]:
        """Hand arrays over; see ``send`` and ``receive``."""
        self.send(arrays, structs)
        return self.receive()

    def send(self, arrays: Sequence[jax.Array] | None, structs: Sequence[Any]) -> None:
        """Begin to hand arrays over, without waiting.

        Args:
            arrays: The arrays; None in a process without devices of their stage.
            structs: Shapes and shardings on the other stage.
        """
        if self._is_sent:
            self._on_way.append(_Half(self._send(arrays, structs), structs, []))
            return
        moves = [] if self._is_own else [_moves(self._source, s.sharding, s.shape) for s in structs]
        self._on_way.append(_Half(arrays, structs, moves))
        if self._link is None or arrays is None:
            return
        for process in dict.fromkeys(process for each in moves for process in each.sent):
            shards = [
                shard for array, each in zip(arrays, moves, strict=True) for shard in _shards(array, each.sent[process])
            ]
            self._link.send(process, self._channel, shards)

    def _send(self, arrays: Sequence[jax.Array] | None, structs: Sequence[Any]) -> list[jax.Array] | None:
        """Send arrays through the backend; None in a process that has neither of the stages."""
        if arrays is None and not self._has_target:
            return None
        return [
            send(
                None if arrays is None else arrays[index],
                NamedSharding(self._source, struct.sharding.spec),
                struct.sharding,
                struct.shape,
                struct.dtype,
            )
            for index, struct in enumerate(structs)
        ]

    def receive(self) -> list[jax.Array]:
        """Return the arrays of the earliest ``send`` that was not received yet, on the other stage's devices; empty in
        a process that has none of them."""
        arrays, structs, moves = self._on_way.pop(0)
        if not self._has_target:
            return []
        if self._is_sent:
            return list(arrays or ())
        if self._is_own:
            return hand_over(list(arrays or ()), [struct.sharding for struct in structs])
        assert self._link is not None
        senders = dict.fromkeys(process for each in moves for process in each.received)
        parts = {process: iter(self._link.receive(process, self._channel)) for process in senders}
        return [
            _assembled(None if arrays is None else arrays[index], struct, each, parts)
            for index, (struct, each) in enumerate(zip(structs, moves, strict=True))
        ]


@functools.lru_cache(4096)
def _moves(source: Mesh, target: NamedSharding, shape: tuple[int, ...]) -> Moves:
    return find_moves(NamedSharding(source, target.spec), target, shape, jax.process_index())


def _shards(array: jax.Array, positions: Sequence[int]) -> list[jax.Array]:
    """Return the shards of the devices at some positions of an array's mesh."""
    assert isinstance(array.sharding, NamedSharding)
    devices = mesh_devices(array.sharding)
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[devices[position]] for position in positions]


def _assembled(array: jax.Array | None, struct: Any, moves: Moves, parts: Mapping[int, Any]) -> jax.Array:
    """Return an array on its new devices, of this process's own shards and of those that have come."""
    devices, shape = mesh_devices(struct.sharding), struct.sharding.shard_shape(struct.shape)
    found = dict[Any, Any]()
    for position, targets in moves.own:
        assert array is not None
        (shard,) = _shards(array, [position])
        found |= {devices[target]: shard for target in targets}
    for process, shards in moves.received.items():
        for targets in shards:
            shard = np.frombuffer(next(parts[process]), struct.dtype).reshape(shape)
            found |= {devices[target]: shard for target in targets}
    return put_parts(struct.shape, struct.sharding, found)
