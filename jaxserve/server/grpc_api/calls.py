"""A gRPC call's context, and how a call ends with a status that is not OK."""

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.rpc import status_pb2
from grpc_status import rpc_status

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = Any  # gRPC's own contexts are no instances of its class

_NOTICE_S = 0.01
"""In that time gRPC cancels the task of a call whose client has disconnected."""
_LATE_S = 1.0
"""In that time gRPC ends a call that is past its deadline."""


async def end_call(context: Context, code: grpc.StatusCode, details: str, metadata: Any = ()) -> NoReturn:
    """End a call with a status.

    gRPC never frees the status of a call whose client has disconnected (https://github.com/grpc/grpc/issues/43360),
    200 bytes; a client without an API key could have many of them. So a call waits a little before its status is sent.

    Args:
        context: The call's.
        code: Its status; not OK.
        details: The message.
        metadata: Pairs that follow it.

    Raises:
        grpc.aio.AbortError: gRPC's way to leave the handler.
        asyncio.CancelledError: The client has disconnected.
    """
    await asyncio.sleep(_LATE_S if context.time_remaining() == 0 else _NOTICE_S)
    await context.abort(code, details, metadata)
    raise AssertionError("abort returned")


async def end_with(context: Context, status: status_pb2.Status) -> NoReturn:
    """End a call with a status that has details for programs; see ``end_call``."""
    found: Any = rpc_status.to_status(status)
    await end_call(context, found.code, found.details, found.trailing_metadata)
