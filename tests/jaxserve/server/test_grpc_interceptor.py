"""Calls that end while something of them is on its way: gRPC frees that only if it is waited for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve.api.errors import DeadlineError
from jaxserve.server.auth import Authenticator
from jaxserve.server.grpc_api.interceptor import CallInterceptor
from jaxserve.server.ledger import Ledger
from jaxserve.server.proto.jaxserve.v1 import generation_pb2
from jaxserve.server.settings import ServerConfig

REQUEST = generation_pb2.GenerateRequest(text="hello")


class FakeContext:
    """A call of which a test sees what is done with it.

    Attributes:
        is_reading: Set once its message is waited for.
        may_come: The message comes when this is set.
        has_come: Whether somebody waited for it until then.
        codes: What the call was ended with.
    """

    def __init__(self, remaining_s: float | None):
        self._remaining_s = remaining_s
        self.is_reading = asyncio.Event()
        self.may_come = asyncio.Event()
        self.has_come = False
        self.codes: list[grpc.StatusCode] = []

    def add_done_callback(self, callback: Any) -> None:
        """Nothing here waits for the end."""

    def time_remaining(self) -> float | None:
        """Seconds."""
        return self._remaining_s

    async def read(self) -> generation_pb2.GenerateRequest:
        """The only message."""
        self.is_reading.set()
        await self.may_come.wait()
        self.has_come = True
        return REQUEST

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        """Ends the call."""
        self.codes.append(code)
        raise grpc.aio.AbortError


async def _start(context: FakeContext) -> "asyncio.Task[Any]":
    """A call whose handler finds that its time is up."""

    async def generate(request: generation_pb2.GenerateRequest, context: Any) -> None:
        raise DeadlineError("the time is up")

    async def find(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            generate, generation_pb2.GenerateRequest.FromString, generation_pb2.GenerateResponse.SerializeToString
        )

    interceptor = CallInterceptor(Authenticator(ServerConfig()), Ledger(), stall_timeout_s=60.0)
    details: Any = SimpleNamespace(method="/jaxserve.v1.GenerationService/Generate", invocation_metadata=())
    handler = await interceptor.intercept_service(find, details)
    return asyncio.create_task(handler.stream_unary(None, context))


def test_a_message_is_read_to_its_end_though_the_call_is_cancelled() -> None:
    async def cancel_while_reading() -> FakeContext:
        context = FakeContext(None)
        call = await _start(context)
        await context.is_reading.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        context.may_come.set()
        await asyncio.sleep(0.01)
        return context

    assert asyncio.run(cancel_while_reading()).has_come


@pytest.mark.parametrize(
    ("remaining_s", "codes"),
    [
        pytest.param(0.0, [], id="gRPC has ended it"),
        pytest.param(5.0, [grpc.StatusCode.DEADLINE_EXCEEDED], id="gRPC has not"),
        pytest.param(None, [grpc.StatusCode.DEADLINE_EXCEEDED], id="gRPC knows no limit"),
    ],
)
def test_a_call_that_grpc_has_ended_gets_no_status(remaining_s: float | None, codes: list[grpc.StatusCode]) -> None:
    async def end() -> FakeContext:
        context = FakeContext(remaining_s)
        context.may_come.set()
        call = await _start(context)
        await asyncio.wait({call}, timeout=0.2)
        call.cancel()  # as gRPC does with calls whose time is up
        with pytest.raises((asyncio.CancelledError, grpc.aio.AbortError)):
            await call
        return context

    assert asyncio.run(end()).codes == codes


def test_a_late_call_that_grpc_does_not_end_has_its_status() -> None:
    async def end() -> FakeContext:
        context = FakeContext(0.0)
        context.may_come.set()
        with pytest.raises(grpc.aio.AbortError):
            await (await _start(context))
        return context

    assert asyncio.run(end()).codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
