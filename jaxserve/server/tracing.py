"""OpenTelemetry traces: a span a request, with vLLM's attributes; and what a caller's headers say about its own trace.

A surface calls ``remember_trace`` with the headers of a request before it hands the request on, in the same task.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError
from jaxserve.outputs import RequestMetrics
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.settings import ServerConfig

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C's names."""
LABEL_HEADER = "x-request-id"
"""What a client calls its request: a label in the log, never a name of ours."""
_MAX_HEADER_LENGTH = 512
_SCHEMES = ("grpc", "http", "https")

AttributeValue = str | int | float | Sequence[str]

_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default=MappingProxyType({}))
_tracers: list["Tracer"] = []


def remember_trace(headers: Mapping[str, str] | Iterable[tuple[str, str | bytes]]) -> None:
    """Keeps what a request's headers say of its trace and its label, for the rest of this task.

    Args:
        headers: All of an HTTP request's headers or a gRPC call's metadata. What is too long, or no text, is dropped.
    """
    pairs = cast("Mapping[str, str]", headers).items() if isinstance(headers, Mapping) else headers
    kept: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if lower not in (*TRACE_HEADERS, LABEL_HEADER) or not isinstance(value, str):
            continue
        if len(value) <= _MAX_HEADER_LENGTH:
            kept[lower] = value
    _headers.set(kept)


def remembered_headers() -> Mapping[str, str]:
    """What ``remember_trace`` kept in this task; empty where nobody called it."""
    return _headers.get()


@runtime_checkable
class Span(Protocol):
    """A request's span that has begun."""

    def end(self, attributes: Mapping[str, AttributeValue], error: str | None) -> None:
        """Ends it.

        Args:
            attributes: What became known.
            error: What went wrong at the server; None where nothing did.
        """
        ...


@runtime_checkable
class Tracer(Protocol):
    """Begins spans and sends them off in the background."""

    def start(self, attributes: Mapping[str, AttributeValue], headers: Mapping[str, str]) -> Span:
        """Begins a request's span.

        Args:
            attributes: What is known of the request.
            headers: As ``remembered_headers`` gives them: the caller's span, if there is one.
        """
        ...

    def close(self) -> None:
        """Sends what is left; may block for some seconds."""
        ...


def make_tracer(config: ServerConfig) -> Tracer | None:
    """The tracer that the settings ask for; None where they ask for none.

    Raises:
        ConfigError: The endpoint is no address, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(f"otlp_traces_endpoint: expected such as http://localhost:4317, got {endpoint!r}")
    try:
        module = importlib.import_module("jaxserve.server.otel_spans")
    except ImportError as error:
        message = "otlp_traces_endpoint needs OpenTelemetry: install jaxserve with its extra 'otel'"
        raise ConfigError(message) from error
    tracer: Tracer = module.OtelTracer(endpoint)
    _tracers.append(tracer)
    return tracer


def close_tracing() -> None:
    """Sends off what is left of all traces, at the process' end; may block for some seconds."""
    while _tracers:
        _tracers.pop().close()


def request_attributes(request_id: str, request: EngineRequest, model: str | None) -> dict[str, AttributeValue]:
    """What a request's span says from its begin."""
    params = request.params
    found = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.response.model": model,
    }
    return {name: value for name, value in found.items() if value is not None}


def time_attributes(times: RequestMetrics) -> dict[str, AttributeValue]:
    """How long the parts of a request took, in seconds; what has not happened is left out."""
    arrival, queued, scheduled = times.arrival_s, times.queued_s, times.scheduled_s
    first, finished = times.first_token_s, times.finished_s
    spans = {
        "time_in_queue": (queued, scheduled),
        "time_to_first_token": (arrival, first),
        "e2e": (arrival, finished),
        "time_in_model_prefill": (scheduled, first),
        "time_in_model_decode": (first, finished),
        "time_in_model_inference": (scheduled, finished),
    }
    return {
        f"gen_ai.latency.{name}": end - begin
        for name, (begin, end) in spans.items()
        if begin is not None and end is not None
    }
