"""The outputs of several requests of one call, as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.request import Request
from jaxserve.server.byte_budget import request_bytes
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.request_log import RequestEntry

_AT_ONCE = 32
"""Requests that are looked at before other work of the event loop has its turn."""


async def make_entries(call: HttpCall, requests: Sequence[Request]) -> list[RequestEntry]:
    """Return the entries of requests, as ``Frontend.entry``; the event loop goes on meanwhile."""
    entries = list[RequestEntry]()
    for number, request in enumerate(requests, start=1):
        entries.append(call.frontend.entry(call.caller, request))
        if not number % _AT_ONCE:
            await asyncio.sleep(0)
    return entries


async def generate_all(
    call: HttpCall, entries: Sequence[RequestEntry]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Admit requests together, and yield the outputs of each with the request's index, as they come.

    An error of one request aborts the others.

    Raises:
        JaxserveError: As ``Ledger.admit`` and ``Frontend.generate``.
    """
    frontend = call.frontend
    num_bytes = await call.read(lambda: sum(request_bytes(entry.request, frontend.info.model) for entry in entries))
    with frontend.ledger.admit(call.caller, sum(entry.request.params.n for entry in entries), num_bytes):
        if len(entries) == 1:
            async with aclosing(frontend.generate(entries[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return

        # At most one output waits here: while the reader is busy, the engine client merges the deltas of each request.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

        async def forward(index: int, entry: RequestEntry) -> None:
            try:
                async with aclosing(frontend.generate(entry)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
                await queue.put((index, None))
            except Exception as error:
                await queue.put((index, error))

        tasks = [asyncio.create_task(forward(index, entry)) for index, entry in enumerate(entries)]
        try:
            num_left = len(tasks)
            while num_left:
                index, output = await queue.get()
                if isinstance(output, Exception):
                    try:
                        raise output
                    finally:
                        del output  # else the error, whose traceback has this frame, would be garbage with all requests
                if output is None:
                    num_left -= 1
                else:
                    yield index, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
