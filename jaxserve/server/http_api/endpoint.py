"""What every route goes through: who calls, the body, the answer or the error, and a caller who leaves meanwhile."""

import asyncio
import dataclasses
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.fields import Check, Fields, read_fields
from jaxserve.server.http_api.json_body import read_json
from jaxserve.server.http_api.replies import EventStream, HttpError, error_reply
from jaxserve.server.tracing import remember_trace

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

CLIENT_GONE = "jaxserve.client_gone"
"""Key of a connection's scope, True once the caller has left."""
LABEL = "jaxserve.request_label"
"""Key of a connection's scope: the caller's own name for a request, for the log alone."""


class ClientGoneError(JaxserveError):
    """The caller left; nobody reads an answer."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A request as handlers get it.

    Attributes:
        frontend: The front end.
        caller: Who calls.
        request: Path and headers.
        raw: The body.
    """

    frontend: Frontend
    caller: Caller
    request: Request
    raw: bytes

    @functools.cached_property
    def body(self) -> dict[str, Any]:
        """The body.

        Raises:
            RequestError: No JSON object.
        """
        return read_json(self.raw)

    def fields(self, table: Mapping[str, Check], needs: str | None = None) -> Fields:
        """The body's fields.

        Raises:
            RequestError: No JSON object, or a field that is wrong, missing or (if the server is strict) unknown.
        """
        return read_fields(self.body, table, needs=needs, is_strict=self.frontend.config.strict)

    @property
    def timeout_s(self) -> float | None:
        """Seconds that the request may take, by its header ``X-Request-Timeout``.

        Raises:
            RequestError: No number above 0.
        """
        written = self.request.headers.get("x-request-timeout")
        if written is None:
            return None
        try:
            seconds = float(written)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            message = f"the header X-Request-Timeout must be a number of seconds above 0, got {written[:40]!r}"
            raise RequestError(message, parameter="X-Request-Timeout", value=written)
        return seconds


Handler = Callable[[Call], Awaitable[Response | EventStream]]


class Endpoint:
    """A handler as an ASGI application.

    Args:
        frontend: The front end.
        handler: Answers.
        scope: What a caller's key must allow: ``generate`` or ``metrics``; None: anybody may call; "": any key will do.
        has_body: Whether requests carry JSON.
    """

    def __init__(self, frontend: Frontend, handler: Handler, scope: str | None, *, has_body: bool = False):
        self._frontend = frontend
        self._handler = handler
        self._has_body = has_body
        self.required_scope = scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        request, has_started = Request(scope, receive), False
        remember_trace(request.headers)

        async def noting_send(message: Any) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            caller = self._caller(request)
            raw = await self._body(request) if self._has_body else b""
            call = Call(self._frontend, caller, request, raw)
            await until_gone(receive, self._answer(call, scope, receive, noting_send))
        except (ClientGoneError, ClientDisconnect):
            scope[CLIENT_GONE] = True
        except Exception as error:
            if has_started:
                raise
            if not isinstance(error, JaxserveError):
                logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_reply(error)(scope, receive, send)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._handler(call)
        if isinstance(reply, EventStream):
            await reply.send(send)
        else:
            await reply(scope, receive, send)

    def _caller(self, request: Request) -> Caller:
        if self.required_scope is None:
            return Caller("anonymous", frozenset())
        caller = self._frontend.authenticator.caller(request.headers.get("authorization"))
        if self.required_scope:
            caller.check_scope(self.required_scope)
        return caller

    async def _body(self, request: Request) -> bytes:
        """The whole body, if it is JSON and not too long.

        Raises:
            HttpError: It is, or it takes too long to come.
        """
        config = self._frontend.config
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = "Unsupported Media Type: only 'application/json' is allowed"
            raise HttpError(400, "BadRequestError", message)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > config.max_request_bytes:
            # Who waits for a go-ahead sends no body now; else the rest is read and dropped, so that the answer arrives.
            headers = {"Connection": "close"} if "expect" in request.headers else {}
            raise _too_long(config.max_request_bytes, headers)
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(config.stall_timeout or None) as limit:
                async for part in request.stream():
                    limit.reschedule(None if limit.when() is None else _later(config.stall_timeout))
                    size += len(part)
                    if size > config.max_request_bytes:
                        raise _too_long(config.max_request_bytes)
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not come within {config.stall_timeout:g} s"
            raise HttpError(408, "TimeoutError", message, {"Connection": "close"}) from None
        return b"".join(parts)


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Awaits work for as long as the caller is there.

    Raises:
        ClientGoneError: The caller left, and the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the caller has left")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        # Waits until what the work held is given back.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def _too_long(limit: int, headers: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    return HttpError(413, "RequestTooLargeError", f"the body must have at most {limit} bytes", headers)
