"""HTTP responses: JSON, OpenAI's error object, and streams of server-sent events."""

import json
import logging
import math
import urllib.parse
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Send

from jaxserve.api.errors import JaxserveError
from jaxserve.api.text_files import escape_line_ends
from jaxserve.server.errors import status_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
UNUSED_HEADER = "X-Jaxserve-Unknown-Fields"
_MAX_NAMED = 32
_STREAM_HEADERS = MappingProxyType(
    {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}
)
_ERROR_TYPES = MappingProxyType(
    {404: "NotFoundError", 405: "MethodNotAllowedError", 408: "TimeoutError", 413: "RequestTooLargeError"}
)
ENCODER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
)
"""Of the JSON of all responses."""
_ENCODER = json.JSONEncoder(**ENCODER_OPTIONS)


def json_text(value: Any) -> str:
    """Return compact JSON; raise ValueError for NaN and Infinity, which would be a bug of the server.

    Unicode's own line ends are escaped, as some clients split streams of events at them.
    """
    return escape_line_ends(_ENCODER.encode(value))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    """Return a JSON response; what UTF-8 cannot encode becomes a question mark."""
    return Response(json_text(value).encode("utf-8", "replace"), status, dict(headers), "application/json")


def error_object(error: Exception) -> dict[str, Any]:
    """Return ``{"error": ...}`` in the form of OpenAI and vLLM; ``code`` is the HTTP status."""
    if isinstance(error, HTTPException):
        message, parameter, code = error.detail, None, error.status_code
        kind = _ERROR_TYPES.get(code, "BadRequestError")
    else:
        status = status_of(error)
        message, kind, parameter, code = status.message, status.kind, status.parameter, status.http
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def error_response(error: Exception) -> Response:
    """Return the response to a request that failed, with the headers that its status needs."""
    body = error_object(error)
    code, headers = body["error"]["code"], dict[str, str]()
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
    elif (retry_after_s := status_of(error).retry_after_s) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body, code, headers)


async def send_events(events: AsyncGenerator[bytes, None], headers: Mapping[str, str], send: Send) -> None:
    """Send a stream of server-sent events.

    Args:
        events: Whole events. An error before the first is raised, so that it can become the response's status; a later
            one becomes the last event.
        headers: More headers of the response.
        send: Of the ASGI application.
    """
    async with aclosing(events):
        event = await anext(events, b"")
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in {**_STREAM_HEADERS, **headers}.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        while event:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            try:
                event = await anext(events, b"")
            except Exception as error:
                if not isinstance(error, JaxserveError):
                    logger.exception("a stream failed")
                event = f"data: {json_text(error_object(error))}\n\n".encode("utf-8", "replace") + DONE
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def unused_fields_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names the fields of a request that had no effect; empty if there are none.

    Names are percent-encoded and cut to 64 characters; those after the 32nd are only counted.
    """
    if not names:
        return {}
    listed = [urllib.parse.quote(name[:64].encode("utf-8", "replace"), safe="._-[]") for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        listed.append(f"+{len(names) - _MAX_NAMED}")
    return {UNUSED_HEADER: ", ".join(listed)}
