"""Errors of a server, and the one table of their HTTP and gRPC statuses."""

import dataclasses
from typing import Any

import grpc

from jaxserve.api.errors import (
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)


class UnauthenticatedError(JaxserveError):
    """No API key, or an unknown one."""


class PermissionDeniedError(JaxserveError):
    """The API key lacks the scope for this."""


class UnknownModelError(JaxserveError):
    """No model of that name."""

    parameter = "model"


class NotImplementedRequestError(JaxserveError):
    """A feature of the API that is not implemented."""

    def __init__(self, message: str, *, parameter: str | None = None):
        self.parameter = parameter
        super().__init__(message)


class UnavailableError(JaxserveError):
    """The server accepts no requests: it starts, drains, or its engine is being restarted."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        self.retry_after_s = retry_after_s
        super().__init__(message)


class OutOfMemoryError(JaxserveError):
    """What is admitted takes as many bytes of memory as the server, or the API key, may use for requests."""

    retry_after_s = 1.0


OUTCOMES = ("ok", "client_error", "failed", "overloaded", "cancelled", "deadline", "engine_dead")
"""How a request can end, as counters, the log and traces name it."""
SERVER_FAULTS = ("failed", "engine_dead")
"""Outcomes that an operator should look at."""


@dataclasses.dataclass(frozen=True)
class ErrorStatus:
    """How an error is reported.

    Attributes:
        http: HTTP status code.
        grpc: gRPC status code.
        kind: ``type`` of the HTTP error object, as vLLM spells it.
        reason: ``reason`` of gRPC's ErrorInfo.
        outcome: One of ``OUTCOMES``.
        message: For the client; without details of a bug in the server.
        parameter: The field that is wrong, if one is.
        retry_after_s: Seconds after which to retry; None if it makes no sense.
    """

    http: int
    grpc: grpc.StatusCode
    kind: str
    reason: str
    outcome: str
    message: str = "internal server error"
    parameter: str | None = None
    retry_after_s: float | None = None


MAX_MESSAGE_LENGTH = 2000
MAX_PARAMETER_LENGTH = 200

_Code = grpc.StatusCode
_BAD, _FAILED, _DEAD = "client_error", "failed", "engine_dead"
_INTERNAL = ErrorStatus(500, _Code.INTERNAL, "InternalServerError", "INTERNAL", _FAILED)
# The first class that an error is an instance of decides.
_TABLE: tuple[tuple[type[Exception], ErrorStatus], ...] = (
    (RequestFailedError, ErrorStatus(500, _Code.INTERNAL, "InternalServerError", "REQUEST_FAILED", _FAILED)),
    (RequestError, ErrorStatus(400, _Code.INVALID_ARGUMENT, "BadRequestError", "INVALID_REQUEST", _BAD)),
    (UnknownModelError, ErrorStatus(404, _Code.NOT_FOUND, "NotFoundError", "UNKNOWN_MODEL", _BAD)),
    (UnauthenticatedError, ErrorStatus(401, _Code.UNAUTHENTICATED, "AuthenticationError", "UNAUTHENTICATED", _BAD)),
    (
        PermissionDeniedError,
        ErrorStatus(403, _Code.PERMISSION_DENIED, "PermissionDeniedError", "PERMISSION_DENIED", _BAD),
    ),
    (OverloadedError, ErrorStatus(429, _Code.RESOURCE_EXHAUSTED, "RateLimitError", "OVERLOADED", "overloaded")),
    (
        OutOfMemoryError,
        ErrorStatus(503, _Code.RESOURCE_EXHAUSTED, "ServiceUnavailableError", "OUT_OF_MEMORY", "overloaded"),
    ),
    (UnavailableError, ErrorStatus(503, _Code.UNAVAILABLE, "ServiceUnavailableError", "UNAVAILABLE", _DEAD)),
    (EngineDeadError, ErrorStatus(503, _Code.UNAVAILABLE, "ServiceUnavailableError", "ENGINE_DEAD", _DEAD)),
    (DeadlineError, ErrorStatus(504, _Code.DEADLINE_EXCEEDED, "TimeoutError", "DEADLINE_EXCEEDED", "deadline")),
    (NotImplementedRequestError, ErrorStatus(501, _Code.UNIMPLEMENTED, "NotImplementedError", "NOT_IMPLEMENTED", _BAD)),
)


def status_of(error: BaseException) -> ErrorStatus:
    """Return how an error is reported; a bug in the server is a 500 without details."""
    for cls, status in _TABLE:
        if isinstance(error, cls):
            return dataclasses.replace(
                status,
                message=_cut(str(error), MAX_MESSAGE_LENGTH),
                parameter=_cut(getattr(error, "parameter", None), MAX_PARAMETER_LENGTH),
                retry_after_s=getattr(error, "retry_after_s", 1.0 if status.http in (429, 503) else None),
            )
    return _INTERNAL


def _cut(text: Any, limit: int) -> Any:
    """Cut what may contain the client's own text, which is not sent back whole."""
    return f"{text[:limit]}…" if isinstance(text, str) and len(text) > limit else text
