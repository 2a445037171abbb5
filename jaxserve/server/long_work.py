"""Runs what would hold up the event loop on threads: reading long bodies, and writing many log-probabilities."""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.turns import FairThreads, Turn

MAX_ENTRIES_ON_LOOP = 4096
"""Entries of an output that are written on the event loop; more are written on a thread."""
LONG_MESSAGE_BYTES = 1 << 16
"""Longer bodies and messages are read on a thread."""
LONG_WORK_SHARE = 0.1
"""Most of the time that a key of weight 1 may have for long work while others have requests: the event loop needs the
interpreter too, and waits for it while a thread reads a body."""
MAX_REST_S = 5.0
_NUM_THREADS = 2
"""One for a key, and one for all others. They run Python, of which more threads at a time do no more."""
Result = TypeVar("Result")


def num_entries(output: RequestOutput) -> int:
    """Return the number of tokens and log-probabilities of an output."""
    found = (output.prompt_logprobs, *(one.logprobs for one in output.outputs))
    num_logprobs = sum(each.num_entries for each in found if isinstance(each, PackedLogprobs))
    return num_logprobs + sum(len(one.token_ids) for one in output.outputs)


def is_long(output: RequestOutput) -> bool:
    """Whether an output has more tokens and log-probabilities than may be written on the event loop."""
    return num_entries(output) > MAX_ENTRIES_ON_LOOP


class _Timed:
    """Calls a function, and keeps how long it takes of this thread's time."""

    def __init__(self):
        self.took_s = 0.0

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function; return its result."""
        begin_s = time.thread_time()
        try:
            return function(*arguments)
        finally:
            self.took_s = time.thread_time() - begin_s


class LongWork:
    """Threads for what takes long, on which API keys take turns.

    While other keys have requests, a key rests after each piece of its work, so that all pieces together take
    ``LONG_WORK_SHARE`` of the time, times the key's weight; no rest is longer than ``MAX_REST_S``.

    Args:
        is_shared: Tells from a key whether others have requests.
    """

    def __init__(self, is_shared: Callable[[str], bool]):
        self._threads = FairThreads(_NUM_THREADS, "jaxserve-long")
        self._is_shared = is_shared
        self._locks: dict[str, asyncio.Lock] = {}  # of each key: held while it works, and while it rests

    async def run(self, turn: Turn, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, in this context, and return its result.

        Args:
            turn: Whose turn it takes.
            function: The function.
            *arguments: Its arguments.
        """
        context, timed = contextvars.copy_context(), _Timed()
        if not turn.key:
            return await asyncio.wrap_future(self._threads.submit(context.run, function, *arguments, turn=turn))
        loop, lock = asyncio.get_running_loop(), self._locks.setdefault(turn.key, asyncio.Lock())
        await lock.acquire()

        def has_ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._rest, turn, lock, timed.took_s)

        with contextlib.ExitStack() as failing:
            failing.callback(lock.release)
            job = self._threads.submit(timed.call, context.run, function, *arguments, turn=turn)
            failing.pop_all()
        job.add_done_callback(has_ended)  # also of a caller that no longer waits
        return await asyncio.wrap_future(job)

    def _rest(self, turn: Turn, lock: asyncio.Lock, took_s: float) -> None:
        """Let the key's next piece begin, after a rest if others have requests."""
        share = LONG_WORK_SHARE * turn.weight
        if share < 1 and self._is_shared(turn.key):
            asyncio.get_running_loop().call_later(min(took_s * (1 / share - 1), MAX_REST_S), lock.release)
        else:
            lock.release()

    async def read(self, turn: Turn, num_bytes: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that reads a message: on a thread if that is long.

        Args:
            turn: Whose turn it takes.
            num_bytes: Length of the message.
            function: The function.
            *arguments: Its arguments.
        """
        if num_bytes > LONG_MESSAGE_BYTES:
            return await self.run(turn, function, *arguments)
        return function(*arguments)

    async def write_output(self, turn: Turn, output: RequestOutput, write: Callable[..., Result], *more: Any) -> Result:
        """Call ``write`` with an output, whose log-probabilities it reads: on a thread if they are many.

        Args:
            turn: Whose turn it takes.
            output: The output, the last argument of ``write``.
            write: The function.
            *more: Arguments before the output.
        """
        if is_long(output):
            return await self.run(turn, write, *more, output)
        return write(*more, output)

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
