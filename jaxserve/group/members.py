"""The followers of a group as its leader knows them."""

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.api.errors import ConfigError, EngineDeadError, JaxserveError
from jaxserve.group.connection import PeerConnection, machine_name, send_to_each
from jaxserve.group.messages import (
    Beat,
    Done,
    Failed,
    Hello,
    Moved,
    MoveFacts,
    OfMoves,
    Prepared,
    Results,
    ShowStacks,
    Stacks,
    ToFollower,
)
from jaxserve.log_output import stacks_of_threads

logger = logging.getLogger(__name__)

_DEAF_S = 3.0  # a process whose threads run sends something every second
_SILENT_S = 8.0
_STACKS_S = 2.0
_SILENT_AT_START_S = 60.0  # tracing large programs keeps other threads waiting


class Member:
    """A follower.

    Attributes:
        hello: What it said of itself.
        connection: The connection to it.
        inbox: Its messages about the start, or the error with which it failed.
        moves: Its messages about changes of mesh or layout, or that error.
        steps: Its steps.
        silent_s: Seconds since its last message.
        launched: The latest step that it said it has launched.
        shown: Set once it has logged its stacks.
        has_failed: Whether it has said that it failed.
        has_ended: Set once its connection has ended.

    Args:
        hello: What it said of itself.
        connection: The connection to it.
    """

    def __init__(self, hello: Hello, connection: PeerConnection):
        self.hello = hello
        self.connection = connection
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.moves: queue.SimpleQueue[OfMoves | JaxserveError] = queue.SimpleQueue()
        self.steps = Steps()
        self.silent_s = 0.0
        self.launched = -1
        self.shown = threading.Event()
        self.has_failed = False
        self.has_ended = threading.Event()
        self._early = dict[int, bytes]()
        self._dropped = -1

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.hello.rank

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"rank {self.hello.rank} (host {self.hello.host}, process {self.hello.pid})"

    def send(self, message: ToFollower) -> None:
        """Send a message. Its end is noticed by who receives."""
        send_to_each([self.connection], message)

    def results_of(self, number: int) -> bytes:
        """Wait for what it reports of a step. Those of other data slices may come before; they are kept.

        Raises:
            JaxserveError: It failed.
        """
        while number not in self._early:
            found = self.inbox.get()
            if isinstance(found, JaxserveError):
                raise found
            assert isinstance(found, Results), f"expected results of step {number}, got {found}"
            if found.number > self._dropped:
                self._early[found.number] = found.data
        return self._early.pop(number)

    def forget_steps(self, latest: int) -> None:
        """Forget the steps up to the latest one, whose results are dropped."""
        self.steps.forget()
        self._early.clear()
        self._dropped = latest

    def kill_if_silent(self) -> None:
        """Kill a process of this machine that sends nothing: it is stopped, or none of its threads runs, so that it
        does not end by itself, and its launcher would wait for that."""
        if self.silent_s < _DEAF_S or self.hello.machine != machine_name():
            return
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{self.hello.pid}/cmdline").read_text().replace("\0", " ").replace("=", " ")
            if f" --node-rank {self.rank} " in f"{command} ":  # in another container, its id is that of another process
                os.kill(self.hello.pid, signal.SIGKILL)
                logger.error("%s did not end by itself; it was killed", self.name)

    def handle(self, message: object) -> JaxserveError | None:
        """Note a message; return the error with which the follower failed, if it did."""
        self.silent_s = 0.0
        if isinstance(message, Done):
            self.steps.done(message.number, message.digest)
        elif isinstance(message, Stacks):
            self.launched = message.number
            self.shown.set()
        elif isinstance(message, Failed):
            self.has_failed = True
            if not message.is_setting:
                logger.error("%s failed:\n%s", self.name, message.traceback)
            return (ConfigError if message.is_setting else EngineDeadError)(f"{self.name}: {message.error}")
        elif isinstance(message, MoveFacts | Prepared | Moved):
            self.moves.put(message)
        elif not isinstance(message, Beat):
            self.inbox.put(message)
        return None


class Steps:
    """The steps of a follower, and their digests, beside those of the leader.

    Attributes:
        number: The latest step that it has finished; -1: none.
        has_diverged: Whether a digest differs.
        digests: The first two digests that differ, in words.
    """

    def __init__(self):
        self.number = -1
        self.has_diverged = False
        self.digests = ""
        self._lock = threading.Lock()
        self._in_flight = set[int]()
        self._late_s = 0.0
        self._own = dict[int, bytes]()
        self._theirs = dict[int, bytes]()

    def launched(self, number: int) -> None:
        """Note that the leader has launched a step."""
        with self._lock:
            if not self._in_flight:
                self._late_s = 0.0
            self._in_flight.add(number)

    def computed(self, number: int, digest: bytes) -> bool:
        """Note the leader's digest of a step; return whether the follower's, if it has come, is the same."""
        with self._lock:
            self._own[number] = digest
            self._compare(number)
            return not self.has_diverged

    def done(self, number: int, digest: bytes) -> None:
        """Note that the follower has finished a step."""
        with self._lock:
            self.number, self._late_s = number, 0.0
            self._in_flight.discard(number)
            self._theirs[number] = digest
            self._compare(number)

    def forget(self) -> None:
        """Forget the steps in flight, whose results are dropped."""
        with self._lock:
            self._in_flight.clear()
            self._own.clear()
            self._theirs.clear()

    def waited(self, passed_s: float) -> float:
        """Note some more seconds; return those for which the follower has been at the oldest step in flight, 0 without
        any."""
        with self._lock:
            if not self._in_flight:
                return 0.0
            self._late_s += passed_s
            return self._late_s

    def _compare(self, number: int) -> None:
        if number in self._own and number in self._theirs:
            own, theirs = self._own.pop(number), self._theirs.pop(number)
            if own != theirs and not self.has_diverged:
                self.has_diverged, self.digests = True, f"{theirs.hex()} instead of {own.hex()}"


class SilenceLimits:
    """How long a follower may say nothing, or take for a step.

    Attributes:
        is_running: Whether all are compiled and loaded.
        is_preparing: Whether they compile for another mesh or layout while steps go on.

    Args:
        step_timeout: Seconds for a step.
    """

    def __init__(self, step_timeout: float):
        self.is_running = False
        self.is_preparing = False
        self._step_timeout = step_timeout

    def problem(self, member: Member, passed_s: float) -> str | None:
        """Return what is wrong with a follower after some more seconds, not counting those in which this process itself
        was stopped."""
        member.silent_s += passed_s
        late_s = member.steps.waited(passed_s)
        limit_s = _SILENT_S if self.is_running and not self.is_preparing else _SILENT_AT_START_S
        if member.silent_s > limit_s:
            return f"has sent nothing for {limit_s:g} s"
        if late_s > self._step_timeout:
            return f"has not finished a step within step_timeout={self._step_timeout:g} s"
        return None


def show_stacks(members: Sequence[Member]) -> list[Member]:
    """Let all processes of a group log the stacks of their threads, this one too; return those that do not do it."""
    for member in members:
        member.shown.clear()
        member.send(ShowStacks())
    logger.error("%s", stacks_of_threads())
    until_s = time.monotonic() + _STACKS_S
    return [member for member in members if not member.shown.wait(max(0.0, until_s - time.monotonic()))]
