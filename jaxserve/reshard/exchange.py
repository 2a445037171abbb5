"""Parts of arrays that the processes of an engine give each other while it moves, a few at a time.

Every process finds out by itself which parts go where, and none goes on before what it has sent was received: so a
process has the parts of one array in memory, and never those of a whole model.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from checkpoints import Bounds, index_bounds
from jaxserve.device.stage_link import ShardLink

_Key = TypeVar("_Key", bound=Hashable)

_FRAME_BYTES = 64 << 20
_PARTS, _RECEIVED = -1, -2  # channels; those of stages are not negative


class Part(NamedTuple):
    """A part of an array.

    Attributes:
        holders: The processes that have it.
        shape: Its shape.
        dtype: Its element type.
        read: Returns it in host memory, in a process that has it.
    """

    holders: Sequence[int]
    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]


class Exchange:
    """Gives parts of arrays to the processes that want them; all processes call it for the same arrays in one order.

    Attributes:
        process: Index of this process.

    Args:
        process: Index of this process.
        link: Leads to all others; None if there are none.
    """

    def __init__(self, process: int = 0, link: ShardLink | None = None):
        self.process = process
        self._link = link

    def share(self, parts: Mapping[_Key, Part], wanted: Mapping[int, Collection[_Key]]) -> dict[_Key, np.ndarray]:
        """Return the parts that this process wants.

        Args:
            parts: All parts by their names.
            wanted: The names of those that each process wants.
        """
        own, sent, coming = dict[_Key, np.ndarray](), dict[int, list[_Key]](), dict[int, list[_Key]]()
        for receiver in sorted(wanted):
            for key in wanted[receiver]:
                holders = parts[key].holders
                sender = receiver if receiver in holders else holders[receiver % len(holders)]
                if self.process == sender and key not in own:
                    own[key] = parts[key].read()
                if sender != receiver:
                    if self.process == sender:
                        sent.setdefault(receiver, []).append(key)
                    elif self.process == receiver:
                        coming.setdefault(sender, []).append(key)
        found = {key: own[key] for key in wanted.get(self.process, ()) if key in own}
        return found if self._link is None else found | self._swap(self._link, parts, own, sent, coming)

    def _swap(
        self,
        link: ShardLink,
        parts: Mapping[_Key, Part],
        own: Mapping[_Key, np.ndarray],
        sent: Mapping[int, Sequence[_Key]],
        coming: Mapping[int, Sequence[_Key]],
    ) -> dict[_Key, np.ndarray]:
        """Send parts, and return those that come, once those that are sent were received."""
        found = dict[_Key, np.ndarray]()
        for process, keys in sent.items():
            link.send(process, _PARTS, [frame for key in keys for frame in _frames(own[key])])
        for process, keys in coming.items():
            frames = iter(link.receive(process, _PARTS))
            for key in keys:
                found[key] = _joined(parts[key], frames)
            link.send(process, _RECEIVED, [np.zeros(1, np.uint8)])
        for process in sent:
            link.receive(process, _RECEIVED)
        return found

    def whole(self, array: jax.Array | None, struct: Any, receivers: Collection[int] | None) -> np.ndarray | None:
        """Return an array in host memory; None in processes that do not want it.

        Args:
            array: The array; None in a process without a device that has a part of it.
            struct: Its shape, element type and sharding.
            receivers: The processes that want it; None: all of the one that there is.
        """
        if receivers is None or self._link is None:
            assert array is not None
            return np.asarray(array)
        parts, shards = dict[Bounds, Part](), {} if array is None else _own_shards(array)
        for device, index in struct.sharding.devices_indices_map(struct.shape).items():
            bounds = index_bounds(tuple(index or ()), struct.shape)
            known = parts[bounds].holders if bounds in parts else ()
            holders = tuple(dict.fromkeys((*known, int(device.process_index))))
            shape = tuple(stop - start for start, stop in bounds)
            parts[bounds] = Part(holders, shape, struct.dtype, lambda bounds=bounds: np.asarray(shards[bounds]))
        found = self.share(parts, dict.fromkeys(receivers, parts.keys()))
        if self.process not in receivers:
            return None
        joined = np.empty(struct.shape, struct.dtype)
        for bounds, part in found.items():
            joined[tuple(slice(*each) for each in bounds)] = part
        return joined


def _own_shards(array: jax.Array) -> dict[Bounds, jax.Array]:
    """Return the distinct shards of an array that this process has, by their bounds."""
    return {index_bounds(tuple(shard.index or ()), array.shape): shard.data for shard in array.addressable_shards}


def _frames(array: np.ndarray) -> Iterator[np.ndarray]:
    """Return the bytes of an array in parts that fit into a frame; at least one."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, max(1, len(data)), _FRAME_BYTES):
        yield data[start : start + _FRAME_BYTES]


def _joined(part: Part, frames: Iterator[bytes]) -> np.ndarray:
    """Return an array of the frames in which it was sent."""
    array = np.empty(part.shape, part.dtype)
    data = array.reshape(-1).view(np.uint8)
    for start in range(0, max(1, len(data)), _FRAME_BYTES):
        frame = next(frames)
        data[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
    return array
