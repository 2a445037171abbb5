"""What a handler knows of its call."""

import dataclasses
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc.aio

from jaxserve.server.auth import Caller

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = Any  # gRPC's own contexts are no instances of its class


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that was let in.

    Attributes:
        caller: Who calls.
        request_id: The server's name for it.
    """

    caller: Caller
    request_id: str


CURRENT_CALL: ContextVar[Call] = ContextVar("CURRENT_CALL")
"""The call that the running task handles; the interceptor sets it."""
