"""Waiting for the server that is to be measured: it may not listen yet, or still load its model."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from jaxserve.bench.serve_answer import Backend, BenchRequest, BenchServeError
from jaxserve.bench.serve_http import HttpAnswer, HttpClient

RETRY_S = 1.0
ANSWER_S = 60.0
"""The longest that a question without generation may take, whatever the limit."""
NOT_READY = (502, 503, 504)
"""What a server says that is not ready, or a proxy in front of one."""

T = TypeVar("T")


class NotReadyError(BenchServeError):
    """The server cannot be reached, or says that it is not ready."""


class ReadyCheck:
    """How long the server may keep a load test waiting, all waits together.

    Args:
        timeout_s: Seconds; 0: it must be ready at once.
    """

    def __init__(self, timeout_s: float):
        self._left_s = timeout_s
        self._has_told = False

    async def wait(self, ask: Callable[[], Awaitable[T]], limit_s: float | None = ANSWER_S) -> T:
        """What ``ask`` finds, asked again and again while the server is not ready.

        Args:
            ask: Raises ``NotReadyError`` where asking again may help.
            limit_s: What each try may take; None: as long as it likes.

        Raises:
            BenchServeError: The server was not ready in time, or something else is wrong.
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

    async def wait_for_answer(self, backend: Backend, request: BenchRequest) -> None:
        """Send one request, again and again until it succeeds, whatever its failure.

        Raises:
            BenchServeError: It did not succeed in time.
        """

        async def ask() -> None:
            answer = await backend.send(request)
            if not answer.is_success:
                raise NotReadyError(f"the test run failed, is the server there and right? {answer.error}")

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
        raise NotReadyError(f"no answer from the server within {limit_s:.0f} s") from error


async def ask_http(client: HttpClient, method: str, path: str, body: Any = None) -> HttpAnswer:
    """What a server that is ready answers, whatever its status.

    Raises:
        NotReadyError: The server cannot be reached, or says that it is not ready.
        BenchServeError: Its certificate is not to be trusted.
    """
    try:
        answer = await client.request(method, path, body)
    except ssl.SSLCertVerificationError as error:
        raise BenchServeError(f"cannot trust {client.base_url}: {error}") from error
    except OSError as error:
        raise NotReadyError(f"cannot reach {client.base_url}: {error}") from error
    if answer.status in NOT_READY:
        raise NotReadyError(f"{client.base_url}{path} answers with status {answer.status}: {answer.body[:200]!r}")
    return answer
