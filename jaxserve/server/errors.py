"""What goes wrong in a server, and the one table of statuses that both surfaces answer with."""

import dataclasses
from typing import Any

import grpc

from jaxserve.errors import (
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)


class UnauthenticatedError(JaxserveError):
    """No API key, or one that the server does not know."""


class PermissionDeniedError(JaxserveError):
    """The API key is known and may not do this."""


class UnknownModelError(JaxserveError):
    """No model of that name."""

    parameter = "model"


class NotImplementedRequestError(JaxserveError):
    """A feature of the protocol that nothing here does.

    Args:
        message: What is missing.
        parameter: The field that asked for it.
    """

    def __init__(self, message: str, *, parameter: str | None = None):
        self.parameter = parameter
        super().__init__(message)


class UnavailableError(JaxserveError):
    """The server takes no requests: it starts, drains, or its engine is being restarted.

    Args:
        message: Why.
        retry_after_s: Seconds after which another try makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        self.retry_after_s = retry_after_s
        super().__init__(message)


@dataclasses.dataclass(frozen=True)
class ErrorStatus:
    """How an error is answered.

    Attributes:
        http: Status code.
        grpc: Status code.
        kind: ``type`` of the HTTP error object, as vLLM spells it.
        reason: ``reason`` of gRPC's ErrorInfo.
        message: What is told; nothing of the inside where the server is at fault.
        parameter: The field at fault, if one is.
        retry_after_s: Seconds after which another try makes sense; None where none does.
    """

    http: int
    grpc: grpc.StatusCode
    kind: str
    reason: str
    message: str
    parameter: str | None = None
    retry_after_s: float | None = None


MAX_MESSAGE_LENGTH = 2000
MAX_PARAMETER_LENGTH = 200

# The first class that an error is an instance of decides: http, grpc, kind, reason.
_TABLE: tuple[tuple[type[Exception], int, grpc.StatusCode, str, str], ...] = (
    (RequestFailedError, 500, grpc.StatusCode.INTERNAL, "InternalServerError", "REQUEST_FAILED"),
    (RequestError, 400, grpc.StatusCode.INVALID_ARGUMENT, "BadRequestError", "INVALID_REQUEST"),
    (UnknownModelError, 404, grpc.StatusCode.NOT_FOUND, "NotFoundError", "UNKNOWN_MODEL"),
    (UnauthenticatedError, 401, grpc.StatusCode.UNAUTHENTICATED, "AuthenticationError", "UNAUTHENTICATED"),
    (PermissionDeniedError, 403, grpc.StatusCode.PERMISSION_DENIED, "PermissionDeniedError", "PERMISSION_DENIED"),
    (OverloadedError, 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "RateLimitError", "OVERLOADED"),
    (UnavailableError, 503, grpc.StatusCode.UNAVAILABLE, "ServiceUnavailableError", "UNAVAILABLE"),
    (EngineDeadError, 503, grpc.StatusCode.UNAVAILABLE, "ServiceUnavailableError", "ENGINE_DEAD"),
    (DeadlineError, 504, grpc.StatusCode.DEADLINE_EXCEEDED, "TimeoutError", "DEADLINE_EXCEEDED"),
    (NotImplementedRequestError, 501, grpc.StatusCode.UNIMPLEMENTED, "NotImplementedError", "NOT_IMPLEMENTED"),
)


def _cut(text: Any, limit: int) -> Any:
    """What a client sent may be part of a message, and is not sent back whole."""
    return f"{text[:limit]}…" if isinstance(text, str) and len(text) > limit else text


def status_of(error: BaseException) -> ErrorStatus:
    """How an error is answered; one that nobody foresaw is a 500 that says nothing of the inside."""
    for cls, http, code, kind, reason in _TABLE:
        if isinstance(error, cls):
            return ErrorStatus(
                http,
                code,
                kind,
                reason,
                _cut(str(error), MAX_MESSAGE_LENGTH),
                _cut(getattr(error, "parameter", None), MAX_PARAMETER_LENGTH),
                getattr(error, "retry_after_s", 1.0 if http in (429, 503) else None),
            )
    return ErrorStatus(500, grpc.StatusCode.INTERNAL, "InternalServerError", "INTERNAL", "internal server error")
