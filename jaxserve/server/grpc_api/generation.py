"""``GenerationService``: text, at once or as it comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jaxserve.errors import DeadlineError, EngineDeadError, RequestError
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.answers import AnswerWriter
from jaxserve.server.grpc_api.context import CURRENT_CALL, Context
from jaxserve.server.grpc_api.requests import ReadRequest, read_request
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc

REQUEST_ID_KEY = "x-request-id"
"""In the initial metadata: the server's name for a request that was admitted."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generates. A call that is cancelled, or ends in any other way, ends its request.

    Args:
        frontend: What runs behind it.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        """Generates all of a text."""
        read = read_request(self._frontend, request, RequestOutputKind.FINAL_ONLY, context.time_remaining())
        async with self._outputs(read, context) as outputs:
            async for output in outputs:
                if output.finished:
                    return AnswerWriter(CURRENT_CALL.get().request_id, read).whole(output)
        raise EngineDeadError("the engine ended before the request did")

    async def StreamGenerate(self, request: generation_pb2.StreamGenerateRequest, context: Context) -> None:
        """Generates a text and sends what is new with each step."""
        interval = request.stream_interval if request.HasField("stream_interval") else 1
        if interval < 1:
            message = f"stream_interval must be at least 1, got {interval}"
            raise RequestError(message, parameter="stream_interval", value=interval)
        read = read_request(self._frontend, request.request, RequestOutputKind.DELTA, context.time_remaining())
        writer = AnswerWriter(CURRENT_CALL.get().request_id, read, interval)
        async with self._outputs(read, context) as outputs:
            async for output in outputs:
                message = writer.part(output)
                if message is not None:
                    await self._write(message, context)

    @contextlib.asynccontextmanager
    async def _outputs(self, read: ReadRequest, context: Context) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """The outputs of a request, from its admission on; the request has ended when the block has."""
        call = CURRENT_CALL.get()
        with self._frontend.admit(call.caller, read.engine.params.n):
            await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            outputs = self._frontend.generate(call.caller, read.engine, call.request_id)
            async with contextlib.aclosing(outputs):
                yield outputs

    async def _write(self, message: generation_pb2.StreamGenerateResponse, context: Context) -> None:
        """Sends a message.

        Raises:
            DeadlineError: The client leaves what was sent before unread for too long.
        """
        limit_s = self._frontend.config.stall_timeout or None
        try:
            async with asyncio.timeout(limit_s):
                await context.write(message)
        except TimeoutError as error:
            raise DeadlineError(f"the client left the answer unread for {limit_s:g} s") from error
