"""Errors as gRPC statuses: a code, a message, and ``google.rpc`` details for programs."""

import re
from collections.abc import Iterator, Sequence
from types import MappingProxyType

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jaxserve.server.errors import ErrorStatus

DOMAIN = "jaxserve.dev"
"""The domain of the reasons in ``google.rpc.ErrorInfo``."""
MAX_MESSAGE_BYTES = 1024
"""Longer messages are cut: with all details they must fit into the 8 KiB of metadata that clients accept."""
_MAX_FIELD_LENGTH = 200
_OTHER_NAMES = MappingProxyType(
    {"tokens": "token_ids", "return_token_strs": "return_token_strings", "input_tokens": "prompt"}
)
"""Parameter names of the HTTP API, and the fields of gRPC messages that they stand for."""


def rich_status(
    found: ErrorStatus, request_id: str, caller: str = "", request: Descriptor | None = None
) -> status_pb2.Status:
    """Return the status of a call that failed.

    Args:
        found: The status of the error.
        request_id: The server's name for the call.
        caller: Whose limit was exceeded, if one was.
        request: The type of the call's message, in which the wrong field is looked up.
    """
    message = _cut(found.message)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=found.reason, domain=DOMAIN)]
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    if found.grpc is grpc.StatusCode.INVALID_ARGUMENT or found.parameter is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(description=message)
        if found.parameter is not None:
            violation.field = field_path(request, found.parameter)[:_MAX_FIELD_LENGTH]
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if found.grpc is grpc.StatusCode.RESOURCE_EXHAUSTED:
        failure = error_details_pb2.QuotaFailure.Violation(subject=caller, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[failure]))
    if found.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(found.retry_after_s * 1000))
        details.append(retry)
    status = status_pb2.Status(code=found.grpc.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def field_path(request: Descriptor | None, parameter: str) -> str:
    """Return the path of a parameter in a message, such as ``request.sampling_params.temperature`` for ``temperature``.

    Args:
        request: The message's type; None if there was no message.
        parameter: As errors name it; what follows its first dot or bracket is kept.

    Returns:
        The path, or the parameter itself if no field has that name.
    """
    root = re.split(r"[.\[]", parameter, maxsplit=1)[0]
    rest = parameter.removeprefix(root)
    root = _OTHER_NAMES.get(root, root)
    for path in _paths(request) if request is not None else ():
        if path[-1] in (root, f"{root}_json"):
            return ".".join(path) + rest
    return parameter


def _paths(message: Descriptor) -> Iterator[Sequence[str]]:
    """Yield the paths of all fields and oneofs, those nearest to the root first."""
    level: list[tuple[tuple[str, ...], Descriptor]] = [((), message)]
    while level:
        deeper: list[tuple[tuple[str, ...], Descriptor]] = []
        for prefix, found in level:
            yield from (((*prefix, one.name)) for one in found.oneofs)
            for field in found.fields:
                yield (*prefix, field.name)
                if field.message_type is not None and not field.is_repeated:
                    deeper.append(((*prefix, field.name), field.message_type))
        level = deeper


def _cut(message: str) -> str:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
