"""What would hold up the event loop runs on threads, on which API keys take turns."""

import asyncio
import contextvars
import itertools
import threading

import pytest

from jaxserve.api.logprobs import Logprob
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.server import long_work
from jaxserve.server.long_work import LONG_WORK_SHARE, MAX_ENTRIES_ON_LOOP, LongWork


def test_many_log_probabilities_are_written_on_a_thread() -> None:
    def thread(num_entries: int) -> threading.Thread:
        packed = PackedLogprobs.of([{token: Logprob(-1.0, 1, "x") for token in range(num_entries)}])
        completion = CompletionOutput(0, "x", [], -1.0, packed)  # pyright: ignore[reportArgumentType]
        output = RequestOutput(request_id="r", prompt="p", prompt_token_ids=[], outputs=[completion], finished=True)
        return asyncio.run(work.write_output(SHARED_TURN, output, lambda _: threading.current_thread()))

    work = LongWork(lambda _: False)
    assert thread(MAX_ENTRIES_ON_LOOP) is threading.current_thread()
    assert thread(MAX_ENTRIES_ON_LOOP + 1) is not threading.current_thread()
    work.close()


def test_a_key_does_not_wait_for_the_long_work_of_another() -> None:
    end, field = threading.Event(), contextvars.ContextVar("field", default="")

    async def run() -> tuple[str, list[bool]]:
        work = LongWork(lambda _: True)
        busy = [asyncio.create_task(work.run(Turn("one"), end.wait, 60.0)) for _ in range(8)]
        await asyncio.sleep(0)
        field.set("in this context")
        found = await work.run(Turn("other"), field.get)
        end.set()
        waited = await asyncio.gather(*busy)
        work.close()
        return found, waited

    assert asyncio.run(run()) == ("in this context", [True] * 8)


PIECE_S = 1000.0
"""What the clock of threads says that each piece of work takes, so that a rest outlasts the test."""


def goes_on(
    monkeypatch: pytest.MonkeyPatch, turn: Turn, *, is_shared: bool, within_s: float = 60.0, end: str = "result"
) -> bool:
    """Whether a key's second piece of work ends within some seconds of its first one."""
    clock = itertools.count(0.0, PIECE_S)
    monkeypatch.setattr(long_work.time, "thread_time", lambda: next(clock))
    began, may_end = threading.Event(), threading.Event()

    def piece() -> None:
        began.set()
        may_end.wait(60.0)
        if end == "error":
            raise ValueError("a bad body")

    async def run() -> bool:
        work = LongWork(lambda key: is_shared and key == turn.key)
        first = asyncio.create_task(work.run(turn, piece))
        await asyncio.to_thread(began.wait, 60.0)
        if end == "cancelled":
            first.cancel()
        may_end.set()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(work.run(turn, lambda: None))
        assert await work.run(Turn("other"), lambda: "has not rested") == "has not rested"
        done, _ = await asyncio.wait([second], timeout=within_s)
        second.cancel()
        work.close()
        return bool(done)

    return asyncio.run(run())


@pytest.mark.parametrize("end", ["result", "error", "cancelled"])
def test_a_key_rests_after_its_work_while_others_have_requests(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    assert not goes_on(monkeypatch, Turn("one"), is_shared=True, within_s=0.05, end=end)


def test_a_key_alone_and_one_of_all_the_weight_and_none_do_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert goes_on(monkeypatch, Turn("one"), is_shared=False)
    assert goes_on(monkeypatch, Turn("one", 1 / LONG_WORK_SHARE), is_shared=True)
    assert goes_on(monkeypatch, SHARED_TURN, is_shared=True)
