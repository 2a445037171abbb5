"""The other nodes of a front end whose groups are over several: each joins, and waits for its group."""

import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.api.config_checks import MESH_FIELDS
from jaxserve.api.errors import ConfigError, EngineDeadError
from jaxserve.child_process import end_of
from jaxserve.group.connection import PeerConnection, admit, listen, machine_name, not_joined, welcome, wrong_place
from jaxserve.group.differences import common_settings, difference, in_words
from jaxserve.group.messages import End, Ended, Facts, Failed, Follow, Hello, Lead, Leading, Piece, Signal, ToNode
from jaxserve.group.secure_link import check_certificate
from jaxserve.group.settings import GroupPlace, host_name
from jaxserve.server.engine_process.spawn import SpawnedEngine

logger = logging.getLogger(__name__)

UNREACHABLE_S = 20
"""Seconds after which a machine that cannot be reached counts as lost."""
PIECE_BYTES = 1 << 18
"""Most bytes of a ``Piece``."""
_ACCEPT_S = 0.2


def node_facts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all nodes must have in common before they are told what to run.

    Args:
        arguments: Arguments of ``LLM``.

    Raises:
        ConfigError: One of them is wrong.
    """
    config = EngineConfig.from_arguments(**{"model": "demo", **SERVING_DEFAULTS, **arguments})
    return {"jaxserve": importlib.metadata.version("jaxserve"), **common_settings(config)}


@final
class Node:
    """A node that has joined, as the front end sees it; also the engine process that it starts.

    Its methods belong to the event loop, its threads to the connection.

    Args:
        hello: What it said of itself.
        address: Where it is, as this machine sees it.
        connection: The connection to it.
        on_end: Called in the event loop when it has ended.

    Attributes:
        rank: Its rank.
        name: Its name in messages.
        address: Likewise.
        returncode: How its process has ended, as ``subprocess`` has it; None while it runs or waits.
    """

    def __init__(self, hello: Hello, address: str, connection: PeerConnection, on_end: Callable[["Node"], None]):
        self.rank = hello.rank
        self.name = f"rank {hello.rank} (host {hello.host}, process {hello.pid})"
        self.address = address
        self.returncode: int | None = None
        self._is_here = hello.machine == machine_name()
        self._connection = connection
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._leading: asyncio.Future[Leading] = self._loop.create_future()
        self._has_ended = asyncio.Event()
        self._engine: socket.socket | None = None
        threading.Thread(target=self._receive, name=f"jaxserve-node-{self.rank}", daemon=True).start()

    async def lead(self, nonce: bytes) -> tuple[Leading, float]:
        """Let it become process 0 of a group; return where it will listen, and how far its clock is ahead.

        Raises:
            EngineDeadError: It has ended.
        """
        begin_s = time.monotonic()
        self._send(Lead(nonce))
        leading = await self._leading
        ahead_s = 0.0 if self._is_here else leading.clock_s - (begin_s + time.monotonic()) / 2
        return leading, ahead_s

    def follow(self, host: str, port: int, nonce: bytes) -> None:
        """Let it become another process of a group, whose process 0 listens there."""
        self._send(Follow(host, port, nonce))

    async def open(self, clock_ahead_s: float) -> SpawnedEngine:
        """Connect to the engine process of a node that leads."""
        here, self._engine = socket.socketpair()
        threading.Thread(target=self._pass_on, args=(self._engine,), daemon=True).start()
        return SpawnedEngine(self, *await asyncio.open_connection(sock=here), clock_ahead_s)

    async def wait(self) -> int:
        """Wait until its process has ended; return how."""
        await self._has_ended.wait()
        return -signal.SIGKILL if self.returncode is None else self.returncode

    async def end(self) -> str:
        """Wait for its end; return it in words."""
        await self._has_ended.wait()
        how = "has ended, or cannot be reached" if self.returncode is None else end_of(self.returncode)
        return f"{self.name} {how}"

    def kill(self) -> None:
        """End its process at once, which it does when its connection ends."""
        self._connection.close()

    def send_signal(self, signal: int) -> None:
        """Send its process a signal."""
        # Not here: a node that reads nothing must not hold up this thread.
        threading.Thread(target=self._send, args=(Signal(signal),), daemon=True).start()

    def dismiss(self, reason: str) -> None:
        """Let it end while it waits for its group; ``reason`` says why the group fails, if it does."""
        self._send(End(reason))
        self._connection.close()

    def _send(self, message: ToNode | End) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by the thread that receives
            self._connection.send(message)

    def _receive(self) -> None:
        """Handle what the node sends until it ends."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: this side is closed
            while self.returncode is None:
                message = self._connection.receive()
                if isinstance(message, Piece) and self._engine is not None:
                    self._engine.sendall(message.data)
                elif isinstance(message, Leading):
                    self._call(self._leads, message)
                elif isinstance(message, Ended):
                    self.returncode = message.status
        self._connection.close()
        if self._engine is not None:
            with contextlib.suppress(OSError):
                self._engine.shutdown(socket.SHUT_RDWR)
        self._call(self._note_end)

    def _pass_on(self, engine: socket.socket) -> None:
        """Send the node what the front end sends the engine process."""
        with engine, contextlib.suppress(OSError):
            while data := engine.recv(PIECE_BYTES):
                self._connection.send(Piece(data))
        self._connection.close()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop, if that has not ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _leads(self, leading: Leading) -> None:
        if not self._leading.done():
            self._leading.set_result(leading)

    def _note_end(self) -> None:
        self._has_ended.set()
        if not self._leading.done():
            self._leading.set_exception(EngineDeadError(f"{self.name} has ended"))
            self._leading.exception()  # it may not have been asked to lead
        self._on_end(self)


@final
class Nodes:
    """Lets nodes join, and keeps them until their groups take them.

    Args:
        place: Where they join.
        arguments: Arguments of ``LLM``, of all groups.
    """

    def __init__(self, place: GroupPlace, arguments: Mapping[str, Any]):
        self.place = place
        self._facts = node_facts(arguments)
        self._ranks: dict[int, str] = {}
        self._lock = threading.Lock()  # of the ranks
        self._waiting: dict[int, Node] = {}
        self._changed = asyncio.Event()
        self._wanted = set[int]()
        self._problems: dict[int, str] = {}
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Let nodes join from now on.

        Raises:
            ConfigError: The address or the certificate cannot be used.
        """
        if self.place.certfile is not None:
            check_certificate(self.place)
        self._listener = listen(self.place.address, self.place.port)
        self._listener.settimeout(_ACCEPT_S)
        logger.info("waiting for %d nodes at %s:%d", self.place.count - 1, self.place.address, self.place.port)
        arguments = (self._listener, asyncio.get_running_loop())
        threading.Thread(target=self._accept_all, args=arguments, name="jaxserve-nodes", daemon=True).start()

    def close(self, reason: str = "") -> None:
        """Let no more nodes join, and dismiss those that wait; ``reason`` says why the groups fail, if they do."""
        if self._listener is not None:
            self._listener.close()
        waiting, self._waiting = self._waiting, {}
        for node in waiting.values():
            node.dismiss(reason)

    async def take(self, ranks: Sequence[int]) -> list[Node]:
        """Wait for nodes; return them in the order of the ranks.

        Raises:
            ConfigError: One is missing after ``join_timeout``, or is not to run the same.
        """
        self._wanted.update(ranks)
        try:
            async with asyncio.timeout(self.place.join_timeout):
                while missing := [rank for rank in ranks if rank not in self._waiting]:
                    problem = next((found for rank in missing if (found := self._problems.pop(rank, None))), None)
                    if problem is not None:
                        raise ConfigError(problem)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = [rank for rank in ranks if rank not in self._waiting]
            raise ConfigError(not_joined("nodes", missing, self.place)) from None
        finally:
            self._wanted.difference_update(ranks)
        return [self._waiting.pop(rank) for rank in ranks]

    def _accept_all(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                link, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it is closed
                return
            threading.Thread(target=self._accept, args=(link, address[0], loop), daemon=True).start()

    def _accept(self, link: socket.socket, address: str, loop: asyncio.AbstractEventLoop) -> None:
        """Take a node in, or tell it why not."""

        def take(hello: Hello, connection: PeerConnection) -> str | None:
            problem = self._reserve(hello)
            if problem is not None:
                return problem
            try:
                welcome(connection, self.place, hello)
                problem = self._difference(hello, connection.receive())
            except OSError:
                self._free(hello.rank)
                raise
            if problem is not None:
                self._free(hello.rank)
                loop.call_soon_threadsafe(self._refuse, hello.rank, problem)
                return problem
            connection.set_timeout(None)
            connection.end_if_unreachable(UNREACHABLE_S)
            loop.call_soon_threadsafe(self._add, hello, address, connection)
            return None

        admit(link, address, self.place, take)

    def _reserve(self, hello: Hello) -> str | None:
        """Return why a node cannot have its rank; None: it has it now."""
        problem = wrong_place(hello, self.place, "there are")
        if problem is not None:
            return problem
        with self._lock:
            if hello.rank in self._ranks:
                return f"node_rank={hello.rank} is taken by {self._ranks[hello.rank]}"
            self._ranks[hello.rank] = f"process {hello.pid} of host {hello.host}"
        return None

    def _free(self, rank: int) -> None:
        with self._lock:
            self._ranks.pop(rank, None)

    def _difference(self, hello: Hello, message: object) -> str | None:
        """Return in which way a node is not to run the same as this one."""
        name, first = f"rank {hello.rank} (host {hello.host})", f"rank 0 (host {host_name()})"
        if isinstance(message, Failed):
            return f"{name}: {message.error}"
        if not isinstance(message, Facts):  # a follower of one group, which waits for what its process 0 says
            setting = f"setting {MESH_FIELDS['data']}"
            return in_words(name, first, setting, 1, self._facts[setting])
        return difference([self._facts, message.values], [first, name])

    def _add(self, hello: Hello, address: str, connection: PeerConnection) -> None:
        self._waiting[hello.rank] = Node(hello, address, connection, self._on_end)
        logger.info("%s has joined", self._waiting[hello.rank].name)
        self._changed.set()

    def _refuse(self, rank: int, problem: str) -> None:
        """Let the group that waits for a node fail, if any does."""
        if rank in self._wanted:
            self._problems[rank] = problem
            self._changed.set()

    def _on_end(self, node: Node) -> None:
        self._free(node.rank)
        if self._waiting.get(node.rank) is node:
            del self._waiting[node.rank]
