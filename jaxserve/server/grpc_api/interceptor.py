"""Around every call: who may make it, and how its errors are answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from jaxserve.errors import DeadlineError, JaxserveError, RequestError
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.errors import PermissionDeniedError, UnavailableError, status_of
from jaxserve.server.frontend import new_request_id
from jaxserve.server.grpc_api.context import CURRENT_CALL, Call, Context
from jaxserve.server.grpc_api.statuses import abort, rich_status
from jaxserve.server.tracing import LABEL_HEADER, remember_trace, remembered_headers

logger = logging.getLogger(__name__)

ANYBODY = "anybody"
"""For methods that need no key."""
KNOWN = "known"
"""For methods that any key is good for."""
ABSENT = "absent"
"""For methods that a protocol has and this server has not."""

ACCESS = MappingProxyType(
    {
        "/grpc.health.v1.Health/Check": ANYBODY,
        "/grpc.health.v1.Health/List": ABSENT,
        "/grpc.health.v1.Health/Watch": ANYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": KNOWN,
        "/jaxserve.v1.GenerationService/Generate": "generate",
        "/jaxserve.v1.GenerationService/StreamGenerate": "generate",
        "/jaxserve.v1.TokenizationService/Tokenize": "generate",
        "/jaxserve.v1.TokenizationService/Detokenize": "generate",
        "/jaxserve.v1.TokenizationService/ApplyChatTemplate": "generate",
        "/jaxserve.v1.ModelService/ListModels": "generate",
        "/jaxserve.v1.ModelService/GetModel": "generate",
        "/jaxserve.v1.AdminService/GetLoad": "admin",
        "/jaxserve.v1.AdminService/Drain": "admin",
        "/jaxserve.v1.AdminService/ResetPrefixCache": "admin",
        "/jaxserve.v1.AdminService/StartProfile": "admin",
        "/jaxserve.v1.AdminService/StopProfile": "admin",
        "/jaxserve.v1.AdminService/Abort": "admin",
    }
)
"""Method -> the scope that a caller's key needs; nobody may call any other."""

_NOBODY = Caller("nobody", frozenset())
_LATE_S = 1.0  # after a call's time, in which gRPC ends it
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in by their keys, and answers what goes wrong in them.

    Args:
        authenticator: Knows the keys.
        stall_timeout_s: Seconds that a call's message may be on its way; 0: no limit.
    """

    def __init__(self, authenticator: Authenticator, stall_timeout_s: float):
        self._authenticator = authenticator
        self._stall_timeout_s = stall_timeout_s
        self._is_refusing = False
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def refuse_calls(self) -> None:
        """Lets no more requests in."""
        self._is_refusing = True

    async def wait_idle(self) -> None:
        """Until none of our own methods runs, and the answers of those that ran are sent."""
        await self._is_idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, or one that refuses it. Methods that there are not stay UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or ACCESS.get(method) == ABSENT:
            return None
        metadata: Any = handler_call_details.invocation_metadata
        call = Call(_NOBODY, new_request_id("grpc"))
        try:
            call = Call(self._caller(method, metadata), call.request_id)
        except JaxserveError as error:
            return _refusal(call, error)
        if not method.startswith("/jaxserve."):
            return handler
        remember_trace(metadata)
        # Handlers of streams read their messages themselves, so that they can give up; on the wire it is the same.
        if handler.response_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behaviour = grpc.stream_unary_rpc_method_handler, handler.unary_unary
        return make(self._answering(call, behaviour), _reading(handler), handler.response_serializer)

    def _caller(self, method: str, metadata: Any) -> Caller:
        """Who makes a call.

        Raises:
            UnauthenticatedError: There is no key that is known.
            UnavailableError: The server stops.
            PermissionDeniedError: The key does not fit, or nobody may call the method.
        """
        needed = ACCESS.get(method)
        if needed == ANYBODY:
            return _NOBODY
        header = next((value for name, value in metadata if name == "authorization" and isinstance(value, str)), None)
        caller = self._authenticator.caller(header)
        if needed is None:
            raise PermissionDeniedError("nobody may call this method")
        if needed != KNOWN:
            caller.check_scope(needed)
        if needed == "generate" and self._is_refusing:
            raise UnavailableError("the server is shutting down")
        return caller

    def _answering(self, call: Call, behaviour: _Behaviour) -> _Behaviour:
        async def answer(requests: Any, context: Context) -> Any:
            del requests  # to iterate would leave a generator, which waits for the event loop to end it
            CURRENT_CALL.set(call)
            request: Any = None
            self._num_running += 1
            self._is_idle.clear()
            note_end: Any = self._note_end
            context.add_done_callback(note_end)
            try:
                request = await self._read(context)
                if isinstance(request, RequestError):
                    raise request
                return await behaviour(request, context)
            except grpc.aio.BaseError:  # the call has ended
                raise
            except Exception as error:
                status = _status(call, error, getattr(request, "DESCRIPTOR", None))
            # gRPC may keep how a call was aborted, and with it the error being handled and all that its frames hold.
            del request
            if context.time_remaining() == 0:
                await asyncio.sleep(_LATE_S)  # gRPC ends the call, and would never free a status that comes after
            await abort(context, status)

        return answer

    async def _read(self, context: Context) -> Any:
        """The only message of a call.

        Raises:
            RequestError: There is none.
            DeadlineError: It takes too long to come.
        """
        limit_s = self._stall_timeout_s or None
        try:
            async with asyncio.timeout(limit_s):
                request = await asyncio.shield(context.read())  # cut off, it would never free the message
        except TimeoutError as error:
            raise DeadlineError(f"the request was not complete after {limit_s:g} s") from error
        if request is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise RequestError("the call has no message")
        return request

    def _note_end(self, context: Any) -> None:
        del context
        self._num_running -= 1
        if not self._num_running:
            self._is_idle.set()


def _status(call: Call, error: Exception, request: Descriptor | None) -> status_pb2.Status:
    """What a call ends with that has failed."""
    if not isinstance(error, JaxserveError):
        label = remembered_headers().get(LABEL_HEADER)
        logger.error("call %s (%r) of %s failed", call.request_id, label, call.caller.name, exc_info=error)
    return rich_status(status_of(error), call.request_id, call.caller.name, request)


def _refusal(call: Call, error: JaxserveError) -> Any:
    """A handler that does not even read the request."""

    async def refuse(requests: Any, context: Context) -> None:
        del requests
        await abort(context, rich_status(status_of(error), call.request_id))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _reading(handler: Any) -> Callable[[bytes], Any]:
    """Reads a message; gives an error, which the handler raises, where that cannot be done."""

    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return RequestError("the message cannot be read as the method's request")

    return read
