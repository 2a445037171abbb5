"""A node whose front end is on another one: it joins, waits for its group, and runs its process of it."""

import contextlib
import dataclasses
import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn, final

from jaxserve.api.errors import ConfigError
from jaxserve.child_process import EXIT_FAILED, end_of, shell_status
from jaxserve.frames import HEADER
from jaxserve.group.connection import PeerConnection, join_leader
from jaxserve.group.messages import Beat, End, Ended, Facts, Failed, Follow, Joined, Lead, Leading, Piece, Signal
from jaxserve.group.ports import PortPair
from jaxserve.group.replicas import ReplicaGroups, arguments_of_groups, secret_of_group
from jaxserve.group.settings import GroupPlace
from jaxserve.log_output import LogFormat, end_process, relayed
from jaxserve.server.engine_process.spawn import engine_command, engine_environment
from jaxserve.server.nodes import PIECE_BYTES, UNREACHABLE_S, node_facts
from jaxserve.server.wire import MAX_TO_ENGINE_BYTES, Start, pack, unpack

logger = logging.getLogger(__name__)

_EXIT_S = 10.0  # from the end of an engine process's socket to its own
_FAREWELL_S = 5.0  # for a follower to learn from its group's process 0 why it ends


def run_node(
    arguments: Mapping[str, Any],
    place: GroupPlace,
    groups: ReplicaGroups,
    log_format: LogFormat,
    follow: Callable[[Mapping[str, Any], GroupPlace], NoReturn],
) -> int:
    """Join, wait for the other nodes of the group, and run a process of it until it ends; return its exit status.

    Args:
        arguments: Arguments of ``LLM``, of all groups.
        place: Where to join, and as which node.
        groups: How many processes each group has.
        log_format: Form of the log.
        follow: Runs a follower of a group in this process, with its arguments and place.

    Raises:
        ConfigError: A setting is wrong, or process 0 cannot be reached or does not want this node.
    """
    link = join_leader(place)
    link.end_if_unreachable(UNREACHABLE_S)
    try:
        link.send(Facts(node_facts(arguments)))
    except ConfigError as error:
        link.send(Failed(str(error), True, ""))
        raise
    number, rank = divmod(place.rank, groups.num_processes)
    own = arguments_of_groups(arguments)[number]
    logger.info("node %d has joined, and waits for group %d", place.rank, number)
    try:
        while isinstance(message := link.receive(), Joined | Beat):
            pass  # process 0 runs one group; it says next in what this process differs
    except OSError as error:
        logger.error("process 0 has ended, or cannot be reached: %s", error)
        return EXIT_FAILED
    if isinstance(message, End):
        if message.reason:
            raise ConfigError(f"process 0 dismisses this node: {message.reason}")
        return 0
    count = groups.num_processes
    if isinstance(message, Follow):
        secret = secret_of_group(place.secret, message.nonce)
        threading.Thread(target=_end_with, args=(link,), name="jaxserve-node", daemon=True).start()
        follow(own, place.in_group(message.host, message.port, count, rank, secret))
    if not isinstance(message, Lead):
        raise ConfigError(f"process 0 sent {type(message).__name__} to a node that waits for its group")
    host, own_place = link.own_address, None
    with contextlib.ExitStack() as kept:
        port = 0
        if count > 1:
            ports = PortPair(host)
            kept.callback(ports.close)
            port = ports.first
            own_place = place.in_group(host, port, count, 0, secret_of_group(place.secret, message.nonce))
        link.send(Leading(host, port, time.monotonic()))
        return _LedEngine(link, own, own_place, f"group {number}", log_format).run()


def _end_with(link: PeerConnection) -> NoReturn:
    """End this process some time after the front end; before, the group's process 0 may say why."""
    with contextlib.suppress(OSError):
        while True:
            link.receive()
    time.sleep(_FAREWELL_S)
    logger.error("the front end has ended, or cannot be reached")
    end_process(EXIT_FAILED)


@final
class _LedEngine:
    """The engine process of a group whose front end is on another node.

    Args:
        link: The connection to the front end.
        arguments: Arguments of ``LLM``.
        place: Where the other processes of the group join it; None: there are none.
        name: What to call the group.
        log_format: Form of the log.
    """

    def __init__(
        self,
        link: PeerConnection,
        arguments: dict[str, Any],
        place: GroupPlace | None,
        name: str,
        log_format: LogFormat,
    ):
        self._link = link
        self._arguments = arguments
        self._place = place
        self._num_signals = 0
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._socket, other = socket.socketpair()
        log_name = f"{name} rank 0"
        with other, relayed(log_name, has_prefix=True) as written:
            self._process = subprocess.Popen(
                engine_command(other.fileno(), log_format, log_name),
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                env=engine_environment({}),
            )

    def run(self) -> int:
        """Pass on what the process and the front end send each other until one has ended; return the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        for target in (self._pass_on, self._write):
            threading.Thread(target=target, name="jaxserve-node", daemon=True).start()
        try:
            while True:
                message = self._link.receive()
                if isinstance(message, Piece):
                    self._pieces.put(message.data)
                elif isinstance(message, Signal) and self._process.poll() is None:
                    self._process.send_signal(message.number)
        except OSError as error:
            status = self._process.poll()
            if status is None:
                logger.error("the front end has ended, or cannot be reached: %s", error)
                self._process.kill()
                self._process.wait()
                return EXIT_FAILED
            if status:
                logger.error("the engine process %s", end_of(status))
            return shell_status(status)

    def _pass_on(self) -> None:
        """Send the front end what the process sends, and its end."""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(PIECE_BYTES):
                self._link.send(Piece(data))
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        with contextlib.suppress(OSError):
            self._link.send(Ended(status))

    def _write(self) -> None:
        """Send the process what the front end sends, with this node's own place and arguments."""
        begin = b""
        while len(begin) < HEADER.size or len(begin) < HEADER.size + HEADER.unpack_from(begin)[0]:
            begin += self._pieces.get()
        size = HEADER.size + HEADER.unpack_from(begin)[0]
        start = unpack(begin[HEADER.size : size])
        assert isinstance(start, Start), f"unexpected message {type(start).__name__}"
        start = dataclasses.replace(start, engine_arguments=self._arguments, group=self._place)
        with contextlib.suppress(OSError):
            self._socket.sendall(pack(start, MAX_TO_ENGINE_BYTES) + begin[size:])
            while True:
                self._socket.sendall(self._pieces.get())

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Leave the end to the front end, which drains; after a second signal, end the process and so the group."""
        self._num_signals += 1
        if self._num_signals > 1:
            self._process.kill()
            return
        logger.warning(
            "%s: this process ends when process 0 does; a second signal ends the group", signal.strsignal(number)
        )
