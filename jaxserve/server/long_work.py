"""Runs what would hold up the event loop on threads: reading long bodies, and writing many log-probabilities."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.turns import FairThreads, Turn

MAX_ENTRIES_ON_LOOP = 4096
"""Entries of an output that are written on the event loop; more are written on a thread."""
LONG_MESSAGE_BYTES = 1 << 16
"""Longer bodies and messages are read on a thread."""
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


class LongWork:
    """Threads for what takes long, on which API keys take turns."""

    def __init__(self):
        self._threads = FairThreads(_NUM_THREADS, "jaxserve-long")

    async def run(self, turn: Turn, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, in this context, and return its result.

        Args:
            turn: Whose turn it takes.
            function: The function.
            *arguments: Its arguments.
        """
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._threads.submit(context.run, function, *arguments, turn=turn))

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
