"""Generating over gRPC."""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve.client import AsyncClient
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from tests.conftest import REPOSITORY
from tests.grpc_servers import LIMIT, connected, run, serving

Part = generation_pb2.StreamGenerateResponse


def request_for(text: str = "Hi", **sampling: Any) -> generation_pb2.GenerateRequest:
    """A request for a text."""
    return generation_pb2.GenerateRequest(text=text, sampling_params=sampling_pb2.SamplingParams(**sampling))


def stream_for(text: str = "Hi", interval: int | None = None, **sampling: Any) -> generation_pb2.StreamGenerateRequest:
    """A request for a text as it comes."""
    return generation_pb2.StreamGenerateRequest(request=request_for(text, **sampling), stream_interval=interval)


def test_a_whole_answer() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request_for(n=2))
            answer = await call
            assert [one.text for one in answer.completions] == ["0:0 0:1 0:2 0:3 ", "1:0 1:1 1:2 1:3 "]
            assert [list(one.token_ids) for one in answer.completions] == [[0, 1, 2, 3], [10, 11, 12, 13]]
            assert {one.finish_reason for one in answer.completions} == {generation_pb2.FINISH_REASON_STOP}
            assert answer.completions[0].stop_string == "."
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 8, 2)
            assert (answer.prompt.num_tokens, answer.prompt.num_cached_tokens) == (3, 2)
            assert not answer.prompt.token_ids and not answer.prompt.HasField("text")
            assert dict(await call.initial_metadata())["x-request-id"] == answer.request_id
            assert list(there.engine.requests) == [answer.request_id]

    run(main)


def test_a_stream() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            parts = [
                part async for part in generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for())
            ]
            assert [[one.text for one in part.completions] for part in parts] == [
                ["0:0 "],
                ["0:1 "],
                ["0:2 "],
                ["0:3 "],
            ]
            assert [part.HasField("prompt") for part in parts] == [True, False, False, False]
            assert [part.HasField("usage") for part in parts] == [False, False, False, True]
            assert [part.completions[0].finish_reason for part in parts] == [0, 0, 0, generation_pb2.FINISH_REASON_STOP]
            assert parts[-1].usage.completion_tokens == 4
            assert {part.request_id for part in parts} == set(there.engine.requests)

    run(main)


def test_a_client_knows_that_its_request_was_admitted_before_the_first_token() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.stops_at = 0
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for())
            assert dict(await call.initial_metadata())["x-request-id"].startswith("grpc-")
            await there.engine.reached.wait()
            assert len(there.engine.running) == 1
            there.engine.go.set()
            assert len([part async for part in call]) == 4

    run(main)


def test_a_clients_own_name_for_a_request_is_no_name_of_ours() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            answer = await stub.Generate(request_for(), metadata=(("x-request-id", "mine"),))
            assert "mine" not in answer.request_id and "mine" not in list(there.engine.requests)[0]

    run(main)


def test_the_prompt_comes_where_it_is_asked_for() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            request = request_for("Hello")
            request.return_prompt = True
            answer = await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            assert (list(answer.prompt.token_ids), answer.prompt.text) == ([1, 2, 3], "Hello")

    run(main)


def test_texts_of_one_request_come_in_one_message_a_step() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for(n=3))
            parts = [part async for part in call]
            assert [[one.index for one in part.completions] for part in parts] == [[0, 1, 2]] * 4
            for index in range(3):
                text = "".join(one.text for part in parts for one in part.completions if one.index == index)
                assert text == "".join(f"{index}:{step} " for step in range(4))

    run(main)


def test_an_interval_reaches_the_engine() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            async for _ in generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for(interval=3)):
                pass
            assert there.engine.last.stream_interval == 3
            with pytest.raises(grpc.aio.AioRpcError, match="stream_interval must be at least 1, got 0"):
                async for _ in generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(
                    stream_for(interval=0)
                ):
                    pass

    run(main)


def test_what_a_request_says_reaches_the_engine() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = request_for(temperature=0.5, max_tokens=7, stop=["x"])
            request.priority, request.cache_salt, request.truncate_prompt_tokens = -3, "s", 5
            request.add_special_tokens = False
            await stub.Generate(request)
            seen = there.engine.last
            assert (seen.text, seen.priority, seen.cache_salt, seen.add_special_tokens) == ("Hi", -3, "s", False)
            assert (seen.truncate_prompt_tokens, seen.is_strict_length, seen.timeout_s) == (5, True, None)
            assert (seen.params.temperature, seen.params.max_tokens, seen.params.stop_strings) == (0.5, 7, ("x",))
            ids = generation_pb2.GenerateRequest(token_ids=sampling_pb2.TokenIds(ids=[4, 5]), model="fake")
            await stub.Generate(ids)
            assert there.engine.last.token_ids == (4, 5)
            assert (there.engine.last.params.max_tokens, there.engine.last.is_strict_length) == (16, False)

    run(main)


def test_minus_one_token_is_all_that_the_context_holds() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(request_for(max_tokens=-1, min_tokens=20))
            assert there.engine.last.params.max_tokens is None
            there.engine.default_fields = {"max_tokens": 5, "temperature": 0.25}
            await stub.Generate(request_for(max_tokens=-1))
            assert there.engine.last.params.max_tokens is None
            await stub.Generate(request_for())
            assert (there.engine.last.params.max_tokens, there.engine.last.params.temperature) == (5, 0.25)

    run(main)


@pytest.mark.parametrize("prompt", [{"text": ""}, {"token_ids": {}}], ids=["text", "token ids"])
def test_a_prompt_is_not_empty(prompt: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="the prompt must not be empty") as failure:
                await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                    generation_pb2.GenerateRequest(**prompt)
                )
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main)


def test_the_deadline_of_a_call_is_that_of_its_request() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(request_for(), timeout=50)
            assert 40 < (there.engine.last.timeout_s or 0) < 52
            there.engine.stops_at = 2
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Generate(request_for(), timeout=0.2)
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await there.until_idle()

    run(main)


def test_the_servers_own_deadline() -> None:
    async def main() -> None:
        async with serving(request_timeout=7.0) as there, connected(there.target) as channel:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request_for())
            assert there.engine.last.timeout_s == 7.0

    run(main)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("streams", [True, False])
def test_a_cancelled_call_ends_its_request_in_every_phase(step: int, streams: bool) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.stops_at = step
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(stream_for()) if streams else stub.Generate(request_for())
            await there.engine.reached.wait()
            assert there.frontend.ledger.num_in_flight == 1
            call.cancel()
            await there.until_idle()
            while there.frontend.ledger.num_in_flight:
                await asyncio.sleep(0.001)
            assert there.frontend.log.counts.finished["cancelled"] == 1

    run(main)


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def main() -> None:
        async with serving() as there:
            there.engine.stops_at = 1
            code = f"from jaxserve.client import Client; list(Client({there.target!r}).stream('Hi'))"
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=REPOSITORY)
            await there.engine.reached.wait()
            process.kill()
            await there.until_idle()
            await process.wait()
            while there.frontend.ledger.num_in_flight:
                await asyncio.sleep(0.001)

    run(main)


def test_a_slow_reader_gets_fewer_and_longer_messages() -> None:
    async def main() -> None:
        unlimited = ("grpc.max_receive_message_length", -1)
        async with serving() as there, connected(there.target, unlimited) as channel:
            there.engine.joins, there.engine.num_steps = True, 200
            there.engine.texts = [f"{step:06}" + "x" * (1 << 16) for step in range(200)]
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for())
            await call.initial_metadata()
            await asyncio.sleep(0.5)
            parts = [part async for part in call]
            assert "".join(part.completions[0].text for part in parts) == "".join(there.engine.texts)
            assert len(parts) < 150

    run(main)


def test_who_reads_nothing_loses_its_place_and_nobody_else_does() -> None:
    async def main() -> None:
        async with serving(stall_timeout=0.3) as there, connected(there.target) as channel:
            there.engine.num_steps = 200
            there.engine.texts = ["x" * (1 << 16)] * 200
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for())
            await call.initial_metadata()
            await there.until_idle()
            assert there.frontend.ledger.num_in_flight == 0
            there.engine.texts, there.engine.num_steps = None, 4
            async with AsyncClient(there.target) as client:
                assert (await client.generate("Hi")).outputs[0].text == "0:0 0:1 0:2 0:3 "
            with pytest.raises(grpc.aio.AioRpcError, match="did not read the response for 0.3 s") as failure:
                async for _ in call:
                    pass
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(main)


def test_who_never_reads_does_not_keep_the_server_from_ending() -> None:
    async def main() -> None:
        async with serving(stall_timeout=0.2) as there, connected(there.target) as channel:
            there.engine.num_steps = 200
            there.engine.texts = ["x" * (1 << 16)] * 200
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(stream_for())
            await call.initial_metadata()
            await there.until_idle()
            await there.server.stop(0.5)

    run(main)


def test_places_are_counted_by_text() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.stops_at = 0
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            first = stub.Generate(request_for(n=LIMIT - 1))
            await there.engine.reached.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="7 sequences in flight") as failure:
                await stub.Generate(request_for(n=2))
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            there.engine.go.set()
            await first
            await stub.Generate(request_for(n=LIMIT))

    run(main)
