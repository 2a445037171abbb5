"""Direct connections between the processes of a group, for what pipeline stages hand over to each other."""

import collections
import logging
import queue
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.group.connection import PeerConnection, open_listener
from jaxserve.group.links import address_of, connect_ranks
from jaxserve.group.messages import Addresses, Listening, Shard
from jaxserve.group.settings import GroupPlace

logger = logging.getLogger(__name__)

_PURPOSE = "what their pipeline stages hand over"
_CHANNELS = 1 << 16
"""Channels of each data slice."""


class Peers:
    """Connections to the processes that have neighboring stages: ``StageLinks``, and a ``ShardLink``.

    Args:
        place: The place of this process in the group.
        host: Address of this process that the others can reach.
        on_failure: Called on another thread if what is to be sent cannot be computed.
    """

    def __init__(self, place: GroupPlace, host: str, on_failure: Callable[[BaseException], object]):
        self._place = place
        self._listener = open_listener(host, 0)
        self._on_failure = on_failure
        self._connections: dict[int, PeerConnection] = {}
        self._unsent: queue.SimpleQueue[tuple[int, int, int, Sequence[jax.Array | np.ndarray]] | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], collections.deque[Shard]] = {}
        self._ended: dict[int, Exception] = {}

    @property
    def address(self) -> Listening:
        """Where this process waits for the others."""
        return address_of(self._listener)

    def connect(self, addresses: Addresses, ranks: Sequence[int]) -> None:
        """Connect to some ranks, which do the same.

        Args:
            addresses: Where each waits.
            ranks: The ranks.

        Raises:
            ConfigError: One cannot be reached within ``join_timeout``, or does not have the secret.
        """
        self._connections = connect_ranks(self._place, self._listener, addresses, ranks, _PURPOSE)
        for rank, connection in self._connections.items():
            threading.Thread(
                target=self._read, args=(rank, connection), name=f"jaxserve-stages-{rank}", daemon=True
            ).start()
        threading.Thread(target=self._write, name="jaxserve-stages", daemon=True).start()

    def close(self) -> None:
        """Close all connections, once no step is in flight in any process."""
        self._listener.close()
        self._unsent.put(None)
        for connection in self._connections.values():
            connection.close()

    # ---------------------------------------------------------------- steps

    def of_slice(self, index: int) -> "_SlicePeers":
        """See ``StageLinks``."""
        return _SlicePeers(self, index * _CHANNELS)

    def send(self, process: int, channel: int, shards: Sequence[jax.Array | np.ndarray], epoch: int = 0) -> None:
        """See ``ShardLink``; ``epoch`` is the number of resets before."""
        for shard in shards:
            if not isinstance(shard, np.ndarray):
                shard.copy_to_host_async()
        self._unsent.put((process, epoch, channel, shards))

    def receive(self, process: int, channel: int, epoch: int = 0) -> list[bytes]:
        """See ``ShardLink``; what was sent before ``epoch`` is dropped."""
        found = list[bytes]()
        while True:
            shard = self._next(process, channel)
            if shard.epoch < epoch:
                continue
            found.append(shard.data)
            if shard.is_last:
                return found

    def _next(self, process: int, channel: int) -> Shard:
        with self._changed:
            arrived = self._arrived.setdefault((process, channel), collections.deque())
            while not arrived:
                if process in self._ended:
                    raise ConnectionError(f"rank {process} has ended: {self._ended[process]}")
                self._changed.wait()
            return arrived.popleft()

    def _read(self, rank: int, connection: PeerConnection) -> None:
        """Keep what a rank sends until it is received."""
        try:
            while True:
                shard = connection.receive()
                if not isinstance(shard, Shard):
                    raise ConnectionError(f"it sent {type(shard).__name__} in place of a shard")
                with self._changed:
                    self._arrived.setdefault((rank, shard.channel), collections.deque()).append(shard)
                    self._changed.notify_all()
        except (OSError, ValueError) as error:  # ValueError: this side is closed
            with self._changed:
                self._ended[rank] = error
                self._changed.notify_all()

    def _write(self) -> None:
        """Send shards in the order in which they are computed."""
        try:
            while (unsent := self._unsent.get()) is not None:
                process, epoch, channel, shards = unsent
                for index, shard in enumerate(shards):
                    data = np.asarray(shard).tobytes()
                    self._send(process, Shard(epoch, channel, index == len(shards) - 1, data))
        except BaseException as error:
            self._on_failure(error)

    def _send(self, process: int, shard: Shard) -> None:
        try:
            self._connections[process].send(shard)
        except OSError as error:  # a launch that waits for this rank fails by itself
            logger.warning("rank %d cannot be sent what a stage computed: %s", process, error)


class _SlicePeers:
    """The ``StageLink`` of a data slice.

    Args:
        peers: The connections.
        first_channel: The first of its channels.
    """

    def __init__(self, peers: Peers, first_channel: int):
        self._peers = peers
        self._first_channel = first_channel
        self._epoch = 0

    def send(self, process: int, channel: int, shards: Sequence[jax.Array | np.ndarray]) -> None:
        """See ``ShardLink``."""
        self._peers.send(process, self._first_channel + channel, shards, self._epoch)

    def receive(self, process: int, channel: int) -> list[bytes]:
        """See ``ShardLink``."""
        return self._peers.receive(process, self._first_channel + channel, self._epoch)

    def renew(self) -> None:
        """See ``StageLink``."""
        self._epoch += 1


def after_move(old: Peers | None, new: Peers, has_stages: bool) -> Peers | None:
    """Close the connections that are not needed once all processes have moved; return those that stages hand over on.

    Args:
        old: Those of the stages before; None without stages.
        new: Those over which weights and pages went.
        has_stages: Whether there are stages now.
    """
    if old is not None:
        old.close()
    if has_stages:
        return new
    new.close()
    return None
