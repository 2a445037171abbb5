"""Sends the requests of a load test at their due times and waits for all responses."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.bench.serve.records import Backend, BenchRequest, BenchResponse


class LoadResult(NamedTuple):
    """Responses in the order of their requests, and the seconds from the first due time to the last response."""

    responses: list[BenchResponse]
    duration_s: float


async def run_load(
    backend: Backend,
    requests: Sequence[BenchRequest],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    on_response: Callable[[BenchResponse], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send each request when it is due, whether or not earlier ones have finished.

    Args:
        backend: Sends requests.
        requests: The requests.
        due_s: Due time of each request, in seconds from now, ascending.
        max_concurrency: Limit of concurrent requests; others wait here, and their wait is recorded. None: no limit.
        on_response: Called with each response.
        clock: Returns monotonic seconds.
    """
    limit = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start_s = clock()

    async def ask(request: BenchRequest, arrived_s: float) -> BenchResponse:
        async with limit:
            response = await backend.send(request)
        response.queue_s = response.start_s - arrived_s
        if on_response is not None:
            on_response(response)
        return response

    async with asyncio.TaskGroup() as tasks:
        sent = []
        for request, due in zip(requests, due_s, strict=True):
            wait_s = start_s + due - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            sent.append(tasks.create_task(ask(request, clock())))
    return LoadResult([task.result() for task in sent], clock() - start_s)
