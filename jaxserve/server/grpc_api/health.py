"""gRPC's health service. The library's own holds a lock while it writes: a watcher that reads nothing would stop it."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.server.grpc_api.context import Context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """Says which services serve: ``""`` while the process lives, others as they are told.

    Args:
        max_watchers: Most that may watch at a time: nobody needs a key for it.
    """

    def __init__(self, max_watchers: int):
        self._max_watchers = max_watchers
        self._statuses: dict[str, Any] = {"": SERVING}
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = False

    def set(self, service: str, is_serving: bool) -> None:
        """Says whether a service serves; those who watch learn it soon. Without effect after ``end``."""
        if not self._is_ending:
            self._set({service: SERVING if is_serving else NOT_SERVING})

    def end(self) -> None:
        """Nothing serves any more."""
        self._is_ending = True
        self._set(dict.fromkeys(self._statuses, NOT_SERVING))

    def _set(self, statuses: dict[str, Any]) -> None:
        self._statuses |= statuses
        for news in self._watchers:
            news.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse | None:
        """Whether a service serves now."""
        status = self._statuses.get(request.service)
        if status is not None:
            return health_pb2.HealthCheckResponse(status=status)
        await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of that name")
        return None

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Whether a service serves, now and whenever that changes. Who reads slowly may miss what did not last."""
        if len(self._watchers) >= self._max_watchers:
            message = f"{self._max_watchers} calls watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        news, told = asyncio.Event(), None
        self._watchers.add(news)
        try:
            while True:
                news.clear()
                status = self._statuses.get(request.service, _UNKNOWN)
                if status != told:
                    told = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await news.wait()
        finally:
            self._watchers.remove(news)
