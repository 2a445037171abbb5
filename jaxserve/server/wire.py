"""Messages between a server's front end and its engine process, in frames of the classes of ``_CLASSES``."""

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from jaxserve.frames import Codec, Form, dataclass_form, enum_form
from jaxserve.group.settings import GroupPlace
from jaxserve.parsers import ParserNames
from jaxserve.server.proto.jaxserve.v1 import model_pb2

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
    group: GroupPlace | None = None
    """Where the processes of a group meet; None: this one has all devices."""
    startup_timeout: float = 0.0
    """Seconds until the engine must be ready; 0: no limit."""
    moved: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings that the engine had moved to before it was started again, in place of those of the arguments."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request."""

    number: int
    """Names the request in later messages; used once."""
    request: Request
    """Its prompt is text or token ids; of a conversation only the last message is left."""
    arrival_s: float
    """When it arrived, in seconds of the engine process's ``time.monotonic()``, which processes of a machine share."""
    is_waiting: bool = False
    """Whether to send its prompt's token ids before it runs, as an output without completions."""
    has_metrics: bool = False
    """Whether its last output has ``metrics``."""


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
    has_states: bool = False
    """Whether the model has recurrent layers, whose states are kept before what begins the answer."""

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
    *(GroupPlace, ParserNames, TextBound, Turn, Counter, Gauge, Histogram, tuple),
    *_ERRORS,
)
_LOGPROBS = {CompletionOutput: "logprobs", RequestOutput: "prompt_logprobs"}


def _form(cls: type[Any]) -> Form:
    if cls in _LOGPROBS:
        return _form_with_arrays(cls, _LOGPROBS[cls])
    if dataclasses.is_dataclass(cls):
        return dataclass_form(cls)
    if issubclass(cls, Message):
        return Form(cls.SerializeToString, cls.FromString)
    if issubclass(cls, RequestError):
        return Form(lambda error: [str(error), error.parameter], lambda fields: _request_error(cls, *fields))
    return enum_form(cls) if issubclass(cls, enum.Enum) else Form(list if cls is tuple else str, cls)


def _form_with_arrays(cls: type[Any], field_name: str) -> Form:
    """Return the form of a dataclass with a field of logprobs, which are sent as arrays."""
    plain, index = dataclass_form(cls), [each.name for each in dataclasses.fields(cls)].index(field_name)

    def write(value: Any) -> list[Any]:
        written = plain.write(value)
        if written[index] is not None and not isinstance(written[index], PackedLogprobs):
            written[index] = PackedLogprobs.of(written[index])
        return written

    return Form(write, plain.read)


def _request_error(cls: type[RequestError], message: str, parameter: str | None) -> RequestError:
    error = cls(message)
    error.parameter = parameter  # the text names it already
    return error


_CODEC = Codec({cls: _form(cls) for cls in _CLASSES})


def pack(message: ToEngine | FromEngine, limit_bytes: int) -> bytes:
    """Return a message as a frame; see ``Codec.pack``."""
    return _CODEC.pack(message, limit_bytes)


def unpack(body: bytes) -> Any:
    """Return the message of a frame; see ``Codec.unpack``."""
    return _CODEC.unpack(body)


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
