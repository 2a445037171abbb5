"""The thread that steps an engine, and streams, with an engine whose steps the test allows one by one."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve import EngineDeadError, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.api.errors import DeadlineError, RequestFailedError
from jaxserve.async_llm import EventLoopReaders, EventLoopStream
from jaxserve.engine.loop import Loop
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.engine.stream import deadline_after
from tests.jaxserve.fake_engine import DELTA, PATIENCE_S, FakeEngine, make_request, start_loop


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[Loop]:
    made = start_loop(engine)
    yield made
    engine.allow(1000)
    made.stop()
    assert engine.is_closed


class Reader(EventLoopStream):
    """A stream that is read on an event loop, by default the running one."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, deadline_s: float | None = None):
        super().__init__(event_loop=EventLoopReaders(loop or asyncio.get_running_loop()), deadline_s=deadline_s)


def submit(
    loop: Loop,
    number: int,
    num_tokens: int = 5,
    params: SamplingParams = DELTA,
    reader: Reader | None = None,
) -> Reader:
    """A request that runs, and its stream."""
    reader = reader or Reader()
    loop.submit(reader, lambda: make_request(number, num_tokens, params))
    return reader


async def settled(thread: Loop) -> None:
    """Returns when the thread has seen all that was posted before."""
    await asyncio.wait_for(asyncio.wrap_future(thread.call(int)), PATIENCE_S)


async def rest(stream: Reader) -> list[RequestOutput]:
    """All outputs to the end."""
    outputs: list[RequestOutput] = []
    while not outputs or not outputs[-1].finished:
        outputs.append(await asyncio.wait_for(stream.get(), PATIENCE_S))
    return outputs


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------- readers, fast and slow


def test_a_reader_that_keeps_up_gets_each_token(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = submit(thread, 7, 3)
        for expected in ([7001], [7002], [7003]):
            engine.allow(1)
            output = await stream.get()
            assert output.outputs[0].token_ids == expected
        assert output.finished
        assert output.outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_what_a_slow_reader_missed_comes_in_one_output(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = submit(thread, 7, 100)
        await engine.run(50)
        assert ids([await stream.get()]) == [[7001]]
        await engine.run(1)
        assert ids([await stream.get()]) == [[*range(7002, 7052)]]
        await engine.run(48)
        engine.allow(1)
        assert sum(ids(await rest(stream)), []) == [*range(7052, 7101)]

    asyncio.run(main())


def test_news_of_a_request_that_pauses_still_reach_a_slow_reader(engine: FakeEngine, thread: Loop) -> None:
    """A preempted request gets no token for a while; what it has must not wait for the next."""

    async def main() -> None:
        slow, other = submit(thread, 1, 9), submit(thread, 2, 9)
        await engine.run(4)
        engine.paused.add("1")
        assert ids([await slow.get()]) == [[1001]]
        await engine.run(1)
        assert ids([await slow.get()]) == [[1002, 1003, 1004]]
        engine.allow(100)
        engine.paused.clear()
        assert sum(ids(await rest(slow)), []) == [*range(1005, 1010)]
        assert sum(ids(await rest(other)), []) == [*range(2001, 2010)]

    asyncio.run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_kind_of_output(kind: RequestOutputKind, engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = submit(thread, 3, 4, SamplingParams(output_kind=kind, n=2))
        engine.allow(4)
        outputs = await rest(stream)
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        for index in (0, 1):
            parts = [one for output in outputs for one in output.outputs if one.index == index]
            is_delta = kind is RequestOutputKind.DELTA
            found = sum((part.token_ids for part in parts), []) if is_delta else parts[-1].token_ids
            assert found == [3001, 3002, 3003, 3004]

    asyncio.run(main())


def test_each_step_wakes_an_event_loop_once(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        streams = [submit(thread, number, 1000) for number in range(8)]
        while len(engine.requests) < 8:
            await engine.run(1)
        for stream in streams:
            await stream.get()
        calls: list[int] = []
        original = loop.call_soon_threadsafe

        def counted(callback: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
            if getattr(callback, "__name__", "") == "_wake_all":
                calls.append(len(arguments[0]))
            return original(callback, *arguments, **more)

        loop.call_soon_threadsafe = counted
        for _ in range(3):
            engine.allow(1)
            await asyncio.gather(*(stream.get() for stream in streams))
        assert calls == [8, 8, 8]

    asyncio.run(main())


def test_several_event_loops_share_an_engine(engine: FakeEngine, thread: Loop) -> None:
    found: dict[int, list[int]] = {}

    async def main(number: int) -> None:
        found[number] = sum(ids(await rest(submit(thread, number, 20))), [])

    threads = [threading.Thread(target=lambda n=number: asyncio.run(main(n))) for number in (1, 2, 3)]
    for one in threads:
        one.start()
    engine.allow(200)
    for one in threads:
        one.join(PATIENCE_S)
    assert found == {number: [*range(1000 * number + 1, 1000 * number + 21)] for number in (1, 2, 3)}
    assert len(engine.threads) == 1


def test_a_closed_event_loop_harms_nobody_else(
    engine: FakeEngine, thread: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    submit(thread, 1, reader=Reader(loop))
    loop.close()

    async def main() -> None:
        stream = submit(thread, 2)
        engine.allow(100)
        assert sum(ids(await rest(stream)), []) == [*range(2001, 2006)]

    asyncio.run(main())
    assert "an event loop was closed while 1 requests were running" in caplog.text


# ---------------------------------------------------------------- requests that end early


def test_an_aborted_request_ends_with_what_it_has(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream, other = submit(thread, 1, 100), submit(thread, 2, 9)
        await engine.run(3)
        aborting = asyncio.ensure_future(asyncio.wrap_future(thread.abort(["1", "unknown"])))
        await engine.run(1)
        await aborting
        assert engine.aborted == ["1"]
        outputs = await rest(stream)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        found = sum(ids(outputs), [])
        assert found == [*range(1001, 1001 + len(found))]
        engine.allow(10)
        assert sum(ids(await rest(other)), []) == [*range(2001, 2010)]

    asyncio.run(main())


def test_a_dropped_request_is_aborted_once(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = submit(thread, 1, 100)
        await engine.run(2)
        thread.drop(stream)
        thread.drop(stream)
        engine.allow(1)
        await settled(thread)
        assert engine.aborted == ["1"]
        assert engine.num_unfinished == 0
        again = submit(thread, 1, 2)  # the name is free again, and the old stream no longer ends it
        thread.drop(stream)
        engine.allow(10)
        assert sum(ids(await rest(again)), []) == [1001, 1002]
        thread.drop(again)
        await settled(thread)
        assert engine.aborted == ["1"]

    asyncio.run(main())


def test_a_request_cancelled_before_it_runs_ends_at_once(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = Reader()
        stream.is_cancelled = True
        submit(thread, 1, reader=stream)
        (output,) = await rest(stream)
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        assert engine.num_steps == 0

    asyncio.run(main())


def test_a_name_in_use_fails_the_second_request_alone(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        first, second = submit(thread, 1), submit(thread, 1)
        engine.allow(1)
        with pytest.raises(RequestError, match="request id '1' is in use"):
            await asyncio.wait_for(second.get(), PATIENCE_S)
        thread.drop(second)
        engine.allow(10)
        assert sum(ids(await rest(first)), []) == [*range(1001, 1006)]
        assert engine.aborted == []

    asyncio.run(main())


def test_a_request_that_fails_raises_in_its_own_stream(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        bad, good = submit(thread, 1), submit(thread, 2)
        await engine.run(2)
        request = engine.requests["1"]

        def fail() -> None:
            request.error = RequestFailedError("the grammar broke")
            request.samples[0].sequence.finish_reason = "error"
            engine.before_step = None

        engine.before_step = fail
        original = engine.step
        engine.step = lambda: [*original(), *([request] if engine.requests.pop("1", None) else [])]
        engine.allow(10)
        found = [await bad.get()]
        with pytest.raises(RequestFailedError, match="request 1 failed: the grammar broke"):
            while True:
                found.append(await asyncio.wait_for(bad.get(), PATIENCE_S))
        assert sum(ids(found), [])[0] == 1001
        assert sum(ids(await rest(good)), []) == [*range(2001, 2006)]

    asyncio.run(main())


def test_an_output_that_cannot_be_made_fails_its_request_alone(
    engine: FakeEngine, thread: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RequestState.next_output

    def next_output(self: RequestState, with_metrics: bool = False) -> RequestOutput | None:
        if self.request_id == "1" and self.samples[0].sequence.num_output_tokens == 2:
            raise ArithmeticError("out of luck")
        return original(self, with_metrics)

    monkeypatch.setattr(RequestState, "next_output", next_output)

    async def main() -> None:
        bad, good = submit(thread, 1), submit(thread, 2)
        engine.allow(1)
        await bad.get()
        engine.allow(10)
        with pytest.raises(RequestFailedError, match="request 1 failed: ArithmeticError, see the log"):
            await asyncio.wait_for(bad.get(), PATIENCE_S)
        assert sum(ids(await rest(good)), []) == [*range(2001, 2006)]
        assert engine.aborted == ["1"]

    asyncio.run(main())


# ---------------------------------------------------------------- deadlines


def test_a_deadline_that_passes_before_a_request_runs_ends_it_unseen_by_the_engine(
    engine: FakeEngine, thread: Loop
) -> None:
    async def main() -> None:
        stream, other = Reader(), submit(thread, 2)
        request = make_request(1)  # prepared in time
        stream.deadline_s = time.monotonic() + 0.05

        def prepare() -> RequestState:
            time.sleep(0.1)
            return request

        thread.submit(stream, prepare)
        engine.allow(100)
        with pytest.raises(DeadlineError, match=r"deadline exceeded .* s after arrival, with 0 output tokens"):
            await asyncio.wait_for(stream.get(), PATIENCE_S)
        assert sum(ids(await rest(other)), []) == [*range(2001, 2006)]
        assert engine.aborted == []

    asyncio.run(main())


def test_a_deadline_ends_a_request_before_the_next_step(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        deadline_s = time.monotonic() + 0.2
        stream, other = Reader(deadline_s=deadline_s), submit(thread, 2, 9)
        submit(thread, 1, 1000, reader=stream)
        await engine.run(3)
        assert ids([await stream.get()]) == [[1001]]
        while time.monotonic() <= deadline_s:
            await asyncio.sleep(0.01)
        await engine.run(1)  # the step that had begun
        assert engine.aborted == ["1"]
        with pytest.raises(DeadlineError, match="with 4 output tokens"):
            while True:
                await asyncio.wait_for(stream.get(), PATIENCE_S)
        engine.allow(10)
        assert sum(ids(await rest(other)), []) == [*range(2001, 2010)]

    asyncio.run(main())


def test_a_deadline_that_passes_before_a_request_is_prepared(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        stream = Reader(deadline_s=time.monotonic() - 1)
        submit(thread, 1, reader=stream)
        with pytest.raises(DeadlineError, match="deadline exceeded before the request was prepared"):
            await asyncio.wait_for(stream.get(), PATIENCE_S)

    asyncio.run(main())


def test_each_deadline_is_kept(engine: FakeEngine, thread: Loop) -> None:
    """That of a request which ended in time neither hides a later one nor ends the next request of its name."""

    async def main() -> None:
        start_s = time.monotonic()
        first = submit(thread, 1, 1, reader=Reader(deadline_s=start_s + 0.1))
        late = submit(thread, 2, 1_000_000, reader=Reader(deadline_s=start_s + 0.3))
        engine.allow(10_000_000)
        await rest(first)
        again = submit(thread, 1, 1_000_000, reader=Reader(deadline_s=start_s + 0.5))
        for stream, end_s in ((late, 0.3), (again, 0.5)):
            with pytest.raises(DeadlineError):
                await rest(stream)
            assert time.monotonic() - start_s >= end_s
        assert engine.aborted == ["2", "1"]

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "1", True])
def test_a_timeout_is_seconds(timeout_s: Any) -> None:
    with pytest.raises(RequestError, match="timeout_s must be None or a number above 0"):
        deadline_after(timeout_s)
    assert deadline_after(None) is None


# ---------------------------------------------------------------- progress


def test_progress_can_be_watched(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        while not thread.is_idle:
            await asyncio.sleep(0)
        seen = thread.num_done
        await settled(thread)
        assert thread.num_done > seen
        stream = submit(thread, 1, 5)
        await engine.run(2)
        seen = thread.num_done
        assert not thread.is_idle  # the next step hangs
        await engine.run(1)
        assert thread.num_done == seen + 1
        engine.allow(10)
        await rest(stream)
        while not thread.is_idle:
            await asyncio.sleep(0)

    asyncio.run(main())


def test_streams_have_ended_before_the_devices_are_free(engine: FakeEngine) -> None:
    thread = start_loop(engine)
    closing, may_close = threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        assert may_close.wait(PATIENCE_S)

    engine.close = close
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    thread.wait_ended()
    assert closing.wait(PATIENCE_S)
    assert not thread.is_idle  # a device that cannot be freed is no progress
    may_close.set()
    stopping.join(PATIENCE_S)
    assert thread.is_idle


# ---------------------------------------------------------------- the end of an engine


def test_when_the_engine_dies_every_stream_says_why(engine: FakeEngine) -> None:
    thread = start_loop(engine)

    def die() -> None:
        if engine.num_steps == 2:
            raise EngineDeadError("the engine stopped: a device is gone") from OSError("a device is gone")

    engine.before_step = die

    async def main() -> None:
        streams = [submit(thread, number, 100) for number in range(3)]
        engine.allow(3)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the engine stopped: a device is gone") as caught:
                await rest(stream)
            assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineDeadError, match="a device is gone"):
            submit(thread, 9)
        with pytest.raises(EngineDeadError, match="a device is gone"):
            thread.call(int)
        thread.drop(streams[0])

    asyncio.run(main())
    thread.stop()
    assert isinstance(thread.failure, OSError)
    assert not thread.is_running
    assert engine.is_closed


def test_what_is_in_the_inbox_when_the_engine_dies_is_answered(engine: FakeEngine) -> None:
    thread = start_loop(engine)

    async def main() -> None:
        first = submit(thread, 1, 100)
        late: list[Any] = []

        def die() -> None:
            late.append(submit(thread, 2, reader=Reader(first.readers.loop)))
            late.append(thread.call(int))
            raise RuntimeError("out of luck")

        engine.before_step = die
        engine.allow(1)
        with pytest.raises(EngineDeadError, match="out of luck"):
            await asyncio.wait_for(first.get(), PATIENCE_S)
        with pytest.raises(EngineDeadError, match="out of luck"):
            await asyncio.wait_for(late[0].get(), PATIENCE_S)
        with pytest.raises(EngineDeadError, match="out of luck"):
            late[1].result(PATIENCE_S)

    asyncio.run(main())
    thread.stop()


def test_stopping_ends_streams_with_what_they_have(engine: FakeEngine) -> None:
    thread = start_loop(engine)

    async def main() -> None:
        stream = submit(thread, 1, 100)
        await engine.run(3)
        stopping = asyncio.ensure_future(asyncio.to_thread(thread.stop))
        while thread.is_running:
            await asyncio.sleep(0)
        engine.allow(1)  # the step that has begun
        outputs = await rest(stream)
        await stopping
        assert outputs[-1].outputs[0].finish_reason == "abort"
        found = sum(ids(outputs), [])
        assert found == [*range(1001, 1001 + len(found))]
        with pytest.raises(EngineDeadError, match="the engine stopped: it was shut down"):
            submit(thread, 2)

    asyncio.run(main())
    thread.stop()
    assert engine.is_closed
    assert thread.failure is None


def test_requests_may_go_on_while_the_engine_drains(engine: FakeEngine) -> None:
    thread = start_loop(engine)

    async def main() -> None:
        stream, dropped = submit(thread, 1, 8), submit(thread, 2, 10_000)
        await engine.run(2)
        stopping = asyncio.ensure_future(asyncio.to_thread(thread.stop, PATIENCE_S))
        while thread.is_running:
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            submit(thread, 3)
        thread.drop(dropped)
        engine.allow(100)
        outputs = await rest(stream)
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert sum(ids(outputs), []) == [*range(1001, 1009)]
        await stopping
        assert engine.aborted == ["2"]

    asyncio.run(main())


def test_stopping_again_cuts_the_draining_short(engine: FakeEngine) -> None:
    thread = start_loop(engine)

    async def main() -> None:
        stream = submit(thread, 1, 1_000_000)
        await engine.run(1)
        draining = asyncio.ensure_future(asyncio.to_thread(thread.stop, 1e6))
        while thread.is_running:
            await asyncio.sleep(0)
        engine.allow(10_000)
        await asyncio.to_thread(thread.stop)
        await draining
        assert (await rest(stream))[-1].outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_an_engine_that_cannot_be_closed_does_not_keep_the_thread(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close() -> None:
        raise OSError("stuck")

    monkeypatch.setattr(engine, "close", close)
    start_loop(engine).stop()
    assert "failed to close the engine" in caplog.text


# ---------------------------------------------------------------- the thread itself


def test_an_idle_engine_is_not_stepped(engine: FakeEngine, thread: Loop) -> None:
    async def main() -> None:
        engine.allow(1000)
        for number in (1, 2):
            await rest(submit(thread, number, 5))
            for _ in range(20):
                await settled(thread)
            assert engine.num_steps == 5 * number

    asyncio.run(main())


def test_calls_run_between_steps_on_the_thread_and_may_fail(engine: FakeEngine, thread: Loop) -> None:
    def divide() -> float:
        return 1 / 0

    async def main() -> None:
        ran_on = await asyncio.wrap_future(thread.call(threading.get_ident))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(thread.call(divide))
        engine.allow(100)
        await rest(submit(thread, 1))
        assert engine.threads == {ran_on}

    asyncio.run(main())


def test_the_log_line_comes_while_it_works_and_ends_when_it_rests(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU", interval_s=0.0)
    thread = start_loop(engine, stats)

    async def main() -> None:
        engine.allow(100)
        await rest(submit(thread, 1, 3))
        while not stats.is_quiet:
            await settled(thread)

    asyncio.run(main())
    thread.stop()
    assert "Avg generation throughput" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_a_command_ends_neither_the_thread_nor_a_wait(
    error: type[BaseException], engine: FakeEngine, thread: Loop
) -> None:
    def command() -> None:
        raise error

    async def main() -> None:
        with pytest.raises(error):
            thread.call(command).result(PATIENCE_S)
        await settled(thread)
        stream = submit(thread, 1, 3)
        engine.allow(10)
        assert sum(ids(await rest(stream)), []) == [1001, 1002, 1003]

    asyncio.run(main())
    assert thread.is_running


def test_an_unforeseen_error_while_a_request_is_queued_is_its_own(
    engine: FakeEngine, thread: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = engine.enqueue

    def faulty(request: RequestState) -> None:
        if request.request_id == "2":
            raise KeyError("secret")
        enqueue(request)

    monkeypatch.setattr(engine, "enqueue", faulty)

    async def main() -> None:
        first, second, third = (submit(thread, number, 2) for number in (1, 2, 3))
        engine.allow(10)
        with pytest.raises(RequestFailedError, match="KeyError, see the log"):
            await rest(second)
        for stream in (first, third):
            assert len(sum(ids(await rest(stream)), [])) == 2

    asyncio.run(main())
