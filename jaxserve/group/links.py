"""Direct connections between the processes of a group."""

import contextlib
import socket
import time
from collections.abc import Sequence

from jaxserve.api.errors import ConfigError
from jaxserve.group.connection import PeerConnection, admit, dial, welcome
from jaxserve.group.messages import Addresses, Hello, Listening
from jaxserve.group.secure_link import reason_of
from jaxserve.group.settings import GroupPlace

_POLL_S = 0.2


def address_of(listener: socket.socket) -> Listening:
    """Return where a listener waits for other processes."""
    host, port, *_ = listener.getsockname()
    return Listening(host, port)


def connect_ranks(
    place: GroupPlace, listener: socket.socket, addresses: Addresses, ranks: Sequence[int], purpose: str
) -> dict[int, PeerConnection]:
    """Connect to some ranks, which do the same, and return the connection to each; closes the listener.

    Args:
        place: The place of this process in the group.
        listener: Where this process waits for the others.
        addresses: Where each waits.
        ranks: The ranks.
        purpose: What the connections are for, in messages.

    Raises:
        ConfigError: One cannot be reached within ``join_timeout``, or does not have the secret.
    """
    deadline_s = time.monotonic() + place.join_timeout
    made = dict[int, PeerConnection]()
    with listener, contextlib.ExitStack() as failing:
        failing.callback(lambda: [connection.close() for connection in made.values()])
        for rank in ranks:
            if rank < place.rank:
                made[rank] = _dialled(place, rank, addresses.hosts[rank], addresses.ports[rank], purpose)
        while expected := {rank for rank in ranks if rank > place.rank} - made.keys():
            if time.monotonic() > deadline_s:
                missing = ", ".join(map(str, sorted(expected)))
                raise ConfigError(f"ranks {missing} did not connect to rank {place.rank} for {purpose}")
            _accept(place, listener, expected, made)
        failing.pop_all()
    return made


def _dialled(place: GroupPlace, rank: int, host: str, port: int, purpose: str) -> PeerConnection:
    try:
        return dial(host, port, place, place.address if rank == 0 else None)
    except OSError as error:
        raise ConfigError(
            f"rank {place.rank} cannot reach rank {rank} at {host}:{port} for {purpose}: {reason_of(error)}"
        ) from error


def _accept(place: GroupPlace, listener: socket.socket, expected: set[int], made: dict[int, PeerConnection]) -> None:
    """Take one of some ranks in, if it connects soon."""
    listener.settimeout(_POLL_S)
    try:
        link, address = listener.accept()
    except TimeoutError:
        return

    def take(hello: Hello, connection: PeerConnection) -> str | None:
        if hello.rank not in expected:
            return f"rank {hello.rank} is not expected at rank {place.rank}"
        welcome(connection, place, hello)
        connection.set_timeout(None)
        made[hello.rank] = connection
        return None

    admit(link, address[0], place, take)
