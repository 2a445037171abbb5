"""What one gRPC caller may take of a server's time and places."""

import asyncio
import contextlib
import gc
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.server import converted_tokens
from jaxserve.server.grpc_api.server import GENERATION
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2, tokenization_pb2_grpc
from jaxserve.server.proto.jaxserve.v1.tokenization_pb2 import DetokenizeRequest
from tests.grpc_servers import connected, run, serving

Code = grpc.StatusCode


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
def test_a_call_without_its_message_loses_its_place(method: str) -> None:
    async def main() -> None:
        async with serving(stall_timeout=0.3) as there, connected(there.target) as channel:
            path = f"/jaxserve.v1.GenerationService/{method}"
            waiting: Any = channel.stream_unary(path, generation_pb2.GenerateRequest.SerializeToString)()
            with pytest.raises(grpc.aio.AioRpcError, match=r"not complete after 0\.3 s") as failure:
                await waiting
            assert failure.value.code() is Code.DEADLINE_EXCEEDED
            empty: Any = channel.stream_unary(path, generation_pb2.GenerateRequest.SerializeToString)()
            await empty.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match="the call has no message") as failure:
                await empty
            assert failure.value.code() is Code.INVALID_ARGUMENT

    run(main)


def test_a_call_that_was_late_leaves_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Reading goes on until the call ends, and fails then: nobody awaits that."""

    async def main() -> None:
        async with serving(stall_timeout=0.3) as there, connected(there.target) as channel:
            path = "/jaxserve.v1.GenerationService/Generate"
            waiting: Any = channel.stream_unary(path, generation_pb2.GenerateRequest.SerializeToString)()
            with pytest.raises(grpc.aio.AioRpcError, match=r"not complete after 0\.3 s"):
                await waiting
            await there.server.stop(0.0)
            gc.collect()
            await asyncio.sleep(0)

    run(main)
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_a_connection_that_does_not_begin_is_closed() -> None:
    async def main() -> None:
        async with serving(stall_timeout=0.3) as there:
            host, _, port = there.target.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(60):
                while await reader.read(1024):  # the server's settings
                    pass
            writer.close()

    run(main)


def test_prompts_that_no_context_holds_are_not_read() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(sampling_params=sampling_pb2.SamplingParams(max_tokens=1))
            request.token_ids.ids.extend([2**40] * 129)
            with pytest.raises(grpc.aio.AioRpcError, match="maximum context length is 128 tokens") as failure:
                await stub.Generate(request)
            assert failure.value.code() is Code.INVALID_ARGUMENT
            request.token_ids.ids[:] = range(200)
            request.truncate_prompt_tokens = -1
            await stub.Generate(request)
            assert there.engine.last.token_ids == tuple(range(72, 200))

    run(main)


def test_texts_of_too_many_tokens_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_tokens, "MAX_CONVERTED_TOKENS", 3)

    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = tokenization_pb2_grpc.TokenizationServiceStub(channel)
            request = DetokenizeRequest()
            request.token_ids.ids.extend([72, 105, 33])
            assert (await stub.Detokenize(request)).text == "Hi!"
            request.token_ids.ids.append(33)
            with pytest.raises(grpc.aio.AioRpcError, match="expected at most 3 tokens at once, got 4") as failure:
                await stub.Detokenize(request)
            assert failure.value.code() is Code.INVALID_ARGUMENT

    run(main)


def test_watchers_leave_places_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no key, and may read nothing."""
    monkeypatch.setattr("jaxserve.server.grpc_api.server._CONNECTIONS_AT_FULL", 2)

    async def main() -> None:
        async with serving(max_concurrent_streams=8) as there, contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(connected(there.target, ("grpc.use_local_subchannel_pool", 1)))
                for _ in range(2)
            ]
            stubs: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]
            watches = [stubs[0].Watch(health_pb2.HealthCheckRequest(service=GENERATION)) for _ in range(4)]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="4 calls watch already") as failure:
                await stubs[1].Watch(health_pb2.HealthCheckRequest()).read()
            assert failure.value.code() is Code.RESOURCE_EXHAUSTED
            stub = generation_pb2_grpc.GenerationServiceStub(channels[1])
            await stub.Generate(generation_pb2.GenerateRequest(text="Hi"))
            watches[0].cancel()
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    again = stubs[1].Watch(health_pb2.HealthCheckRequest())
                    assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
                    break
                await asyncio.sleep(0.001)

    run(main)


@pytest.mark.parametrize("limit", ["grpc_max_connection_idle", "grpc_max_connection_age"])
def test_connections_end_and_are_made_again(limit: str) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {limit: 0.2}
        async with serving(**settings) as there, connected(there.target) as channel:
            there.engine.stops_at = 1
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            if limit == "grpc_max_connection_age":  # which lets calls that run end
                running = asyncio.ensure_future(stub.Generate(generation_pb2.GenerateRequest(text="Hi")))
                await there.engine.reached.wait()
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                there.engine.go.set()
                assert (await running).completions[0].text
            else:
                there.engine.go.set()
                await stub.Generate(generation_pb2.GenerateRequest(text="Hi"))
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert (await stub.Generate(generation_pb2.GenerateRequest(text="Hi"))).completions[0].text

    run(main)
