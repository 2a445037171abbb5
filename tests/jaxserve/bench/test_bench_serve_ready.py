"""``jaxserve bench serve``: how long it waits for a server, and for what."""

import asyncio
import time
from typing import Any

import pytest

from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.ready import NotReadyError, ReadyCheck, ask_http
from jaxserve.bench.serve.records import BenchServeError
from tests.jaxserve.fake_openai import Script, Seen, Wire, fake_server


class Question:
    """Something to ask, which finds a response after some tries."""

    def __init__(self, num_failures: int, error: type[BenchServeError] = NotReadyError):
        self.num_asked = 0
        self._num_failures = num_failures
        self._error = error

    async def ask(self) -> int:
        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            raise self._error(f"failure {self.num_asked}")
        return self.num_asked


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other quickly."""
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 0.01)


def test_a_server_is_asked_until_it_is_ready() -> None:
    assert asyncio.run(ReadyCheck(60.0).wait(Question(3).ask)) == 4


def test_without_time_it_is_asked_once() -> None:
    question = Question(1)
    with pytest.raises(NotReadyError, match="failure 1"):
        asyncio.run(ReadyCheck(0.0).wait(question.ask))
    assert question.num_asked == 1


def test_what_waiting_does_not_help_ends_it() -> None:
    question = Question(1, BenchServeError)
    with pytest.raises(BenchServeError, match="failure 1"):
        asyncio.run(ReadyCheck(60.0).wait(question.ask))
    assert question.num_asked == 1


def test_waits_share_one_limit_and_the_last_try_comes_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 10.0)

    async def wait_twice(first: Question, second: Question) -> None:
        ready = ReadyCheck(0.2)
        for question in (first, second):
            with pytest.raises(NotReadyError):
                await ready.wait(question.ask)

    first, second = Question(9), Question(9)
    start_s = time.monotonic()
    asyncio.run(wait_twice(first, second))
    assert 0.2 <= time.monotonic() - start_s < 5.0
    assert (first.num_asked, second.num_asked) == (2, 1)


def ask(script: Script, ready: ReadyCheck) -> Any:
    """What comes of a question to a server that follows a script."""

    async def work(url: str) -> Any:
        client = HttpClient(url)
        try:
            return await ready.wait(lambda: ask_http(client, "GET", "/v1/models"))
        finally:
            await client.close()

    with fake_server(script) as server:
        return asyncio.run(work(server.url))


def test_a_server_that_never_responses_is_given_up() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await asyncio.sleep(60)

    with pytest.raises(NotReadyError, match="no response from the server within"):
        ask(script, ReadyCheck(0.1))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_statuses_of_servers_that_are_not_ready(status: int) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.respond(status, "starting")

    with pytest.raises(NotReadyError, match=f"/v1/models responds with status {status}: .*starting"):
        ask(script, ReadyCheck(0.0))


@pytest.mark.parametrize("status", [200, 401, 404, 429, 500])
def test_other_statuses_are_responses(status: int) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.respond(status, {})

    assert ask(script, ReadyCheck(60.0)).status == status
