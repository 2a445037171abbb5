"""Waits until the server under test listens and has loaded its model."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from jaxserve.bench.serve.http import HttpClient, HttpResponse
from jaxserve.bench.serve.records import Backend, BenchRequest, BenchServeError

RETRY_S = 1.0
ANSWER_S = 60.0
"""Largest time of a call without generation, whatever the limit."""
NOT_READY = (502, 503, 504)
"""Statuses of a server that is not ready, or of a proxy in front of it."""

T = TypeVar("T")


class NotReadyError(BenchServeError):
    """The server cannot be reached, or reports that it is not ready."""


class ReadyCheck:
    """Limit of the total time that a load test waits for the server.

    Args:
        timeout_s: Seconds; 0: it must be ready immediately.
    """

    def __init__(self, timeout_s: float):
        self._left_s = timeout_s
        self._has_told = False

    async def wait(self, ask: Callable[[], Awaitable[T]], limit_s: float | None = ANSWER_S) -> T:
        """Return the result of ``ask``, retried while the server is not ready.

        Args:
            ask: Raises ``NotReadyError`` if a retry may help.
            limit_s: Time limit of each try; None: no limit.

        Raises:
            BenchServeError: The server was not ready in time, or ``ask`` failed.
        """
        deadline_s = time.monotonic() + self._left_s
        if limit_s is not None and self._left_s > 0:
            limit_s = min(limit_s, max(self._left_s, RETRY_S))
        try:
            while True:
                try:
                    return await _within(limit_s, ask)
                except NotReadyError as error:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    self._tell(error, left_s)
                await asyncio.sleep(min(RETRY_S, left_s))
        finally:
            self._left_s = max(0.0, deadline_s - time.monotonic())

    async def wait_for_response(self, backend: Backend, request: BenchRequest) -> None:
        """Send one request, retried until it succeeds, whatever its failure.

        Raises:
            BenchServeError: It did not succeed in time.
        """

        async def ask() -> None:
            response = await backend.send(request)
            if not response.is_success:
                raise NotReadyError(f"the test request failed: {response.error}")

        await self.wait(ask, None)

    def _tell(self, error: NotReadyError, left_s: float) -> None:
        if not self._has_told:
            print(f"Waiting up to {left_s:.0f} s for the server: {error}", flush=True)
        self._has_told = True


async def _within(limit_s: float | None, ask: Callable[[], Awaitable[T]]) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await ask()
    except TimeoutError as error:
        raise NotReadyError(f"no response from the server within {limit_s:.0f} s") from error


async def ask_http(client: HttpClient, method: str, path: str, body: Any = None) -> HttpResponse:
    """Return the response of a server that is ready, whatever its status.

    Raises:
        NotReadyError: The server cannot be reached, or reports that it is not ready.
        BenchServeError: Its certificate cannot be verified.
    """
    try:
        response = await client.request(method, path, body)
    except ssl.SSLCertVerificationError as error:
        raise BenchServeError(f"cannot verify the certificate of {client.base_url}: {error}") from error
    except OSError as error:
        raise NotReadyError(f"cannot reach {client.base_url}: {error}") from error
    if response.status in NOT_READY:
        raise NotReadyError(f"{client.base_url}{path} responds with status {response.status}: {response.body[:200]!r}")
    return response
