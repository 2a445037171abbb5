"""Spans of OpenTelemetry, over OTLP's gRPC. Imported only where traces are asked for: it needs the extra ``otel``."""

import importlib.metadata
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxserve.server.tracing import AttributeValue

SPAN_NAME = "llm_request"
"""vLLM's name."""
_CLOSE_S = 3.0
"""Seconds that spans may take to leave at the end."""


class OtelSpan:
    """A request's span that has begun.

    Args:
        span: OpenTelemetry's.
    """

    def __init__(self, span: Span):
        self._span = span

    def end(self, attributes: Mapping[str, AttributeValue], error: str | None) -> None:
        """Ends it, as an error where ``error`` says what went wrong."""
        self._span.set_attributes({name: value for name, value in attributes.items()})
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelTracer:
    """Sends spans in batches from a thread of its own; a collector that does not answer costs nothing but the spans.

    OpenTelemetry's environment variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, …) hold. The provider is not
    made the process's: libraries that trace themselves go on as they did.

    Args:
        endpoint: The collector's address; only ``https`` is encrypted.
    """

    def __init__(self, endpoint: str):
        version = importlib.metadata.version("jaxserve")
        own = Resource.create({"service.name": "jaxserve", "service.version": version})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=urlsplit(endpoint).scheme != "https")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("jaxserve", version)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, attributes: Mapping[str, AttributeValue], headers: Mapping[str, str]) -> OtelSpan:
        """Begins a request's span, below the caller's where the headers name one."""
        context = self._propagator.extract(headers)
        given = {name: value for name, value in attributes.items()}
        return OtelSpan(self._tracer.start_span(SPAN_NAME, context, SpanKind.SERVER, given))

    def close(self) -> None:
        """Sends what is left, for some seconds at most."""
        limit = threading.Timer(_CLOSE_S, self._exporter.shutdown)
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()
