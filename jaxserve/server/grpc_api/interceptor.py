"""What every gRPC call goes through: authentication, limits of time, and errors as statuses."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from jaxserve.api.errors import DeadlineError, JaxserveError, OverloadedError, RequestError
from jaxserve.log_output import begin_log_fields, note_log_fields
from jaxserve.server.audit import audit
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError, status_of
from jaxserve.server.frontend import new_request_id
from jaxserve.server.grpc_api.calls import Context, end_call, end_with
from jaxserve.server.grpc_api.open_streams import Reflections, health_calls
from jaxserve.server.grpc_api.reader_pace import ReaderPace
from jaxserve.server.grpc_api.statuses import rich_status
from jaxserve.server.ledger import Ledger
from jaxserve.server.long_work import LONG_MESSAGE_BYTES
from jaxserve.server.tracing import LABEL_HEADER, remember_trace, remembered_headers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GrpcCall:
    """An authenticated call.

    Attributes:
        caller: Who made it.
        request_id: The server's name for it.
    """

    caller: Caller
    request_id: str


CURRENT_CALL: ContextVar[GrpcCall] = ContextVar("CURRENT_CALL")
"""The call that the running task handles; the interceptor sets it."""

ANYBODY = "anybody"
"""For methods that need no API key."""
KNOWN = "known"
"""For methods that need any valid key."""
ABSENT = "absent"
"""For methods of a standard protocol that this server does not implement."""

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
        "/jaxserve.v1.AdminService/Reshard": "admin",
        "/jaxserve.v1.AdminService/StartProfile": "admin",
        "/jaxserve.v1.AdminService/StopProfile": "admin",
        "/jaxserve.v1.AdminService/Abort": "admin",
    }
)
"""Method to the scope that a key needs; all other methods are denied."""

_NOBODY = Caller("nobody", frozenset())
_ADMINISTRATION = "/jaxserve.v1.AdminService/"
_HEALTH = "/grpc.health."
_REFLECTION = "/grpc.reflection."
_READING = ("/jaxserve.v1.AdminService/GetLoad",)
"""Methods of administration that change nothing."""
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates calls and turns their errors into statuses.

    Args:
        authenticator: Knows the keys.
        ledger: Limits the bytes of messages.
        stall_timeout_s: Seconds that a call's message may take to arrive; 0: no limit.
        max_calls: Most calls at a time of this server's own methods.
        min_bytes_per_s: Fewest bytes per second of a long response that a client must read; 0: no limit.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        ledger: Ledger,
        stall_timeout_s: float,
        max_calls: int = 1 << 20,
        min_bytes_per_s: float = 0.0,
    ):
        self._authenticator = authenticator
        self._min_bytes_per_s = min_bytes_per_s
        self._ledger = ledger
        self._stall_timeout_s = stall_timeout_s
        self._reflections = Reflections(stall_timeout_s)
        self._health_calls = health_calls(max_calls)
        self._max_calls = max_calls
        self._is_refusing = False
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def refuse_calls(self) -> None:
        """Reject new requests from now on."""
        self._is_refusing = True

    async def wait_idle(self) -> None:
        """Wait until no call of this server's own methods is in flight, and their responses are sent."""
        await self._is_idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, or one that rejects it."""
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or ACCESS.get(method) == ABSENT:
            return grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        metadata: Any = handler_call_details.invocation_metadata
        request_id = new_request_id("grpc")
        try:
            call = GrpcCall(self._caller(method, metadata), request_id)
        except JaxserveError as error:
            status, reason = rich_status(status_of(error), request_id), str(error)
            is_of_key = isinstance(error, UnauthenticatedError | PermissionDeniedError)
            name = self._name(metadata)

            async def refuse(requests: Any, context: Context) -> None:
                del requests  # not even read
                if is_of_key:
                    audit("grpc", method, name, reason, address=context.peer(), request_id=request_id)
                await end_with(context, status)

            return grpc.stream_stream_rpc_method_handler(refuse)
        if method.startswith(_REFLECTION):
            return self._reflections.guarded(handler)
        if method.startswith(_HEALTH):
            return _reading(handler, lambda behaviour: self._bounded(call, behaviour))
        remember_trace(metadata)

        def guard(behaviour: _Behaviour) -> _Behaviour:
            is_audited = method.startswith(_ADMINISTRATION) and method not in _READING
            return self._guarded(call, _audited(method, call, behaviour) if is_audited else behaviour)

        return _reading(handler, guard)

    def _caller(self, method: str, metadata: Any) -> Caller:
        """Return who makes a call.

        Raises:
            UnauthenticatedError: No valid key.
            UnavailableError: The server is shutting down.
            PermissionDeniedError: The key lacks the scope, or the method is denied to all.
        """
        needed = ACCESS.get(method)
        if needed == ANYBODY:
            return _NOBODY
        header = next((value for name, value in metadata if name == "authorization" and isinstance(value, str)), None)
        caller = self._authenticator.caller(header)
        if needed is None:
            raise PermissionDeniedError("no caller has access to this method")
        if needed != KNOWN:
            caller.check_scope(needed)
        if needed == "generate" and self._is_refusing:
            raise UnavailableError("the server is shutting down")
        return caller

    def _name(self, metadata: Any) -> str:
        """Return the name of a caller that was refused; ``-`` if its key is not known."""
        header = next((value for name, value in metadata if name == "authorization" and isinstance(value, str)), None)
        try:
            return self._authenticator.caller(header).name
        except UnauthenticatedError:
            return "-"

    def _guarded(self, call: GrpcCall, behaviour: _Behaviour) -> _Behaviour:
        async def respond(requests: Any, context: Context) -> Any:
            del requests  # to iterate would leave a generator, which waits for the event loop to end it
            CURRENT_CALL.set(call)
            begin_log_fields()
            note_log_fields(key=call.caller.name, request_id=call.request_id)
            request: Any = None
            num_bytes = 0
            self._num_running += 1
            self._is_idle.clear()
            note_end: Any = self._note_end
            context.add_done_callback(note_end)
            try:
                if self._num_running > self._max_calls:
                    raise OverloadedError(f"{self._max_calls} calls are in flight, the most that this server takes")
                request = await self._read(context)
                size = request.ByteSize()
                self._ledger.add_bytes(call.caller, size)
                num_bytes = size
                response = await behaviour(request, context)
                if response is not None:
                    self._hold(call, response.ByteSize(), context)
                return response
            except grpc.aio.BaseError:  # the call has ended
                raise
            except Exception as error:
                if not isinstance(error, JaxserveError):
                    label = remembered_headers().get(LABEL_HEADER)
                    logger.error("call %s (%r) of %s failed", call.request_id, label, call.caller.name, exc_info=error)
                descriptor = getattr(request, "DESCRIPTOR", None)
                status = rich_status(status_of(error), call.request_id, call.caller.name, descriptor)
            finally:
                self._ledger.remove_bytes(call.caller, num_bytes)
            # gRPC may keep how a call was aborted, and with it the error being handled and all that its frames hold.
            del request
            await end_with(context, status)

        return respond

    def _hold(self, call: GrpcCall, num_bytes: int, context: Context) -> None:
        """Count the bytes of a long response until it is sent, and end the call if its client reads too slowly."""
        if num_bytes <= LONG_MESSAGE_BYTES:
            return
        pace = ReaderPace(self._stall_timeout_s or math.inf, self._min_bytes_per_s)
        memory, name, limit_s = self._ledger.memory, call.caller.name, pace.limit_s(num_bytes)
        memory.note(name, num_bytes)
        task = asyncio.current_task()
        assert task is not None
        timer = None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, task.cancel)

        def release(context: Any) -> None:
            del context
            memory.note(name, -num_bytes)
            if timer is not None:
                timer.cancel()

        done: Any = release
        context.add_done_callback(done)

    def _bounded(self, call: GrpcCall, behaviour: _Behaviour) -> _Behaviour:
        """Return the behaviour of a health method: it needs no key, and does not delay the end of the server."""

        async def respond(requests: Any, context: Context) -> Any:
            del requests
            async with self._health_calls.admit(context):
                try:
                    request = await self._read(context)
                except JaxserveError as error:
                    status = rich_status(status_of(error), call.request_id)
                else:
                    return await behaviour(request, context)
                await end_with(context, status)

        return respond

    async def _read(self, context: Context) -> Any:
        """Return the only message of a call.

        Raises:
            RequestError: There is none, or it cannot be parsed.
            DeadlineError: It takes too long to arrive.
        """
        limit_s = self._stall_timeout_s or None
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(_drop_error)  # of one that goes on until the call ends
        try:
            async with asyncio.timeout(limit_s):
                request: Any = await asyncio.shield(reading)  # cancelled, it would never free the message
        except TimeoutError as error:
            raise DeadlineError(f"the request was not complete after {limit_s:g} s") from error
        if request is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise RequestError("the call has no message")
        if isinstance(request, RequestError):
            raise request
        return request

    def _note_end(self, context: Any) -> None:
        del context
        self._num_running -= 1
        if not self._num_running:
            self._is_idle.set()


async def _refuse_unknown(requests: Any, context: Context) -> None:
    del requests
    await end_call(context, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def _reading(handler: Any, guard: Callable[[_Behaviour], _Behaviour]) -> Any:
    """Return a handler that reads its message itself, so that it can time out; on the wire it is the same."""

    def parse(data: bytes) -> Any:
        """Return the message, or an error for the handler to raise: gRPC would report an unknown one."""
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return RequestError("the message cannot be parsed as the method's request")

    if handler.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, handler.unary_stream
    else:
        make, behaviour = grpc.stream_unary_rpc_method_handler, handler.unary_unary
    return make(guard(behaviour), parse, handler.response_serializer)


def _drop_error(reading: "asyncio.Future[Any]") -> None:
    """Look at a future's error, which asyncio would log otherwise."""
    if not reading.cancelled():
        reading.exception()


def _audited(method: str, call: GrpcCall, behaviour: _Behaviour) -> _Behaviour:
    """Return the behaviour of a method whose calls are in the audit log."""

    async def respond(request: Any, context: Context) -> Any:
        named = {"address": context.peer(), "request_id": call.request_id, "request": str(request).replace("\n", " ")}
        try:
            response = await behaviour(request, context)
        except BaseException as error:
            audit("grpc", method, call.caller.name, f"{type(error).__name__}: {error}", **named)
            raise
        audit("grpc", method, call.caller.name, "ok", **named)
        return response

    return respond
