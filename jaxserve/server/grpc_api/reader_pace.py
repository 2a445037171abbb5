"""How fast the client of a call must read."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from jaxserve.api.errors import DeadlineError
from jaxserve.server.settings import ServerConfig


class ReaderPace:
    """Ends a call whose client reads nothing for too long, or fewer bytes per second than it must.

    Only the time in which a message waits for the client counts.

    Args:
        stall_s: Most seconds for a message; infinite for no limit.
        bytes_per_s: Fewest bytes per second, beyond one such time; 0 for no limit.
    """

    def __init__(self, stall_s: float, bytes_per_s: float):
        self._stall_s, self._bytes_per_s = stall_s, bytes_per_s
        self._num_bytes = 0
        self._waited_s = 0.0

    @classmethod
    def of(cls, config: ServerConfig) -> "ReaderPace":
        """Return what a server's settings ask for."""
        return cls(config.stall_timeout or math.inf, config.min_transfer_rate)

    def limit_s(self, num_bytes: int) -> float | None:
        """Return the seconds in which a message of some bytes must leave; None for no limit."""
        limit_s = self._stall_s
        if self._bytes_per_s:
            limit_s += (self._num_bytes + num_bytes) / self._bytes_per_s - self._waited_s
        return limit_s if limit_s < math.inf else None

    @contextlib.asynccontextmanager
    async def sending(self, num_bytes: int) -> AsyncIterator[None]:
        """Limit the time in which the block sends a message of some bytes.

        Raises:
            DeadlineError: It took too long.
        """
        loop, limit_s = asyncio.get_running_loop(), self.limit_s(num_bytes)
        begin_s = loop.time()
        stall_s = None if limit_s is None else max(0.0, min(limit_s, self._stall_s))
        try:
            async with asyncio.timeout(stall_s):
                yield
        except TimeoutError as error:
            if stall_s == self._stall_s:
                raise DeadlineError(f"the client did not read the response for {stall_s:g} s") from error
            waited_s = self._waited_s + loop.time() - begin_s
            raise DeadlineError(
                f"the client read the response too slowly: {self._num_bytes} bytes in {waited_s:.3g} s; limit: "
                f"{self._bytes_per_s:g} bytes per second (min_transfer_rate)"
            ) from error
        self._num_bytes += num_bytes
        self._waited_s += loop.time() - begin_s
