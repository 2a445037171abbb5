"""Converts statuses of calls to jaxserve's errors."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from jaxserve.api.errors import (
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.server.errors import (
    NotImplementedRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
)

_DETAILS_KEY = "grpc-status-details-bin"
_WRAPPERS = ("request", "sampling_params", "messages")
"""Leading fields of a parameter's path in a message, which the exception's field omits."""

# By the ErrorInfo reason of jaxserve's servers; by status code if a proxy in between responded.
_BY_REASON: Mapping[str, type[JaxserveError]] = MappingProxyType(
    {"ENGINE_DEAD": EngineDeadError, "REQUEST_FAILED": RequestFailedError}
)
_BY_CODE: Mapping[grpc.StatusCode, type[JaxserveError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: RequestError,
        grpc.StatusCode.OUT_OF_RANGE: RequestError,
        grpc.StatusCode.NOT_FOUND: UnknownModelError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
        grpc.StatusCode.UNIMPLEMENTED: NotImplementedRequestError,
    }
)
Detail = TypeVar("Detail", bound=Message)


def error_of(failure: Any) -> JaxserveError:
    """Convert a failed call to an exception.

    Args:
        failure: The exception of gRPC's sync or asyncio API: a ``grpc.RpcError`` with ``code()``, ``details()`` and
            ``trailing_metadata()``.

    Returns:
        ``RequestError`` with the parameter's name, ``OverloadedError`` and ``UnavailableError`` with the seconds after
        which to retry, and so on; a plain ``JaxserveError`` for unexpected failures.
    """
    code, text = failure.code(), str(failure.details() or "")
    status = _rich_status(failure.trailing_metadata() or ())
    reason = _found(status, error_details_pb2.ErrorInfo()).reason
    cls = _BY_REASON.get(reason) or _BY_CODE.get(code)
    if cls is OverloadedError and not reason and "larger than max" in text:
        cls = RequestError  # gRPC's own status for a message that is too long
    if cls is None:
        named = _found(status, error_details_pb2.RequestInfo()).request_id
        return JaxserveError(f"{code.name}: {text}" + (f" (request {named})" if named else ""))
    retry = _found(status, error_details_pb2.RetryInfo())
    if cls in (OverloadedError, UnavailableError):
        delay_s = retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else 1.0
        return OverloadedError(text, retry_after_s=delay_s) if cls is OverloadedError else _unavailable(text, delay_s)
    error = cls(text)
    if isinstance(error, RequestError | NotImplementedRequestError):
        violations = _found(status, error_details_pb2.BadRequest()).field_violations
        error.parameter = _parameter(violations[0].field) if violations and violations[0].field else None
    return error


@contextlib.contextmanager
def errors_of_calls() -> Iterator[None]:
    """Convert gRPC failures in the block.

    Raises:
        JaxserveError: The result of ``error_of``.
    """
    try:
        yield
    except grpc.RpcError as failure:
        raise error_of(failure) from failure


def _unavailable(text: str, delay_s: float) -> UnavailableError:
    return UnavailableError(text, retry_after_s=delay_s)


def _parameter(path: str) -> str:
    names = path.split(".")
    while len(names) > 1 and names[0] in _WRAPPERS:
        del names[0]
    return ".".join(names)


def _rich_status(metadata: Iterable[Any]) -> status_pb2.Status:
    """Return Google's rich status from the metadata; empty if it is missing or cannot be parsed."""
    for key, value in metadata:
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _found(status: status_pb2.Status, detail: Detail) -> Detail:
    """Return the detail of that type; empty if there is none."""
    for packed in status.details:
        if packed.Unpack(detail):
            break
    return detail
