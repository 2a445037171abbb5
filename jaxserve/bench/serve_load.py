"""Sending the requests of a load test when they are due, and waiting for all answers."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.bench.serve_answer import Backend, BenchAnswer, BenchRequest


class LoadResult(NamedTuple):
    """Answers in the order of their requests, and the seconds from the first due time to the last answer."""

    answers: list[BenchAnswer]
    duration_s: float


async def run_load(
    backend: Backend,
    requests: Sequence[BenchRequest],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    on_answer: Callable[[BenchAnswer], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send each request when it is due, whether or not earlier ones were answered.

    Args:
        backend: How to ask.
        requests: What to ask.
        due_s: When each is due, in seconds from now, ascending.
        max_concurrency: Most requests at a time; others wait here, and note how long. None: any number.
        on_answer: Told of each answer.
        clock: Monotonic seconds.
    """
    limit = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start_s = clock()

    async def ask(request: BenchRequest, arrived_s: float) -> BenchAnswer:
        async with limit:
            answer = await backend.send(request)
        answer.queue_s = answer.start_s - arrived_s
        if on_answer is not None:
            on_answer(answer)
        return answer

    async with asyncio.TaskGroup() as tasks:
        sent = []
        for request, due in zip(requests, due_s, strict=True):
            wait_s = start_s + due - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            sent.append(tasks.create_task(ask(request, clock())))
    return LoadResult([task.result() for task in sent], clock() - start_s)
