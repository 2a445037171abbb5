"""What comes of a request is joined until it is read."""

import asyncio
from typing import Any

import pytest

from jaxserve import EngineDeadError, RequestOutput
from jaxserve.errors import DeadlineError
from jaxserve.logprobs import Logprob
from jaxserve.outputs import CompletionOutput, RequestMetrics
from jaxserve.server.engine_process.news import error_news, news_to_proto
from jaxserve.server.engine_slot import EngineSlot
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2


def delta(index: int, text: str, token_ids: list[int], **more: Any) -> CompletionOutput:
    logprobs = [{token: Logprob(-0.5, 1, "x")} for token in token_ids]
    return CompletionOutput(index, text, token_ids, -0.5, logprobs, **more)


def news(*outputs: CompletionOutput, is_first: bool = False, finished: bool = False) -> engine_pb2.Output:
    output = RequestOutput(
        request_id="engine's",
        prompt="a b",
        prompt_token_ids=[1, 2],
        outputs=list(outputs),
        finished=finished,
        prompt_logprobs=[None, {2: Logprob(-1.0, 3, "b")}],
        metrics=RequestMetrics(100.0, 101.0, 102.0, 103.0, 104.0),
        num_cached_tokens=1,
    )
    return engine_pb2.Output.FromString(news_to_proto(5, output, is_first).SerializeToString())


def test_unread_deltas_are_joined_in_order_and_by_index() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        slot.put(news(delta(1, "é", [10]), is_first=True))
        slot.put(news(delta(0, "x", [20]), delta(1, "b", [11, 12])))
        slot.put(news(delta(1, "c", [13], finish_reason="stop", stop_reason="c")))
        output = await slot.get()
        assert [one.index for one in output.outputs] == [0, 1]
        assert output.outputs[1] == delta(1, "ébc", [10, 11, 12, 13], finish_reason="stop", stop_reason="c")
        assert output.outputs[0] == delta(0, "x", [20])
        assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("a b", [1, 2], 1)
        assert output.prompt_logprobs == [None, {2: Logprob(-1.0, 3, "b")}]
        assert not output.finished and output.metrics is None
        slot.put(news(delta(0, "y", [21], finish_reason="length"), finished=True))
        last = await slot.get()
        assert last.outputs == [delta(0, "y", [21], finish_reason="length")]
        assert last.finished and last.prompt_token_ids == [1, 2] and last.prompt_logprobs is None
        assert last.request_id == "name"
        times = last.metrics
        assert times is not None and times.time_to_first_token_s == pytest.approx(3.0)
        assert times.latency_s == pytest.approx(4.0)

    asyncio.run(main())


def test_a_reader_waits_for_news() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        reading = asyncio.ensure_future(slot.get())
        await asyncio.sleep(0)
        assert not reading.done()
        slot.put(news(delta(0, "x", [20]), is_first=True))
        assert (await reading).outputs[0].text == "x"

    asyncio.run(main())


def test_an_error_comes_behind_what_was_there() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        slot.put(news(delta(0, "x", [20]), is_first=True))
        slot.put(error_news(5, DeadlineError("late")))
        assert slot.has_ended
        output = await slot.get()
        assert output.outputs[0].text == "x" and not output.finished
        slot.fail(EngineDeadError("dead"))  # the first error stays
        with pytest.raises(DeadlineError, match="late"):
            await slot.get()

    asyncio.run(main())


def test_what_came_in_full_is_read_after_the_engine_has_died() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        slot.put(news(delta(0, "x", [20], finish_reason="stop"), is_first=True, finished=True))
        slot.fail(EngineDeadError("dead"))
        assert (await slot.get()).finished

    asyncio.run(main())


def test_a_deadline_that_the_engine_process_does_not_keep_is_kept_here() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        slot.begin(0.05)
        with pytest.raises(DeadlineError, match=r"not done within 0\.05 s"):
            await slot.get()
        assert not slot.has_ended  # so that its request is cancelled
        slot.close()

    asyncio.run(main())


def test_what_came_in_full_is_read_after_its_deadline() -> None:
    async def main() -> None:
        slot = EngineSlot(5, "name")
        slot.begin(0.0)
        slot.put(news(delta(0, "x", [20], finish_reason="stop"), finished=True))
        await asyncio.sleep(0.6)  # the slot keeps deadlines half a second later than the engine process
        output = await slot.get()
        assert output.finished
        assert output.outputs == [delta(0, "x", [20], finish_reason="stop")]

    asyncio.run(main())
