"""Outputs of several engine requests as one stream, and of one that is read to its end."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from jaxserve.errors import RequestFailedError
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.http_api.endpoint import Call

Result = TypeVar("Result")
Outputs = AsyncGenerator[RequestOutput, None]


async def generate_all(
    call: Call, requests: Sequence[EngineRequest], answer_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Admits requests together, and gives the outputs of each with its place, as they come.

    One that fails ends all of them.

    Raises:
        JaxserveError: As ``Frontend.admit`` and ``Frontend.generate``.
    """
    frontend = call.frontend
    with frontend.admit(call.caller, sum(request.params.n for request in requests)):
        if len(requests) == 1:
            async with aclosing(frontend.generate(call.caller, requests[0], answer_id)) as outputs:
                async for output in outputs:
                    _check(output)
                    yield 0, output
            return
        streams = [
            frontend.generate(call.caller, request, f"{answer_id}-{place}") for place, request in enumerate(requests)
        ]
        async with aclosing(_merged(streams)) as merged:
            async for place, output in merged:
                _check(output)
                yield place, output


async def all_or_none(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What several requests give, in their order; one that fails ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    # One place: while nobody reads, each stream keeps what comes and joins it.
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

    async def pump(place: int, stream: Outputs) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((place, output))
        except Exception as error:
            end = error
        await queue.put((place, end))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_left = len(streams)
        while num_left:
            place, output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_left -= 1
            else:
                yield place, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(output: RequestOutput) -> None:
    """Raises for a request that failed while its outputs came."""
    if output.error is not None and any(one.finish_reason == "error" for one in output.outputs):
        raise RequestFailedError(output.error)
