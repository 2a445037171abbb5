"""OpenTelemetry traces: one span per request, with vLLM's attributes, below the caller's span if its headers name one.

The HTTP and gRPC APIs call ``remember_trace`` with the headers of a request, in the task that then runs the request.
"""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from jaxserve.api.errors import ConfigError
from jaxserve.api.outputs import RequestMetrics
from jaxserve.api.request import Request
from jaxserve.server.settings import ServerConfig

if TYPE_CHECKING:  # the extra "otel" may not be installed
    from jaxserve.server.otel_spans import OtelTracer

TRACE_HEADERS = ("traceparent", "tracestate")
"""Names of the W3C trace context."""
LABEL_HEADER = "x-request-id"
"""The client's own name of its request: a label in the log, never used as an identifier."""
_MAX_HEADER_LENGTH = 512
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")
_SCHEMES = ("grpc", "http", "https")

AttributeValue = str | int | float | Sequence[str]

_headers: ContextVar[Mapping[str, str] | Iterable[tuple[str, str | bytes]]] = ContextVar("headers", default=())


def remember_trace(headers: Mapping[str, str] | Iterable[tuple[str, str | bytes]]) -> None:
    """Remember the headers of an HTTP request, or the metadata of a gRPC call, for the rest of this task."""
    _headers.set(headers)


def remembered_headers() -> Mapping[str, str]:
    """Return the trace headers and the label of this task's request, without long and binary values."""
    headers = _headers.get()
    pairs = cast("Mapping[str, str]", headers).items() if isinstance(headers, Mapping) else headers
    return {
        name.lower(): value
        for name, value in pairs
        if name.lower() in (*TRACE_HEADERS, LABEL_HEADER)
        and isinstance(value, str)
        and len(value) <= _MAX_HEADER_LENGTH
    }


def remembered_trace_id() -> str | None:
    """Return the trace that the header of this task's request names, in hexadecimal; None if there is none."""
    found = _TRACE_PARENT.match(remembered_headers().get("traceparent", ""))
    return None if found is None else found[1]


def make_tracer(config: ServerConfig) -> "OtelTracer | None":
    """Return the tracer of ``otlp_traces_endpoint``; None if it is not set.

    Raises:
        ConfigError: The endpoint is not an address, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ConfigError(f"otlp_traces_endpoint: expected an address such as http://localhost:4317, got {endpoint!r}")
    try:
        module = importlib.import_module("jaxserve.server.otel_spans")
    except ImportError as error:
        message = "otlp_traces_endpoint needs OpenTelemetry: install jaxserve with its extra 'otel'"
        raise ConfigError(message) from error
    return module.OtelTracer(endpoint)


def request_attributes(request: Request, model: str | None) -> dict[str, AttributeValue]:
    """Return the attributes that a request's span has from its beginning."""
    params = request.params
    found = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.response.model": model,
    }
    return {name: value for name, value in found.items() if value is not None}


def time_attributes(times: RequestMetrics) -> dict[str, AttributeValue]:
    """Return the duration in seconds of each phase the request has reached."""
    first, last = times.first_token_ts, times.last_token_ts
    arrival = first - times.first_token_latency
    spans = {
        "time_in_queue": (times.queued_ts, times.scheduled_ts),
        "time_to_first_token": (arrival, first),
        "e2e": (arrival, last),
        "time_in_model_prefill": (times.scheduled_ts, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (times.scheduled_ts, last),
    }
    return {f"gen_ai.latency.{name}": end - begin for name, (begin, end) in spans.items() if begin and end}
