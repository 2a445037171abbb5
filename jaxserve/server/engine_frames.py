"""Frames between front end and engine process: a length of four bytes, big-endian, and a message."""

import struct
from types import MappingProxyType

from google.protobuf.message import Message

from jaxserve.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2

HEADER = struct.Struct(">I")
MAX_TO_ENGINE_BYTES = 64 << 20
"""Longest frame to the engine process: a request, which the surfaces keep much shorter."""
MAX_FROM_ENGINE_BYTES = 1 << 30
"""Longest frame from the engine process: logprobs of a long prompt may take much."""

# The first class that an error is an instance of decides.
_KINDS: tuple[tuple[type[Exception], engine_pb2.ErrorKind], ...] = (
    (RequestFailedError, engine_pb2.ERROR_KIND_INTERNAL),
    (RequestError, engine_pb2.ERROR_KIND_REQUEST),
    (OverloadedError, engine_pb2.ERROR_KIND_OVERLOADED),
    (DeadlineError, engine_pb2.ERROR_KIND_DEADLINE),
    (EngineDeadError, engine_pb2.ERROR_KIND_ENGINE_DEAD),
    (ConfigError, engine_pb2.ERROR_KIND_CONFIG),
)
_CLASSES: MappingProxyType[int, type[JaxserveError]] = MappingProxyType({kind: cls for cls, kind in _KINDS})


class FrameError(ValueError):
    """A frame that is longer than any may be."""


def packed(message: Message, limit_bytes: int) -> bytes:
    """A message as a frame.

    Raises:
        FrameError: It is too long.
    """
    body = message.SerializeToString()
    return HEADER.pack(checked_length(len(body), limit_bytes)) + body


def checked_length(num_bytes: int, limit_bytes: int) -> int:
    """The length of a frame's message.

    Raises:
        FrameError: It is too long.
    """
    if num_bytes > limit_bytes:
        raise FrameError(f"a frame may have {limit_bytes} bytes, got {num_bytes}")
    return num_bytes


def error_to_proto(error: BaseException) -> engine_pb2.Error:
    """An error as a message; one that nobody foresaw is internal."""
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), engine_pb2.ERROR_KIND_INTERNAL)
    message = engine_pb2.Error(kind=kind, message=_sendable(str(error)) or type(error).__name__)
    parameter = getattr(error, "parameter", None)
    if isinstance(parameter, str):
        message.parameter = _sendable(parameter)
    return message


def _sendable(text: str) -> str:
    """A text without the halves of characters that templates may put into an error."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_from_proto(message: engine_pb2.Error) -> JaxserveError:
    """What ``error_to_proto`` was given, as far as it is one of ours."""
    error = _CLASSES.get(message.kind, RequestFailedError)(message.message)
    if isinstance(error, RequestError) and message.HasField("parameter"):
        error.parameter = message.parameter  # the text has it already
    return error
