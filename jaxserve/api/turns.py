"""Turns between callers: those of one API key do not wait until all work of another one is done."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Turn:
    """Whose turn something takes.

    Attributes:
        key: Names the API key; "" without keys.
        weight: Its share beside the others; 1 by default.
    """

    key: str = ""
    weight: float = 1.0


SHARED_TURN = Turn()
"""The turn of all work without an API key."""


class Turns:
    """Says which key is next: the one that has had the least so far for its weight.

    A key that comes back has had as much as the others: it is next, and cannot make up for the time that it was away.
    """

    def __init__(self):
        self._had: dict[str, float] = {}
        self._now = 0.0

    def join(self, key: str) -> None:
        """Note that a key has work again."""
        self._had[key] = max(self._had.get(key, 0.0), self._now)

    def next(self, keys: Iterable[str]) -> str:
        """Return the one of some keys, all of which have joined, that is next."""
        return min(keys, key=self._had.__getitem__)

    def take(self, turn: Turn, cost: float) -> None:
        """Note that a key has its turn.

        Args:
            turn: The turn of a key that has joined.
            cost: What the turn costs, in any unit.
        """
        self._now = self._had[turn.key]
        self._had[turn.key] += cost / turn.weight


class TurnQueue(Generic[Item]):
    """Items that wait: those of one key in order, those of several keys in turns."""

    def __init__(self):
        self._items: dict[str, collections.deque[tuple[Item, Turn, float]]] = {}
        self._turns = Turns()

    @property
    def keys(self) -> Collection[str]:
        """The keys that have items."""
        return self._items.keys()

    def put(self, item: Item, turn: Turn, cost: float) -> None:
        """Add an item.

        Args:
            item: The item.
            turn: Whose turn it takes.
            cost: What it costs beside other items, in any unit.
        """
        if turn.key not in self._items:
            self._items[turn.key] = collections.deque()
            self._turns.join(turn.key)
        self._items[turn.key].append((item, turn, cost))

    def take(self, keys: Collection[str]) -> Item:
        """Remove and return the next item of some keys, all of which have items."""
        key = self._turns.next(keys)
        waiting = self._items[key]
        item, turn, cost = waiting.popleft()
        if not waiting:
            del self._items[key]
        self._turns.take(turn, cost)
        return item

    def clear(self) -> list[Item]:
        """Remove and return all items."""
        items, self._items = self._items, {}
        return [item for waiting in items.values() for item, _, _ in waiting]


class _Job(NamedTuple):
    future: "concurrent.futures.Future[Any]"
    call: Callable[[], Any]
    key: str


class FairThreads:
    """Threads that run functions: those of one key in order, and those of several keys in turns. Thread-safe.

    A key has at most all threads but one, so that the functions of another one need not wait for any of its own.

    Args:
        num_threads: Number of threads.
        name: What the threads' names begin with.
    """

    def __init__(self, num_threads: int, name: str):
        self._most = max(1, num_threads - 1)
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, name)
        self._waiting = TurnQueue[_Job]()
        self._num_running: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()  # of the two above

    def submit(
        self, function: Callable[..., Result], *arguments: Any, turn: Turn = SHARED_TURN, cost: float = 1.0
    ) -> "concurrent.futures.Future[Result]":
        """Run a function on a thread.

        Args:
            function: The function.
            *arguments: Its arguments.
            turn: Whose turn it takes.
            cost: What it costs beside other functions.

        Raises:
            RuntimeError: ``shutdown`` was called.
        """
        job = _Job(concurrent.futures.Future(), lambda: function(*arguments), turn.key)
        with self._lock:
            self._threads.submit(self._work)  # it waits for the lock
            self._waiting.put(job, turn, cost)
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more functions; run those that wait, or cancel them, and wait for all if ``wait``."""
        if cancel_futures:
            with self._lock:
                waiting = self._waiting.clear()
            for job in waiting:
                job.future.cancel()
        self._threads.shutdown(wait)

    def _work(self) -> None:
        """Run what waits, as long as a key with something has a thread left."""
        while (job := self._take()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(job.call())
            except BaseException as error:  # a panic of a library in Rust is one
                job.future.set_exception(error)
            finally:
                with self._lock:
                    self._num_running[job.key] -= 1
                del job  # what it holds is not kept until the next one

    def _take(self) -> _Job | None:
        """Return the next function to run; None if there is none, or its key has all the threads that it may have."""
        with self._lock:
            keys = [key for key in self._waiting.keys if not key or self._num_running[key] < self._most]
            if not keys:
                return None
            job = self._waiting.take(keys)
            self._num_running[job.key] += 1
            return job
