"""Calls over gRPC that are refused after their clients have disconnected: gRPC would never free their statuses."""

import asyncio
import collections
import time
from typing import Any

import pytest

from jaxserve.server.grpc_api import interceptor
from jaxserve.server.grpc_api.calls import end_call, end_with
from tests.grpc_servers import run, serving
from tests.jaxserve.server.test_grpc_silent_calls import GENERATE, HELLO, begin_call

NUM_CONNECTIONS = 8
NUM_CALLS = 100
"""Of a connection at a time."""


@pytest.mark.parametrize("method", [GENERATE, "/jaxserve.v1.GenerationService/Unknown", "/unknown.Service/Unknown"])
def test_no_status_is_sent_to_a_client_that_has_gone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: collections.Counter[str] = collections.Counter()

    def noted(end: Any) -> Any:
        async def end_it(*args: Any) -> None:
            try:
                await end(*args)
            except BaseException as error:
                outcomes[type(error).__name__] += 1
                raise

        return end_it

    monkeypatch.setattr(interceptor, "end_call", noted(end_call))
    monkeypatch.setattr(interceptor, "end_with", noted(end_with))

    async def main() -> None:
        async with serving(api_key=["a" * 32]) as there:
            assert there.server.port is not None
            for _ in range(NUM_CONNECTIONS):
                _, writer = await asyncio.open_connection("127.0.0.1", there.server.port)
                writer.write(HELLO + b"".join(begin_call(2 * i + 1, method) for i in range(NUM_CALLS)))
                time.sleep(0.02)  # gRPC's threads take the calls, and the event loop sees none
                writer.transport.abort()
                await asyncio.sleep(0.1)

    run(main)
    assert outcomes.total() > NUM_CONNECTIONS * NUM_CALLS / 2
    assert outcomes["ExecuteBatchError"] * 10 <= outcomes.total()
