"""Traces: spans with vLLM's attributes, below the caller's span, sent to a collector that speaks OTLP over gRPC."""

import asyncio
import concurrent.futures
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve.api.errors import ConfigError, DeadlineError, RequestError
from jaxserve.api.outputs import RequestMetrics
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tracing import make_tracer, remember_trace, remembered_headers, time_attributes
from tests.observed_engine import ANSWER, ObservedEngine, make_frontend, read_all

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Collector:
    """A collector of OpenTelemetry on a port of this machine."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
        messages = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        services = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
        self.resources: list[Any] = []
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))

        def export(request: Any, context: grpc.ServicerContext) -> Any:
            del context
            self.resources += request.resource_spans
            return messages.ExportTraceServiceResponse()

        servicer = type("Servicer", (services.TraceServiceServicer,), {"Export": staticmethod(export)})()
        services.add_TraceServiceServicer_to_server(servicer, self.server)
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    @property
    def spans(self) -> list[Any]:
        """Those that came, once the tracer was closed."""
        return [span for resource in self.resources for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Ended after the test."""
    found = Collector()
    yield found
    found.server.stop(None).wait()


def values(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def only_span(collector: Collector, *script: Any, headers: Any = (), **settings: Any) -> Any:
    """The span of a request that went so."""

    async def run() -> None:
        remember_trace(headers)
        try:
            params = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.25, n=2)
            await read_all(frontend, name="cmpl-7", params=params)
        except Exception:
            return

    frontend = make_frontend(ObservedEngine(*script), otlp_traces_endpoint=collector.endpoint, **settings)
    asyncio.run(run())
    frontend.log.close()
    (span,) = collector.spans
    return span


# ---------------------------------------------------------------- spans


def test_a_span_a_request(collector: Collector) -> None:
    before_ns = time.time_ns()
    span = only_span(collector)
    assert (span.name, span.kind) == ("llm_request", 2)  # SPAN_KIND_SERVER
    assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert span.parent_span_id == b""
    assert span.status.code == 0
    assert values(span) == {
        "gen_ai.request.id": "cmpl-7",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.e2e": 7.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_in_model_inference": 6.0,
        "jaxserve.outcome": "ok",
    }


def test_names_of_the_service_and_the_model(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    span = only_span(collector, served_model_name=["named"])
    assert values(span)["gen_ai.response.model"] == "named"
    assert values(collector.resources[0].resource)["service.name"] == "jaxserve"
    collector.resources.clear()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-of-team-x")
    only_span(collector)
    assert values(collector.resources[0].resource)["service.name"] == "chat-of-team-x"


@pytest.mark.parametrize(
    "headers",
    [
        {"Traceparent": TRACEPARENT, "Tracestate": "vendor=1"},
        (("user-agent", "x"), ("traceparent", TRACEPARENT), ("tracestate", "vendor=1"), ("blob-bin", b"\0")),
    ],
    ids=["HTTP headers", "gRPC metadata"],
)
def test_below_the_caller_s_span(headers: Any, collector: Collector) -> None:
    span = only_span(collector, headers=headers)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.trace_state == "vendor=1"


def test_a_caller_who_traces_nothing_gets_no_span(collector: Collector) -> None:
    frontend = make_frontend(otlp_traces_endpoint=collector.endpoint)

    async def run() -> None:
        remember_trace({"traceparent": f"00-{TRACE}-{CALLER}-00"})
        await read_all(frontend)

    asyncio.run(run())
    frontend.log.close()
    assert collector.spans == []


@pytest.mark.parametrize("broken", ["", "nonsense", f"00-{'0' * 32}-{CALLER}-01", TRACEPARENT + "x" * 600])
def test_a_broken_header_begins_a_trace(broken: str, collector: Collector) -> None:
    span = only_span(collector, headers={"traceparent": broken})
    assert span.parent_span_id == b""
    assert span.trace_id.hex() != TRACE


@pytest.mark.parametrize(
    ("error", "is_error", "outcome"),
    [
        (RequestError("wrong"), False, "client_error"),
        (DeadlineError("late"), True, "deadline"),
        (KeyError("secret prompt"), True, "failed"),
    ],
)
def test_requests_that_went_wrong(error: Exception, is_error: bool, outcome: str, collector: Collector) -> None:
    span = only_span(collector, ANSWER[0], error)
    assert (span.status.code == 2) == is_error
    assert span.status.message == (type(error).__name__ if is_error else "")
    assert values(span)["jaxserve.outcome"] == outcome
    assert values(span)["gen_ai.usage.completion_tokens"] == 1
    assert "secret" not in str(span)


def test_times_that_did_not_come_are_left_out() -> None:
    assert time_attributes(RequestMetrics(arrival_time=1.0)) == {}
    assert time_attributes(RequestMetrics(queued_ts=1.5, scheduled_ts=2.0)) == {"gen_ai.latency.time_in_queue": 0.5}


# ---------------------------------------------------------------- headers


def test_each_task_has_its_own_headers() -> None:
    async def request(number: int) -> str:
        remember_trace({"x-request-id": f"name-{number}"})
        await asyncio.sleep(0.001 * (5 - number))
        return remembered_headers()["x-request-id"]

    async def run() -> list[str]:
        return await asyncio.gather(*(request(number) for number in range(5)))

    assert asyncio.run(run()) == [f"name-{number}" for number in range(5)]
    assert remembered_headers() == {}


def test_only_what_is_needed_is_kept() -> None:
    async def run() -> None:
        remember_trace({"authorization": "Bearer sk-secret", "tracestate": "a" * 513, "x-request-id": "x"})
        assert remembered_headers() == {"x-request-id": "x"}
        remember_trace({})
        assert remembered_headers() == {}

    asyncio.run(run())


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://localhost:4317", "http://", "nonsense"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"otlp_traces_endpoint: expected an address such as http://localhost:4317, got"
    ):
        make_tracer(ServerConfig(otlp_traces_endpoint=endpoint))


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxserve.server.otel_spans", None)
    assert make_tracer(ServerConfig()) is None
    with pytest.raises(ConfigError, match="install jaxserve with its extra 'otel'"):
        make_tracer(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4317"))


# ---------------------------------------------------------------- beside others


def test_beside_an_asyncio_grpc_server(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    """The exporter's own gRPC thread and ``grpc.aio`` live in one process."""

    async def answer(request: bytes, context: Any) -> bytes:
        remember_trace(context.invocation_metadata())
        await read_all(frontend, name=request.decode())
        return request

    async def run() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Call": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Echo/Call")
            metadata = (("traceparent", TRACEPARENT),)
            names = [f"cmpl-{number}".encode() for number in range(40)]
            assert await asyncio.gather(*(call(name, metadata=metadata) for name in names)) == names
            await asyncio.to_thread(frontend.log.close)
        await server.stop(None)

    frontend = make_frontend(otlp_traces_endpoint=collector.endpoint)
    asyncio.run(run())
    assert {values(span)["gen_ai.request.id"] for span in collector.spans} == {f"cmpl-{n}" for n in range(40)}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert caplog.records == []


def test_a_collector_that_is_gone_delays_the_end_by_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Collector()
    found.server.stop(None).wait()
    module = importlib.import_module("jaxserve.server.otel_spans")
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    frontend = make_frontend(otlp_traces_endpoint=found.endpoint)
    outputs = asyncio.run(read_all(frontend))
    assert len(outputs) == len(ANSWER)
    begin_s = time.monotonic()
    frontend.log.close()
    assert time.monotonic() - begin_s < 20  # else it tries for a minute
