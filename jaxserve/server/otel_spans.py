"""Spans of OpenTelemetry, sent by OTLP over gRPC. Imported only if traces are on: it needs the extra ``otel``."""

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
_CLOSE_S = 3.0  # for the last spans


class OtelTracer:
    """Sends spans in batches from a thread of its own; if the collector does not answer, only spans are lost.

    OpenTelemetry's environment variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, …) apply. The provider is not
    installed for the whole process, so libraries that trace themselves are not affected.

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

    def start(self, attributes: Mapping[str, AttributeValue], headers: Mapping[str, str]) -> Span:
        """Begin a request's span, as a child of the caller's span if the headers name one.

        Args:
            attributes: What is known about the request.
            headers: The result of ``remembered_headers``.
        """
        context = self._propagator.extract(headers)
        return self._tracer.start_span(SPAN_NAME, context, SpanKind.SERVER, {**attributes})

    def end(self, span: Span, attributes: Mapping[str, AttributeValue], error: str | None) -> None:
        """End a span from ``start``.

        Args:
            span: The span.
            attributes: What became known while the request ran.
            error: What went wrong in the server, if anything did.
        """
        span.set_attributes({**attributes})
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        limit = threading.Timer(_CLOSE_S, self._exporter.shutdown)
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()
