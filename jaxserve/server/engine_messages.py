"""Messages between a server's front end and its engine process, and the frames they travel in.

A frame is a length of four bytes, big-endian, and a pickled message. Pickle is safe here, and used nowhere else: both
ends are processes of one version and one user, joined by a socket pair that no other process can reach, and what
clients send travels inside messages as plain strings, numbers, lists and dictionaries.
"""

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_request import EngineRequest

HEADER = struct.Struct(">I")
MAX_TO_ENGINE_BYTES = 64 << 20
"""Longest frame to the engine process: a request, which the HTTP and gRPC APIs keep much shorter."""
MAX_FROM_ENGINE_BYTES = 1 << 30
"""Longest frame from the engine process: the logprobs of a long prompt can be large."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the engine. The first message, sent once."""

    engine_arguments: dict[str, Any]
    """Arguments of ``AsyncLLM``."""
    max_num_queued_tokens: int | None
    watchdog_timeout: float
    chat_template_timeout: float
    chat_template_content_format: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request."""

    number: int
    """Names the request in later messages; used once."""
    request_id: str
    """Its name in logs."""
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """End requests whose clients have disconnected; the engine process sends nothing more about them."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Query:
    """Call a control method, such as ``tokenize``."""

    number: int
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process; running requests may take ``drain_s`` more seconds."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests."""

    model: bytes
    """A serialized ``jaxserve.v1.Model`` without ``id`` and ``created``, which the front end knows."""
    default_fields: dict[str, Any]
    """The fields of ``SamplingParams`` that the model's defaults change."""
    ledger: str
    """The memory ledger, as the startup log shows it."""
    extra_arguments: tuple[str, ...]
    """Names of the values that custom logits processors read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine could not start, or has failed. The last message."""

    error: JaxserveError


@dataclass(frozen=True, slots=True)
class Output:
    """A request's new output, or the error that ended it. Only the first output has the prompt."""

    number: int
    content: RequestOutput | JaxserveError


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of all requests in one step."""

    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a control method returned, or its error."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive. Sent every second."""


ToEngine = Start | Submit | Cancel | Query | Stop
FromEngine = Ready | Failure | Outputs | QueryResult | Heartbeat


class FrameError(ValueError):
    """A message that cannot be sent or received: too long, or not to be pickled."""


def pack_frame(message: ToEngine | FromEngine, limit_bytes: int) -> bytes:
    """Return a message as a frame.

    Raises:
        FrameError: The message is too long, or holds something that cannot be pickled.
    """
    try:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"{type(message).__name__} cannot be sent between processes: {error}") from error
    return HEADER.pack(check_length(len(body), limit_bytes)) + body


def check_length(num_bytes: int, limit_bytes: int) -> int:
    """Return the length of a frame's message.

    Raises:
        FrameError: It is too long.
    """
    if num_bytes > limit_bytes:
        raise FrameError(f"a message of {num_bytes} bytes is too long; the limit is {limit_bytes} bytes")
    return num_bytes


# The first class that an error is an instance of decides; any other error is internal.
_ERROR_CLASSES = (RequestFailedError, RequestError, OverloadedError, DeadlineError, EngineDeadError, ConfigError)


def sendable_error(error: BaseException) -> JaxserveError:
    """Return an error as the front end gets it: of a class that it knows, without causes and lone surrogates."""
    text = _without_surrogates(str(error)) or type(error).__name__
    if isinstance(error, EngineDeadError) and error.__cause__ is not None:
        text = "the engine stopped after a failure"  # its log has the details
    sent = next((cls for cls in _ERROR_CLASSES if isinstance(error, cls)), RequestFailedError)(text)
    parameter = getattr(error, "parameter", None)
    if isinstance(sent, RequestError) and isinstance(parameter, str):
        sent.parameter = _without_surrogates(parameter)  # the text names it already
    return sent


def _without_surrogates(text: str) -> str:
    """Escape lone surrogates, which chat templates may put into an error and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
