"""Limits on the calls of gRPC's standard services, which anybody may open and leave open."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from jaxserve.server.grpc_api.calls import Context, end_call

MAX_REFLECTIONS = 32
"""Streams of server reflection at a time."""
MAX_REFLECTIONS_PER_CONNECTION = 8
MAX_CHECKS = 64
"""Health checks at a time, which take no time, beside calls that watch."""
MAX_HEALTH_CALLS_PER_CONNECTION = 32


class OpenStreams:
    """Counts the open calls of a kind, in all and by connection.

    Args:
        kind: Their name in errors, in the plural.
        most: Most calls.
        most_per_connection: Most calls of one connection.
    """

    def __init__(self, kind: str, most: int, most_per_connection: int):
        self._kind = kind
        self._most = most
        self._most_per_connection = most_per_connection
        self._num_open = 0
        self._by_connection: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[None]:
        """Count a call while the block runs; end one too many with RESOURCE_EXHAUSTED, before its message is read."""
        connection = context.peer()  # with the client's port
        if self._num_open >= self._most:
            await self._refuse(context, f"{self._most} are open already")
        if self._by_connection[connection] >= self._most_per_connection:
            await self._refuse(context, f"{self._most_per_connection} of this connection are open already")
        self._num_open += 1
        self._by_connection[connection] += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._by_connection[connection] -= 1
            if not self._by_connection[connection]:
                del self._by_connection[connection]

    async def _refuse(self, context: Context, why: str) -> None:
        await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"too many {self._kind}: {why}")


def max_watchers(max_calls: int) -> int:
    """Return how many calls may watch the health of a server that takes ``max_calls`` calls."""
    return max_calls // 4


def health_calls(max_calls: int) -> OpenStreams:
    """Return the count of the health calls of a server that takes ``max_calls`` other ones."""
    return OpenStreams("health calls", max_watchers(max_calls) + MAX_CHECKS, MAX_HEALTH_CALLS_PER_CONNECTION)


class Reflections:
    """Limits the streams of server reflection.

    Args:
        limit_s: Seconds that a stream may take; 0: no limit.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._open = OpenStreams("reflection streams", MAX_REFLECTIONS, MAX_REFLECTIONS_PER_CONNECTION)

    def guarded(self, handler: Any) -> Any:
        """Return a handler that refuses streams beyond the limits, and ends those that take too long."""

        async def respond(requests: Any, context: Context) -> None:
            async with self._open.admit(context):
                try:
                    async with asyncio.timeout(self._limit_s or None):
                        async for response in handler.stream_stream(requests, context):
                            await context.write(response)
                except TimeoutError:
                    message = f"the stream took longer than {self._limit_s:g} s"
                    await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, message)

        return grpc.stream_stream_rpc_method_handler(respond, handler.request_deserializer, handler.response_serializer)
