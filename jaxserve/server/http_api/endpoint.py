"""What every HTTP route goes through: authentication, the request's body, errors, and clients that disconnect."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.errors import JaxserveError
from jaxserve.log_output import note_log_fields
from jaxserve.server.audit import audit
from jaxserve.server.auth import Caller
from jaxserve.server.errors import PermissionDeniedError, UnauthenticatedError
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.fields import Check, read_fields, read_json
from jaxserve.server.http_api.responses import error_response
from jaxserve.server.long_work import LONG_MESSAGE_BYTES
from jaxserve.server.tracing import remember_trace

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_NOBODY = Caller("anonymous", frozenset())
_UNKNOWN = Caller("-", frozenset())

DISCONNECTED = "jaxserve.disconnected"
"""Key of a connection's scope, True once the client has disconnected."""
STATUS = "jaxserve.status"
"""Key of a connection's scope: the status code, once the response has begun."""
LABEL = "jaxserve.request_label"
"""Key of a connection's scope: the client's own name for a request, only shown in the log."""


@dataclasses.dataclass
class HttpCall:
    """A request as handlers get it.

    Attributes:
        frontend: The front end.
        caller: Who sent it.
        request: Path and headers.
        raw: The body as it came; empty for GET.
        held: Closed once the response is sent.
        unused: Names of fields without effect.
    """

    frontend: Frontend
    caller: Caller
    request: Request
    raw: bytearray
    held: contextlib.ExitStack
    unused: list[str] = dataclasses.field(default_factory=list[str])

    @functools.cached_property
    def body(self) -> dict[str, Any]:
        """The parsed body; parse it in ``read``.

        Raises:
            RequestError: It is not a JSON object.
        """
        return read_json(self.raw)

    def hold(self, num_bytes: int) -> None:
        """Count bytes in the ledger until the response is sent."""
        self.held.enter_context(self.frontend.ledger.memory.held(self.caller.name, num_bytes))

    async def read(self, make: Callable[[], Result]) -> Result:
        """Call what parses or checks the body, or measures what was made of it: on a thread if the body is long."""
        return await self.frontend.long_work.read(self.caller.turn, len(self.raw), make)

    def fields(self, table: Mapping[str, Check], needs: str) -> dict[str, Any]:
        """Check the body's fields, and that the model it names exists; note those without effect.

        Raises:
            RequestError: The body is not JSON, or a field is wrong, missing or (if the server is strict) unknown.
            UnknownModelError: It names another model.
        """
        fields, self.unused = read_fields(self.body, table, needs=needs, is_strict=self.frontend.config.strict)
        self.frontend.check_model(fields.get("model"))
        return fields


Handler = Callable[[HttpCall], Awaitable[ASGIApp]]


class Endpoint:
    """A handler as an ASGI application.

    Args:
        frontend: The front end.
        handler: Makes the response.
        scope: What the caller's key must allow: ``generate`` or ``metrics``; None: no key is needed; "": any valid key.
        has_body: Whether requests carry JSON.
    """

    def __init__(self, frontend: Frontend, handler: Handler, scope: str | None, *, has_body: bool = False):
        self._frontend = frontend
        self._handler = handler
        self._scope = scope
        self._has_body = has_body
        config = frontend.config
        self._stall_s, self._body_s = config.stall_timeout or math.inf, config.body_timeout or math.inf
        self._least_rate = config.min_transfer_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        request, raw, held = Request(scope, receive), bytearray(), contextlib.ExitStack()
        remember_trace(request.headers)

        async def respond() -> None:
            response = await self._handler(HttpCall(self._frontend, caller, request, raw, held))
            await response(scope, receive, send)

        caller = _NOBODY if self._scope is None else _UNKNOWN
        try:
            if self._scope is not None:
                caller = self._frontend.authenticator.caller(request.headers.get("authorization"))
                if self._scope:
                    caller.check_scope(self._scope)
                note_log_fields(key=caller.name)
            if self._has_body:
                await self._read_body(caller, request, raw)
                self._frontend.ledger.check_room(caller)
            await until_disconnect(receive, respond())
        except ClientDisconnect:
            scope[DISCONNECTED] = True
        except Exception as error:
            if STATUS in scope:
                raise
            if isinstance(error, UnauthenticatedError | PermissionDeniedError):
                client = scope.get("client")
                address = f"{client[0]}:{client[1]}" if client else None
                audit("http", f"{scope['method']} {scope['path']}", caller.name, str(error), address=address)
            if not isinstance(error, JaxserveError | HTTPException):
                logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(error)(scope, receive, send)
        finally:
            held.close()
            self._frontend.ledger.remove_bytes(caller, len(raw))

    async def _read_body(self, caller: Caller, request: Request, raw: bytearray) -> None:
        """Append the body to ``raw``, whose bytes are reserved in the ledger.

        Raises:
            OutOfMemoryError: The requests in flight take too many bytes.
            OverloadedError: It is long, and there is no room for a request of this caller.
            HTTPException: It is not declared to be JSON, is compressed, is too long, or stalls.
        """
        config = self._frontend.config
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(400, "Unsupported Media Type: only 'application/json' is allowed")
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            message = f"the Content-Encoding {coding[:40]!r} is not supported; send the body without one"
            raise HTTPException(415, message, {"Accept-Encoding": "identity"})
        length = request.headers.get("content-length", "0")
        num_bytes = int(length[:20]) if length.isdecimal() else 0
        if num_bytes > config.max_request_bytes:
            # A client that expects "100 Continue" has not sent the body; any other body is drained by the listener, so
            # that the client can read the response.
            raise self._too_long({"Connection": "close"} if "expect" in request.headers else {})
        loop, ledger = asyncio.get_running_loop(), self._frontend.ledger
        if num_bytes > LONG_MESSAGE_BYTES:
            ledger.check_room(caller)  # the listener drops what comes faster than this would read it
        begin_s = latest_s = loop.time()
        try:
            async with asyncio.timeout_at(self._body_deadline_s(begin_s, latest_s, 0)) as limit:
                async for part in request.stream():
                    latest_s = loop.time()
                    limit.reschedule(self._body_deadline_s(begin_s, latest_s, len(raw) + len(part)))
                    ledger.add_bytes(caller, len(part))
                    raw += part
                    if len(raw) > config.max_request_bytes:
                        raise self._too_long({})
        except TimeoutError:
            message = f"the body stalled for {config.stall_timeout:g} s"
            if not config.stall_timeout or loop.time() - latest_s < config.stall_timeout:
                message = (
                    f"the body arrived too slowly: {len(raw)} bytes in {loop.time() - begin_s:.3g} s; limits: "
                    f"{config.body_timeout:g} s (body_timeout), {config.min_transfer_rate} bytes per second "
                    "(min_transfer_rate)"
                )
            raise HTTPException(408, message, {"Connection": "close"}) from None

    def _body_deadline_s(self, begin_s: float, latest_s: float, num_bytes: int) -> float | None:
        """Return the time by which more of a body must have arrived; None: no limit.

        Args:
            begin_s: When it began.
            latest_s: When its latest part arrived.
            num_bytes: Bytes so far.
        """
        sending_s = num_bytes / self._least_rate if self._least_rate else math.inf
        first_s = min(latest_s + self._stall_s, begin_s + self._stall_s + sending_s, begin_s + self._body_s)
        return first_s if first_s < math.inf else None

    def _too_long(self, headers: Mapping[str, str]) -> HTTPException:
        return HTTPException(
            413, f"the body must have at most {self._frontend.config.max_request_bytes} bytes", headers
        )


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await work, and cancel it when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        # Wait until the work has released what it held.
        await asyncio.gather(task, gone, return_exceptions=True)
        # Else an error, whose traceback has this frame, and its task would be garbage with all that they hold.
        del task, gone
