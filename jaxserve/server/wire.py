"""Messages between a server's front end and its engine process, and the frames they travel in.

A frame is a length of four bytes, big-endian, and a message in MessagePack. Both ends are processes of one version, so
messages need no schema: an object travels as its class's index in ``_CLASSES`` and its fields. Unlike a pickle, a frame
cannot name any other class, and what clients send cannot pass for an object.
"""

import dataclasses
import enum
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
from google.protobuf.message import Message

from jaxserve.api.draft_metrics import RequestSpecDecodeMetrics
from jaxserve.api.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.api.metric_types import Counter, Gauge, Histogram
from jaxserve.api.outputs import CompletionOutput, PrefixMetrics, RequestMetrics, RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams
from jaxserve.api.text_bound import TextBound
from jaxserve.api.turns import Turn
from jaxserve.parsers import ParserNames
from jaxserve.server.proto.jaxserve.v1 import model_pb2

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
    watchdog_timeout: float


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request."""

    number: int
    """Names the request in later messages; used once."""
    request: Request
    """Its prompt is text or token ids; of a conversation only the last message is left."""
    arrival_s: float
    """When it arrived, in seconds of ``time.monotonic()``, which all processes of a machine share."""
    is_waiting: bool = False
    """Whether to send its prompt's token ids before it runs, as an output without completions."""


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


@dataclass(frozen=True)
class EngineInfo:
    """The engine is ready, with this model. The first message to the front end."""

    model: model_pb2.Model
    """The model and what it runs on; ``id`` and ``created``, which the front end knows, are empty."""
    default_fields: dict[str, Any]
    """The fields of ``SamplingParams`` that the model's defaults change."""
    max_output_tokens: int | None = None
    """Most output tokens of any request; None: as many as its context holds."""
    chat_templates: dict[str, str] = field(default_factory=dict[str, str])
    """The model's chat templates by name."""
    chat_template: str | None = None
    """The source of the server's own chat template, used in place of the model's."""
    special_tokens: dict[str, str] = field(default_factory=dict[str, str])
    """The model's special tokens by name; templates see them."""
    parsers: ParserNames = ParserNames()
    """The parsers of reasoning and tool calls."""
    text_bound: TextBound | None = None
    """How much of a text one token can stand for; None if there is no limit."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Eight characters that change with the model and what it runs on."""
        return hashlib.sha256(self.model.SerializeToString(deterministic=True)).hexdigest()[:8]

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered without a template of their own."""
        return self.chat_template is not None or "default" in self.chat_templates

    @property
    def max_model_len(self) -> int:
        """Longest context, in tokens."""
        return self.model.max_model_len


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine could not start, or has failed. The last message."""

    error: JaxserveError


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step gave: numbers of requests, each with its new output or the error that ended it.

    Only a request's first output has the prompt.
    """

    outputs: Sequence[tuple[int, RequestOutput | JaxserveError]]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a control method returned, or its error."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive. Sent every second."""


ToEngine = Start | Submit | Cancel | Query | Stop
FromEngine = EngineInfo | Failure | Outputs | QueryResult | Heartbeat


# The first class that an error is an instance of decides; any other error is internal.
_ERRORS = (RequestFailedError, RequestError, OverloadedError, DeadlineError, EngineDeadError, ConfigError)
_CLASSES: tuple[type, ...] = (
    *(Start, Submit, Cancel, Query, Stop, EngineInfo, Failure, Outputs, QueryResult, Heartbeat),
    *(Request, SamplingParams, RequestOutputKind, StructuredOutputsParams, RepetitionDetectionParams),
    *(
        PoolingParams,
        RequestOutput,
        CompletionOutput,
        RequestMetrics,
        PrefixMetrics,
        RequestSpecDecodeMetrics,
        PackedLogprobs,
        model_pb2.Model,
    ),
    *(ParserNames, TextBound, Turn, Counter, Gauge, Histogram, tuple),
    *_ERRORS,
)
_LOGPROBS = {CompletionOutput: "logprobs", RequestOutput: "prompt_logprobs"}


class FrameError(ValueError):
    """A message that cannot be sent or received: too long, or with a value that MessagePack cannot hold."""


def pack(message: ToEngine | FromEngine, limit_bytes: int) -> bytes:
    """Return a message as a frame.

    Raises:
        FrameError: The message is too long, or holds a value that cannot be sent.
    """
    try:
        body = msgpack.Packer(default=_as_map, strict_types=True).pack(message)
    except (TypeError, ValueError, OverflowError) as error:  # such as a lone surrogate, a large number or deep lists
        raise FrameError(f"{type(message).__name__} holds a value that cannot be sent: {error}") from error
    return HEADER.pack(check_length(len(body), limit_bytes)) + body


def unpack(body: bytes) -> Any:
    """Return the message of a frame.

    Raises:
        ValueError: The bytes are not a message.
    """
    return msgpack.unpackb(body, ext_hook=_class_of, object_pairs_hook=_from_pairs, strict_map_key=False)


class _Form(NamedTuple):
    """How objects of a class travel: how they become a value that MessagePack holds, and again an object."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _form(cls: type[Any]) -> _Form:
    if dataclasses.is_dataclass(cls):
        return _dataclass_form(cls)
    if issubclass(cls, Message):
        return _Form(cls.SerializeToString, cls.FromString)
    if issubclass(cls, RequestError):
        return _Form(lambda error: [str(error), error.parameter], lambda fields: _request_error(cls, *fields))
    if issubclass(cls, enum.Enum):
        return _Form(lambda value: value.value, cls)
    return _Form(list if cls is tuple else str, cls)


def _dataclass_form(cls: type[Any]) -> _Form:
    """Return the form of a dataclass: the list of its fields, whose values its sender has checked."""
    names = [each.name for each in dataclasses.fields(cls)]

    def read(values: list[Any]) -> Any:
        made = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    logprobs = _LOGPROBS.get(cls)
    if logprobs is None:
        return _Form(lambda value: [getattr(value, name) for name in names], read)
    return _Form(lambda value: [_packed(getattr(value, name), name == logprobs) for name in names], read)


def _packed(value: Any, is_logprobs: bool) -> Any:
    if not is_logprobs or value is None or isinstance(value, PackedLogprobs):
        return value
    return PackedLogprobs.of(value)


def _request_error(cls: type[RequestError], message: str, parameter: str | None) -> RequestError:
    error = cls(message)
    error.parameter = parameter  # the text names it already
    return error


_FORMS = {cls: _form(cls) for cls in _CLASSES}
_MARKS = {cls: msgpack.ExtType(code, b"") for code, cls in enumerate(_CLASSES)}


def _as_map(value: Any) -> dict[Any, Any]:
    """Return an object as a map from its class's mark, which nothing else can contain, to its form."""
    cls = type(value)
    if cls not in _FORMS:
        raise TypeError(f"objects of {cls.__name__} cannot be sent")
    return {_MARKS[cls]: _FORMS[cls].write(value)}


def _class_of(code: int, data: bytes) -> type:
    del data
    return _CLASSES[code]


def _from_pairs(pairs: list[tuple[Any, Any]]) -> Any:
    """Build an object or a plain dictionary."""
    if len(pairs) != 1 or not isinstance(pairs[0][0], type):
        return dict(pairs)
    cls, written = pairs[0]
    return _FORMS[cls].read(written)


def check_length(num_bytes: int, limit_bytes: int) -> int:
    """Return the length of a frame's message.

    Raises:
        FrameError: It is too long.
    """
    if num_bytes > limit_bytes:
        raise FrameError(f"a message of {num_bytes} bytes is too long; the limit is {limit_bytes} bytes")
    return num_bytes


def sendable_error(error: BaseException) -> JaxserveError:
    """Return an error as the front end gets it: of a class that it knows, without causes and lone surrogates."""
    text = _without_surrogates(str(error)) or type(error).__name__
    if isinstance(error, EngineDeadError) and error.__cause__ is not None:
        text = "the engine stopped after a failure"  # its log has the details
    sent = next((cls for cls in _ERRORS if isinstance(error, cls)), RequestFailedError)(text)
    parameter = getattr(error, "parameter", None)
    if isinstance(sent, RequestError) and isinstance(parameter, str):
        sent.parameter = _without_surrogates(parameter)  # the text names it already
    return sent


def _without_surrogates(text: str) -> str:
    """Escape lone surrogates, which chat templates may put into an error and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
