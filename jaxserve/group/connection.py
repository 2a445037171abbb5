"""Connections within a group: frames of messages, and the proof that both ends have the group's secret."""

import contextlib
import dataclasses
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.frames import HEADER, check_length
from jaxserve.group.differences import NONE, in_words
from jaxserve.group.messages import (
    CODEC,
    MAX_BYTES,
    MAX_HELLO_BYTES,
    Challenge,
    End,
    Hello,
    Shard,
    ToFollower,
    ToLeader,
    Welcome,
)
from jaxserve.group.secure_link import SecureLink, check_certificate, is_distrust, reason_of, speaks_no_tls
from jaxserve.group.settings import GroupPlace, host_name

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_NONCE_BYTES = 32
_FIRST_WORD_S = 5.0  # of a process that speaks TLS
_RETRY_S = 0.2
_NUM_PROBES = 3
_TLS_HANDSHAKE = b"\x16\x03"
_CERTIFICATE = "setting group_certfile"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerConnection:
    """One side of a connection. Any thread may send; one at a time may receive.

    Attributes:
        num_sent_bytes: Bytes sent so far.

    Args:
        link: The socket, connected.
        secure: TLS over it; None: bytes travel as they are.
    """

    def __init__(self, link: socket.socket, secure: SecureLink | None = None):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        self._file = link.makefile("rb")
        self._read = self._file.read if secure is None else secure.read
        self._send_all = link.sendall if secure is None else secure.sendall
        self._lock = threading.Lock()
        self.num_sent_bytes = 0

    @property
    def own_address(self) -> str:
        """Address of this machine at which the other side sees it."""
        return self._link.getsockname()[0]

    def send(self, message: ToFollower | ToLeader | Shard) -> None:
        """Send a message.

        Raises:
            OSError: The other side has ended.
        """
        self.send_frame(CODEC.pack(message, MAX_BYTES))

    def send_frame(self, frame: bytes) -> None:
        """Send a message that is packed already; see ``send``."""
        with self._lock:
            self._send_all(frame)
            self.num_sent_bytes += len(frame)

    def receive(self, limit_bytes: int = MAX_BYTES) -> Any:
        """Wait for a message, and return it.

        Raises:
            OSError: The other side has ended, or sent something else.
        """
        header = self._read(HEADER.size)
        if len(header) < HEADER.size:
            raise ConnectionError("the other side has closed the connection")
        if header.startswith(_TLS_HANDSHAKE):  # as a length, more than any message has
            raise ConnectionError(_about_certificates("a file", NONE))
        try:
            (length,) = HEADER.unpack(header)
            return CODEC.unpack(self._read(check_length(length, limit_bytes)))
        except ValueError as error:
            raise ConnectionError(f"the other side sent something that is no message: {error}") from error

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the time limit of sending and receiving."""
        self._link.settimeout(timeout_s)

    def end_if_unreachable(self, limit_s: int) -> None:
        """Let the system end the connection once the other machine has not answered it for some seconds."""
        probe_s = max(1, limit_s // (_NUM_PROBES + 1))
        for name, value in (
            (socket.TCP_KEEPIDLE, probe_s),
            (socket.TCP_KEEPINTVL, probe_s),
            (socket.TCP_KEEPCNT, _NUM_PROBES),
            (socket.TCP_USER_TIMEOUT, limit_s * 1000),
        ):
            self._link.setsockopt(socket.IPPROTO_TCP, name, value)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close this side, also while another thread receives."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._link.close()


def send_to_each(connections: Iterable[PeerConnection], message: ToFollower) -> None:
    """Send a message over several connections, packed once; the end of a process is noticed by who receives from it."""
    frame = CODEC.pack(message, MAX_BYTES)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_frame(frame)


def open_connection(
    link: socket.socket, place: GroupPlace, is_leader: bool, peer_name: str | None = None
) -> PeerConnection:
    """Return a connection of messages over a socket, with TLS if the group has certificates; closes it on failure.

    Args:
        link: The socket, connected.
        place: The place of this process in the group.
        is_leader: Whether this side is process 0, or the one that took the connection between two others.
        peer_name: Address or name that the certificate of the other side must be for; None: any.

    Raises:
        OSError: The other side has ended, or shows no certificate that this side trusts.
    """
    with contextlib.ExitStack() as failing:
        failing.callback(link.close)
        secure = None
        if place.certfile is not None:
            secure = SecureLink(link, place, is_leader, peer_name)
        made = PeerConnection(link, secure)
        failing.pop_all()
    return made


def dial(address: str, port: int, place: GroupPlace, peer_name: str | None) -> PeerConnection:
    """Connect to another process of the group; both show that they have the secret.

    Args:
        address: Address of the process.
        port: Its port.
        place: The place of this process in the group.
        peer_name: See ``open_connection``.

    Raises:
        OSError: It cannot be reached, has ended, or is none of the group.
        ConfigError: It refuses this process, or does not have the secret.
    """
    link = socket.create_connection((address, port), timeout=place.join_timeout)
    connection = open_connection(link, place, is_leader=False, peer_name=peer_name)
    with contextlib.ExitStack() as failing:
        failing.callback(connection.close)
        introduce(connection, place)
        connection.set_timeout(None)
        failing.pop_all()
    return connection


def join_leader(place: GroupPlace) -> PeerConnection:
    """Connect to process 0, which may start later.

    Raises:
        ConfigError: It cannot be reached within ``join_timeout``, or does not want this process.
    """
    if place.certfile is not None:
        check_certificate(place)
    until_s = time.monotonic() + place.join_timeout
    while True:
        try:
            return dial(place.address, place.port, place, peer_name=place.address)
        except OSError as error:
            if is_distrust(error):
                reason = reason_of(error)
                if speaks_no_tls(error):
                    reason += f": {in_words('this process', 'process 0', _CERTIFICATE, place.certfile, NONE)}"
                raise ConfigError(f"process 0 at {place.address}:{place.port}: {reason}") from error
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"rank {place.rank} (host {host_name()}) cannot join the group at {place.address}:{place.port} "
                    f"within join_timeout={place.join_timeout:g} s: {error}"
                ) from error
            time.sleep(_RETRY_S)


def admit(
    link: socket.socket, address: str, place: GroupPlace, take: Callable[[Hello, PeerConnection], str | None]
) -> None:
    """Take a process in that has connected and shows that it has the secret, or tell it why not.

    Args:
        link: The socket, connected.
        address: Its address, for the log.
        place: The place of this process in the group.
        take: Calls ``welcome`` and keeps the connection, or returns why it does not.
    """
    try:
        connection = _accepted(link, place)
    except OSError as error:
        logger.warning("refused a connection from %s: %s", address, reason_of(error))
        return
    try:
        problem = take(greet(connection, place), connection)
        if problem is None:
            return
        logger.warning("refused a process at %s: %s", address, problem)
        connection.send(End(problem))
    except OSError as error:
        logger.warning("refused a connection from %s: %s", address, error)
    connection.close()


def _accepted(link: socket.socket, place: GroupPlace) -> PeerConnection:
    """Return a connection over a socket of this side's listener; closes it on failure.

    Raises:
        OSError: The other side has ended, shows no certificate that this side trusts, or speaks no TLS and is told so.
    """
    is_plain = place.certfile is not None and _is_silent(link)
    link.settimeout(_HANDSHAKE_S)
    if not is_plain:
        return open_connection(link, place, is_leader=True)
    problem = _about_certificates(NONE, "a file")
    with contextlib.closing(PeerConnection(link)) as connection:
        connection.send(End(problem))
    raise ConnectionError(problem)


def _is_silent(link: socket.socket) -> bool:
    """Return whether the other side waits for this one to speak first, as it does without TLS."""
    link.settimeout(_FIRST_WORD_S)
    with contextlib.suppress(OSError):  # the first read of the connection says what it is
        link.recv(1, socket.MSG_PEEK)
        return False
    return True


def wrong_place(hello: Hello, place: GroupPlace, what: str) -> str | None:
    """Return why a process cannot have the place that it asks for; None if it can.

    Args:
        hello: What it says of itself.
        place: The place of process 0.
        what: Whose processes they are and a verb, in the message.
    """
    if hello.count != place.count:
        return f"it expects {hello.count} processes, and {what} {place.count} (nnodes)"
    if not 1 <= hello.rank < place.count:
        return f"node_rank={hello.rank} is not one of 1 to {place.count - 1}"
    return None


def not_joined(what: str, missing: Iterable[int], place: GroupPlace) -> str:
    """Return in words that some ranks did not join process 0 in time; ``what`` says what they are."""
    return (
        f"{what} {', '.join(map(str, missing))} of {place.count} did not join at {place.address}:{place.port} "
        f"within join_timeout={place.join_timeout:g} s"
    )


def greet(connection: PeerConnection, place: GroupPlace) -> Hello:
    """Let a process that has connected show that it has the secret, and return what it says of itself.

    Raises:
        OSError: It has ended, or did not show it; then it has been told.
    """
    challenge = Challenge(os.urandom(_NONCE_BYTES))
    connection.send(challenge)
    hello = connection.receive(MAX_HELLO_BYTES)
    if not _has_secret(place, challenge.nonce, hello):
        connection.send(End("the secret is not that of the group"))
        raise ConnectionError("the secret is not that of the group")
    return hello


def _about_certificates(theirs: str, mine: str) -> str:
    """Return why a process is refused that speaks TLS as only one of the two does."""
    return in_words("it", "the process that it connects to", _CERTIFICATE, theirs, mine)


def _has_secret(place: GroupPlace, nonce: bytes, hello: Any) -> bool:
    """Return whether a message is a ``Hello`` signed with the group's secret."""
    if not isinstance(hello, Hello) or not isinstance(hello.nonce, bytes) or not isinstance(hello.proof, bytes):
        return False
    return hmac.compare_digest(hello.proof, _proof(place, nonce, hello))


def welcome(connection: PeerConnection, place: GroupPlace, hello: Hello) -> None:
    """Accept a process that ``greet`` has returned, and show it that this one has the secret too."""
    connection.send(Welcome(_sign(place, b"leader", hello.nonce)))


def introduce(connection: PeerConnection, place: GroupPlace) -> None:
    """Show the leader that this process has the secret, and check that the leader has it.

    Raises:
        OSError: The leader has ended, or is no leader.
        ConfigError: The leader refuses this process, or does not have the secret.
    """
    challenge = connection.receive(MAX_HELLO_BYTES)
    if isinstance(challenge, End):
        raise ConfigError(f"process 0 of the group refuses this one: {challenge.reason}")
    if not isinstance(challenge, Challenge) or not isinstance(challenge.nonce, bytes):
        raise ConnectionError(f"expected a challenge, got {type(challenge).__name__}")
    nonce = os.urandom(_NONCE_BYTES)
    hello = Hello(place.rank, place.count, host_name(), machine_name(), os.getpid(), nonce, b"")
    connection.send(dataclasses.replace(hello, proof=_proof(place, challenge.nonce, hello)))
    answer = connection.receive(MAX_HELLO_BYTES)
    if isinstance(answer, End):
        raise ConfigError(f"process 0 of the group refuses this one: {answer.reason}")
    expected = _sign(place, b"leader", nonce)
    is_welcome = isinstance(answer, Welcome) and isinstance(answer.proof, bytes)
    if not is_welcome or not hmac.compare_digest(answer.proof, expected):
        raise ConfigError(f"the process at {place.address}:{place.port} does not have the group's secret")


def machine_name() -> str:
    """Return a name of this machine that no other has, and that changes when it starts again."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{host_name()} {boot_id}"


def _proof(place: GroupPlace, nonce: bytes, hello: Hello) -> bytes:
    """Return the signature of what a follower says of itself, for the leader's nonce."""
    said = f"{hello.rank} {hello.count} {hello.host!r} {hello.machine!r} {hello.pid}".encode()
    return _sign(place, b"follower", nonce + hello.nonce + said)


def _sign(place: GroupPlace, role: bytes, data: bytes) -> bytes:
    return hmac.new(place.secret, role + b"\0" + data, hashlib.sha256).digest()


def open_listener(address: str, port: int) -> socket.socket:
    """Return a socket that waits for connections; raises OSError if it cannot. Port 0: any that is free."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family)


def listen(address: str, port: int) -> socket.socket:
    """Return the socket at which process 0 waits for the others; raises ConfigError if it cannot be had."""
    try:
        return open_listener(address, port)
    except OSError as error:
        raise ConfigError(f"master_addr, master_port: cannot listen at {address}:{port}: {error}") from error


def check_free(address: str, port: int) -> None:
    """Raise ConfigError unless JAX's coordinator can have its port, which it would share with another job's."""
    try:
        with listen(address, port):
            pass
    except ConfigError as error:
        raise ConfigError(f"master_port + 1 is for JAX's coordinator: {error}") from error
