"""How errors are answered over gRPC: code, message and google.rpc's details."""

import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jaxserve.api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, RequestFailedError
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.server.errors import UnavailableError, status_of
from jaxserve.server.grpc_api.statuses import MAX_MESSAGE_BYTES, field_path, rich_status
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2, tokenization_pb2_grpc
from tests.grpc_servers import Serving, connected, run, serving

Code = grpc.StatusCode


def details_of(failure: grpc.aio.AioRpcError) -> dict[str, Message]:
    """The details of a status, by their types' names."""
    packed = dict(failure.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    return unpacked(status_pb2.Status.FromString(packed))


def unpacked(status: status_pb2.Status) -> dict[str, Message]:
    """The details of a status, by their types' names."""
    found: dict[str, Message] = {}
    for detail in status.details:
        name = detail.TypeName().rpartition(".")[2]
        message = getattr(error_details_pb2, name)()
        assert detail.Unpack(message)
        found[name] = message
    return found


async def failure_of(there: Serving, request: generation_pb2.GenerateRequest, streams: bool) -> grpc.aio.AioRpcError:
    """What a call that fails raises."""
    async with connected(there.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            if streams:
                async for _ in stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request)):
                    pass
            else:
                await stub.Generate(request)
        return failure.value


ENGINE_ERRORS = [
    (RequestError("too long", parameter="prompt_token_ids", value=7), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (RequestFailedError("not finite"), Code.INTERNAL, "REQUEST_FAILED"),
    (OverloadedError("full", retry_after_s=2.5), Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (DeadlineError("too late"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (EngineDeadError("it ended"), Code.UNAVAILABLE, "ENGINE_DEAD"),
    (UnavailableError("restarting", retry_after_s=4.0), Code.UNAVAILABLE, "UNAVAILABLE"),
]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize(("error", "code", "reason"), ENGINE_ERRORS)
def test_errors_of_the_engine(
    error: Exception, code: grpc.StatusCode, reason: str, fails_at: int, streams: bool
) -> None:
    async def main() -> None:
        async with serving() as there:
            there.engine.error, there.engine.fails_at = error, fails_at
            failure = await failure_of(there, generation_pb2.GenerateRequest(text="Hi"), streams)
            details = details_of(failure)
            assert (failure.code(), failure.details()) == (code, str(error))
            info, request = details["ErrorInfo"], details["RequestInfo"]
            assert isinstance(info, error_details_pb2.ErrorInfo) and (info.reason, info.domain) == (
                reason,
                "jaxserve.dev",
            )
            assert isinstance(request, error_details_pb2.RequestInfo)
            assert [request.request_id] == list(there.engine.requests)
            delay_s = getattr(error, "retry_after_s", 1.0 if code is Code.UNAVAILABLE else None)
            assert ("RetryInfo" in details) == (delay_s is not None)
            if delay_s is not None:
                retry = details["RetryInfo"]
                assert isinstance(retry, error_details_pb2.RetryInfo)
                assert retry.retry_delay.ToMilliseconds() == delay_s * 1000
            assert ("QuotaFailure" in details) == (code is Code.RESOURCE_EXHAUSTED)
            assert ("BadRequest" in details) == (code is Code.INVALID_ARGUMENT)
            there.engine.error = None
            async with connected(there.target) as channel:
                await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                    generation_pb2.GenerateRequest(text="Hi")
                )

    run(main)


@pytest.mark.parametrize("streams", [True, False])
def test_an_error_that_nobody_foresaw_says_nothing_of_the_inside(
    streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> str:
        async with serving() as there:
            there.engine.error = RuntimeError("secret /path")
            failure = await failure_of(there, generation_pb2.GenerateRequest(text="Hi"), streams)
            assert (failure.code(), failure.details()) == (Code.INTERNAL, "internal server error")
            assert "secret" not in str(failure.trailing_metadata())
            return list(there.engine.requests)[0]

    with caplog.at_level(logging.ERROR, "jaxserve.server.grpc_api.interceptor"):
        request_id = run(main)
    (record,) = [one for one in caplog.records if one.name == "jaxserve.server.grpc_api.interceptor"]
    assert request_id in record.getMessage() and record.exc_info is not None


def test_a_text_that_failed_is_no_message_but_a_status() -> None:
    async def main() -> None:
        async with serving() as there:

            async def failing(request: Request, *, is_waiting: bool = False):
                failed = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
                yield RequestOutput(
                    request_id=request.request_id,
                    prompt=None,
                    prompt_token_ids=[1],
                    outputs=[failed],
                    finished=True,
                    error="logits are not finite",
                )

            there.engine.generate = failing
            for streams in (True, False):
                failure = await failure_of(there, generation_pb2.GenerateRequest(text="Hi"), streams)
                assert (failure.code(), failure.details()) == (Code.INTERNAL, "logits are not finite")

    run(main)


BAD_REQUESTS = [
    (dict(text="Hi", sampling_params={"temperature": -1.0}), "sampling_params.temperature", "temperature"),
    (dict(text="Hi", sampling_params={"temperature": float("nan")}), "sampling_params.temperature", "temperature"),
    (dict(text="Hi", sampling_params={"n": 2**31}), "sampling_params.n", "n must be"),
    (dict(text="Hi", sampling_params={"max_tokens": -2}), "sampling_params.max_tokens", "max_tokens"),
    (dict(text="Hi", sampling_params={"extra_args_json": "{"}), "sampling_params.extra_args_json", "not valid JSON"),
    (
        dict(text="Hi", sampling_params={"structured_outputs": {"json": "{"}}),
        "sampling_params.structured_outputs.json",
        "not valid JSON",
    ),
    (dict(), "prompt", "expected one of text, token_ids and messages"),
    (dict(messages={}), "messages", "at least one message"),
    (
        dict(messages={"messages": [{"role": "user"}], "chat_template_kwargs_json": "[]"}),
        "messages.chat_template_kwargs_json",
        "must be an object, got list",
    ),
    (
        dict(messages={"messages": [{"role": "user"}], "chat_template_kwargs_json": '{"a": [NaN]}'}),
        "messages.chat_template_kwargs_json",
        "must hold JSON values",
    ),
    (
        dict(messages={"messages": [{"role": "user"}], "chat_template_kwargs_json": '{"a": ["\\ud800"]}'}),
        "messages.chat_template_kwargs_json",
        "not valid Unicode",
    ),
    (
        dict(messages={"messages": [{"role": "user"}], "tools": [{"name": "f", "parameters_json": "{"}]}),
        "messages.tools",
        "not valid JSON",
    ),
    (dict(messages={"messages": [{"role": "user"}], "tool_choice": "f"}), "messages.tool_choice", "tool_choice"),
]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("fields", "path", "words"), BAD_REQUESTS)
def test_wrong_requests_name_their_field(fields: dict[str, Any], path: str, words: str, streams: bool) -> None:
    async def main() -> None:
        async with serving() as there:
            failure = await failure_of(there, generation_pb2.GenerateRequest(**fields), streams)
            assert failure.code() is Code.INVALID_ARGUMENT and words in (failure.details() or "")
            bad = details_of(failure)["BadRequest"]
            assert isinstance(bad, error_details_pb2.BadRequest)
            assert bad.field_violations[0].field == ("request." if streams else "") + path
            assert not there.engine.requests and there.frontend.ledger.num_in_flight == 0

    run(main)


def test_another_model() -> None:
    async def main() -> None:
        async with serving() as there:
            failure = await failure_of(there, generation_pb2.GenerateRequest(text="Hi", model="other"), False)
            assert (failure.code(), failure.details()) == (Code.NOT_FOUND, "The model `other` does not exist.")

    run(main)


def test_a_server_that_starts_or_drains_can_be_tried_again() -> None:
    async def main() -> None:
        async with serving() as there:
            request = generation_pb2.GenerateRequest(text="Hi")
            there.frontend.ledger.close("the server is shutting down")
            failure = await failure_of(there, request, True)
            assert (failure.code(), failure.details()) == (Code.UNAVAILABLE, "the server is shutting down")
            assert "RetryInfo" in details_of(failure)
            there.engine.is_ready = False
            failure = await failure_of(there, request, False)
            assert (failure.code(), failure.details()) == (Code.UNAVAILABLE, "the server is starting")

    run(main)


def test_bytes_that_are_no_message() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            for method in (channel.unary_unary("/jaxserve.v1.GenerationService/Generate"),):
                with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed") as failure:
                    await method(b"\xff\xff\xff")
                assert failure.value.code() is Code.INVALID_ARGUMENT
            streaming = channel.unary_stream("/jaxserve.v1.GenerationService/StreamGenerate")
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed"):
                async for _ in streaming(b"\x0a\xff"):
                    pass

    run(main)


def test_other_services_answer_alike() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.error = RequestError("wrong text", parameter="text", value="x")
            stub = tokenization_pb2_grpc.TokenizationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="wrong text") as failure:
                await stub.Tokenize(tokenization_request())
            assert failure.value.code() is Code.INVALID_ARGUMENT

    def tokenization_request():
        return tokenization_pb2_grpc.jaxserve_dot_v1_dot_tokenization__pb2.TokenizeRequest(text="x")

    run(main)


@pytest.mark.parametrize("text", ["x" * 100_000, "ü" * 100_000, "\ud800 \0\n" * 1000])
def test_long_messages_fit_into_what_clients_take(text: str) -> None:
    async def main() -> None:
        async with serving() as there:
            there.engine.error = RequestError(text, parameter="p" * 10_000, value=text)
            failure = await failure_of(there, generation_pb2.GenerateRequest(text="Hi"), True)
            assert failure.code() is Code.INVALID_ARGUMENT
            assert 500 < len((failure.details() or "").encode()) <= MAX_MESSAGE_BYTES
            assert "BadRequest" in details_of(failure)

    run(main)


def test_paths_of_fields() -> None:
    stream: Any = generation_pb2.StreamGenerateRequest.DESCRIPTOR
    sampling: Any = sampling_pb2.SamplingParams.DESCRIPTOR
    assert field_path(stream, "temperature") == "request.sampling_params.temperature"
    assert field_path(stream, "structured_outputs.regex") == "request.sampling_params.structured_outputs.regex"
    assert field_path(stream, "logit_bias[5]") == "request.sampling_params.logit_bias[5]"
    assert field_path(stream, "input_tokens") == "request.prompt"
    assert field_path(stream, "stream_interval") == "stream_interval"
    assert field_path(sampling, "extra_args") == "extra_args_json"
    assert field_path(stream, "nothing.such") == "nothing.such"
    assert field_path(None, "n") == "n"


def test_who_met_a_limit_is_named() -> None:
    found = unpacked(rich_status(status_of(OverloadedError("full")), "r-1", "key-1"))["QuotaFailure"]
    assert isinstance(found, error_details_pb2.QuotaFailure) and found.violations[0].subject == "key-1"
