"""More than a server can do: refused at once, and nobody who was let in suffers (failure list 4, 12, 23, 27)."""

import asyncio
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from scripts.server_child import RunningServer
from tests.faults.conftest import faulty_environment
from tests.faults.talk import assert_serves, metrics, post, text, total, wait_until_idle
from tests.hooks import injected
from tests.server_process import running_server


async def burst(server: RunningServer, count: int, **body: Any) -> list[httpx2.Response]:
    """So many requests at once."""
    limits = httpx2.Limits(max_connections=count)
    async with httpx2.AsyncClient(timeout=120, limits=limits) as client:
        calls = [client.post(server.http + "/v1/completions", json={"temperature": 0, **body}) for _ in range(count)]
        return list(await asyncio.gather(*calls))


def test_a_burst_of_ten_times_the_capacity_is_cut(server: RunningServer) -> None:
    """Failure list 4: four places, sixteen in the queue, two hundred requests."""
    answers = asyncio.run(burst(server, 200, prompt="reverse moon:", max_tokens=8))
    codes = collections.Counter(answer.status_code for answer in answers)
    assert set(codes) == {200, 429}
    assert codes[200] >= 20
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == " noom"
        else:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == 429


def test_grpc_says_when_to_try_again(server: RunningServer) -> None:
    """Failure list 4 on the other surface."""

    async def run() -> list[grpc.aio.AioRpcError]:
        params = sampling_pb2.SamplingParams(max_tokens=40, ignore_eos=True)
        request = generation_pb2.GenerateRequest(text="1+1=", sampling_params=params)
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            found = await asyncio.gather(*(stub.Generate(request) for _ in range(60)), return_exceptions=True)
        return [one for one in found if isinstance(one, grpc.aio.AioRpcError)]

    errors = asyncio.run(run())
    assert errors
    for error in errors:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0


def test_too_many_waiting_prompt_tokens_are_refused() -> None:
    """Failure list 4: the queue is bounded by tokens too."""
    with running_server("--max-num-queued-tokens", "64", "--max-num-queued-reqs", "1000") as server:
        answers = asyncio.run(burst(server, 40, prompt="reverse moon:" * 3, max_tokens=20, ignore_eos=True))
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert "tokens" in refused.json()["error"]["message"]
        wait_until_idle(server)
        assert_serves(server)


def test_a_key_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """One caller's burst leaves room for others."""
    path = tmp_path / "auth.yaml"
    path.write_text(
        "[{key: greedy, name: greedy, max_concurrent_requests: 1}, {key: other, name: other}, "
        "{key: slow, name: slow, requests_per_minute: 1}]"
    )
    with running_server("--auth-file", str(path)) as server:

        async def run() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(timeout=120, base_url=server.http) as client:
                body = {"prompt": "1+1=", "max_tokens": 60, "ignore_eos": True}
                keys = ["greedy"] * 4 + ["other"] * 2
                calls = [
                    client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
                    for key in keys
                ]
                return list(await asyncio.gather(*calls))

        codes = [answer.status_code for answer in asyncio.run(run())]
        assert sorted(codes[:4]) == [200, 429, 429, 429]
        assert codes[4:] == [200, 200]
        header = {"Authorization": "Bearer slow"}
        found = [
            httpx2.post(server.http + "/v1/completions", json={"prompt": "1+1=", "max_tokens": 1}, headers=header)
            for _ in range(2)
        ]
        assert [answer.status_code for answer in found] == [200, 429]
        assert int(found[1].headers["Retry-After"]) > 30


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with pages for one context, and with no room on its disk for the programs that it compiles."""
    folder = tmp_path_factory.mktemp("cramped")
    (folder / injected.DISK_FULL).touch()
    flags = ("--num-gpu-blocks-override", "10", "--block-size", "16", "--max-model-len", "150", "--deterministic")
    flags += ("--compilation-cache-dir", str(folder / "programs"))
    with running_server(*flags, environment=faulty_environment(folder)) as server:
        yield server


def test_a_pool_that_runs_out_gives_the_same_texts(cramped: RunningServer) -> None:
    """Failure list 12: sequences are preempted and computed again; what no context holds is refused.

    What a context holds the pool holds too, else the server does not start (``test_startup.py`` has that).
    """
    prompts = [f"reverse {word}:" for word in ("moon", "tree", "stone", "river")]
    body = {"ignore_eos": True, "max_tokens": 100}
    expected = [text(cramped, prompt, **body) for prompt in prompts]
    assert total(cramped, "jaxserve:num_preemptions_total") == 0

    async def run() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(timeout=120, base_url=cramped.http) as client:
            bodies = [{"prompt": prompt, "temperature": 0, **body} for prompt in prompts]
            return list(await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies)))

    answers = asyncio.run(run())
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert total(cramped, "jaxserve:num_preemptions_total") > 0
    refused = post(cramped, prompt="1+1=", max_tokens=1000)
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]
    longest = post(cramped, prompt=[7] * 149, max_tokens=1)
    assert longest.status_code == 200, longest.text
    wait_until_idle(cramped)


def test_a_full_disk_is_no_reason_to_fail(cramped: RunningServer) -> None:
    """Failure list 23: the programs are compiled and not kept, and the log says so."""
    assert_serves(cramped)
    assert "File too large" in cramped.log.read_text()


def test_callers_cannot_make_series(server: RunningServer) -> None:
    """Failure list 27: names that clients choose never become labels."""
    post(server, prompt="1+1=", max_tokens=1)
    before = set(metrics(server))
    for i in range(30):
        post(server, prompt="1+1=", max_tokens=1, model=f"m{i}", user=f"u{i}")
        httpx2.post(
            f"{server.http}/v1/completions?x={i}",
            json={"prompt": "1+1=", "max_tokens": 1},
            headers={"X-Request-Id": f"r{i}", "Authorization": f"Bearer k{i}"},
        )
        httpx2.get(f"{server.http}/nowhere/{i}")
    assert {name for name in set(metrics(server)) - before if "http" not in name} == set()


@pytest.mark.parametrize("path", ["/health", "/version"])
def test_what_is_open_answers_under_load(server: RunningServer, path: str) -> None:
    """Probes are not requests: they pass while everything is full."""

    async def run() -> int:
        async with httpx2.AsyncClient(timeout=120, base_url=server.http) as client:
            load = [client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 100}) for _ in range(20)]
            tasks = [asyncio.ensure_future(one) for one in load]
            await asyncio.sleep(0.05)
            answer = await client.get(path)
            await asyncio.gather(*tasks)
            return answer.status_code

    assert asyncio.run(run()) == 200
