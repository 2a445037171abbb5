"""Calls of the client with asyncio that end early: its connection is closed, or somebody cancels the caller."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from jaxserve.api.errors import JaxserveError
from jaxserve.client import AsyncClient
from tests.grpc_servers import Serving, run, serving

USER = {"role": "user", "content": "Hi"}
SOON_S = 0.05
Read = Callable[[AsyncClient], Awaitable[object]]


async def _last(deltas: AsyncIterator[object]) -> object:
    return [delta async for delta in deltas]


CALLS: dict[str, Read] = {
    "generate": lambda client: client.generate("Hi"),
    "chat": lambda client: client.chat([USER]),
    "stream": lambda client: _last(client.stream("Hi")),
    "stream_chat": lambda client: _last(client.stream_chat([USER])),
    "watch_health": lambda client: _last(client.watch_health()),
}
by_every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def while_it_waits(check: Callable[[AsyncClient, Serving], Awaitable[None]]) -> None:
    """Runs a check beside a server whose requests don't end."""

    async def main() -> None:
        async with serving() as there, AsyncClient(there.target) as client:
            there.engine.stops_at = 1
            await check(client, there)

    run(main)


@by_every_call
def test_a_connection_that_is_closed_fails_its_calls(call: Read) -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        with pytest.raises(ExceptionGroup) as failures:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_as_coroutine(call(client)))
                await asyncio.sleep(SOON_S)
                await client.close()
        (failure,) = failures.value.exceptions
        assert type(failure) is JaxserveError and str(failure) == "CANCELLED: the connection was closed"

    while_it_waits(check)


def test_a_connection_that_is_closed_between_two_parts() -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        deltas = client.stream("Hi")
        await anext(deltas)
        await client.close()
        with pytest.raises(JaxserveError, match="the connection was closed"):
            await anext(deltas)
        await there.until_idle()

    while_it_waits(check)


@by_every_call
def test_a_task_that_is_cancelled(call: Read) -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        for also_closes in (False, True):
            reading = asyncio.create_task(_as_coroutine(call(client)))
            await asyncio.sleep(SOON_S)
            reading.cancel()
            if also_closes:
                await client.close()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert reading.cancelled()

    while_it_waits(check)


@by_every_call
def test_time_limits_of_callers(call: Read) -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_as_coroutine(call(client)), SOON_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await call(client)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        assert await client.health()

    while_it_waits(check)


def test_a_time_limit_of_one_part() -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        async with contextlib.aclosing(client.stream("Hi")) as deltas:
            await asyncio.wait_for(anext(deltas), 10.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(deltas), SOON_S)
        await there.until_idle()

    while_it_waits(check)


def test_a_task_group_that_fails_cancels_its_calls() -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        async def fail() -> None:
            await there.engine.reached.wait()
            raise LookupError

        with pytest.raises(ExceptionGroup) as failures:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_as_coroutine(client.generate("Hi")))
                tasks.create_task(fail())
        assert [type(one) for one in failures.value.exceptions] == [LookupError]
        await there.until_idle()

    while_it_waits(check)


def test_streams_that_are_left() -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        for deltas in (client.stream("Hi"), client.stream_chat([USER])):
            await anext(deltas)
            await deltas.aclose()
            await there.until_idle()

    while_it_waits(check)


def test_failures_are_still_those_of_statuses() -> None:
    async def check(client: AsyncClient, there: Serving) -> None:
        there.engine.stops_at, there.engine.error = None, RuntimeError("inside")
        with pytest.raises(JaxserveError, match="INTERNAL") as failure:
            await client.generate("Hi")
        assert isinstance(failure.value.__cause__, grpc.RpcError)

    while_it_waits(check)


async def _as_coroutine(waited: Awaitable[object]) -> object:
    return await waited
