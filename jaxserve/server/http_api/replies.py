"""Answers: JSON, the error object, and streams of events."""

import dataclasses
import logging
import math
import urllib.parse
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from jaxserve.errors import JaxserveError
from jaxserve.server.errors import status_of
from jaxserve.server.http_api.json_body import json_bytes

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
UNUSED_HEADER = "X-Jaxserve-Unknown-Fields"
_MAX_NAMED = 32
_EVENT_HEADERS = MappingProxyType({"cache-control": "no-cache", "x-accel-buffering": "no"})


class HttpError(JaxserveError):
    """An error of HTTP itself, which other surfaces do not have.

    Args:
        status: Status code.
        kind: ``type`` of the error object.
        message: What was expected and what came.
        headers: Of the answer.
    """

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] = MappingProxyType({})):
        self.status = status
        self.kind = kind
        self.headers = headers
        super().__init__(message)


@dataclasses.dataclass(frozen=True)
class EventStream:
    """An answer that comes piece by piece.

    Attributes:
        events: Whole events, several at a time perhaps. An error before the first is answered with its status.
        headers: Of the answer.
    """

    events: AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    async def send(self, send: Send) -> None:
        """Sends the events as they come; an error behind the first becomes an event.

        Raises:
            Exception: What goes wrong before the first event. Nothing was sent then.
        """
        async with aclosing(self.events) as events:
            piece = await anext(events, b"")
            response = Response(media_type="text/event-stream", headers={**_EVENT_HEADERS, **self.headers})
            headers = [(name, value) for name, value in response.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await _next_piece(events)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next_piece(events: AsyncGenerator[bytes, None]) -> bytes:
    """The next events, the last ones where something goes wrong; empty at the end."""
    try:
        return await anext(events, b"")
    except Exception as error:
        if not isinstance(error, JaxserveError):
            logger.exception("a stream failed")
        return event(error_object(error)) + DONE


def event(value: Any) -> bytes:
    """A value as an event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    """A value as an answer."""
    return Response(json_bytes(value), status, dict(headers), "application/json")


def error_object(error: Exception) -> dict[str, Any]:
    """``{"error": …}`` as OpenAI and vLLM have it; ``code`` is the status."""
    if isinstance(error, HttpError):
        return _object(str(error), error.kind, None, error.status)
    status = status_of(error)
    return _object(status.message, status.kind, status.parameter, status.http)


def _object(message: str, kind: str, parameter: str | None, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def error_reply(error: Exception) -> Response:
    """An error as an answer, with the headers that its status asks for."""
    if isinstance(error, HttpError):
        return json_reply(error_object(error), error.status, error.headers)
    status, headers = status_of(error), dict[str, str]()
    if status.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(status.retry_after_s)))
    if status.http == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_reply(error_object(error), status.http, headers)


def unused_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names the fields of a request which changed nothing; nothing where there are none.

    Names are percent-encoded, each cut to 64 characters; those beyond the thirty-second are counted.
    """
    if not names:
        return {}
    listed = [urllib.parse.quote(name[:64].encode("utf-8", "replace"), safe="._-[]") for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        listed.append(f"+{len(names) - _MAX_NAMED}")
    return {UNUSED_HEADER: ", ".join(listed)}
