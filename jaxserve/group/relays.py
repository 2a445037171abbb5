"""Processes that pass on what process 0 sends to all, so that a step of many processes costs it a few sends only.

Process 0 sends to the first ``NUM_RELAYS`` followers, and each of these to its part of the others: everyone is two
connections away at most. What concerns a single process, the ends and the signs of life go directly.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxserve.group.connection import PeerConnection, open_listener, send_to_each
from jaxserve.group.links import address_of, connect_ranks
from jaxserve.group.messages import Addresses, Listening, ToFollower
from jaxserve.group.settings import GroupPlace

NUM_RELAYS = 16
"""Followers that process 0 sends to; with more, these pass it on to the others."""
_Follower = TypeVar("_Follower")
_PURPOSE = "what process 0 sends to all"
_FAREWELL_S = 3.0  # for the reason of process 0, if a relay has ended


def has_relays(count: int) -> bool:
    """Return whether some of ``count`` processes are reached through others."""
    return count - 1 > NUM_RELAYS


def direct_receivers(followers: Sequence[_Follower]) -> Sequence[_Follower]:
    """Return those of all followers, in the order of their ranks, that process 0 sends to."""
    return followers[:NUM_RELAYS]


def relay_partners(rank: int, count: int) -> Sequence[int]:
    """Return the ranks that a relay passes on to, or the relay of another rank; not process 0.

    Args:
        rank: Rank of a follower.
        count: Number of processes.
    """
    if rank > NUM_RELAYS:
        return [(rank - 1) % NUM_RELAYS + 1]
    return range(rank + NUM_RELAYS, count, NUM_RELAYS)


class Relay:
    """What a follower does to pass messages on, or to get those that are passed on to it.

    Attributes:
        connections: Those to the ranks that it passes on to, or the one to its relay.

    Args:
        place: The place of this process in the group.
        own_address: Address of this machine that the others can reach.
        take: Called on another thread with each message that comes from the relay.
        fail: Called on that thread if the relay has ended, and process 0 does not end the group within seconds.
    """

    def __init__(
        self,
        place: GroupPlace,
        own_address: str,
        take: Callable[[ToFollower], object],
        fail: Callable[[BaseException], object],
    ):
        self._place = place
        self._listener = open_listener(own_address, 0)
        self._take, self._fail = take, fail
        self.connections: Sequence[PeerConnection] = ()

    @property
    def address(self) -> Listening:
        """Where this process waits for those that it passes on to."""
        return address_of(self._listener)

    def connect(self, addresses: Addresses) -> None:
        """Connect to the ranks that this one passes on to, or to its relay.

        Raises:
            ConfigError: One cannot be reached within ``join_timeout``, or does not have the secret.
        """
        place, ranks = self._place, relay_partners(self._place.rank, self._place.count)
        made = connect_ranks(place, self._listener, addresses, ranks, _PURPOSE)
        self.connections = [*made.values()]
        if not self._is_relay:
            name = "jaxserve-relay"
            threading.Thread(target=self._read, args=next(iter(made.items())), name=name, daemon=True).start()

    @property
    def _is_relay(self) -> bool:
        return self._place.rank <= NUM_RELAYS

    def pass_on(self, message: ToFollower) -> None:
        """Send a message that process 0 has sent to all to those that get it from this one; a lost one is noticed by
        process 0."""
        if self._is_relay and self.connections:
            send_to_each(self.connections, message)

    def _read(self, rank: int, connection: PeerConnection) -> None:
        try:
            while True:
                self._take(connection.receive())
        except OSError as error:
            time.sleep(_FAREWELL_S)
            self._fail(ConnectionError(f"rank {rank}, which passes on what process 0 sends, has ended: {error}"))
