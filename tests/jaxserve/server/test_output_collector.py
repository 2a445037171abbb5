"""What comes of a request is joined until it is read."""

import asyncio
from typing import Any

import pytest

from jaxserve import EngineDeadError, RequestOutput
from jaxserve.api.errors import DeadlineError
from jaxserve.api.logprobs import Logprob
from jaxserve.api.outputs import CompletionOutput, RequestMetrics
from jaxserve.server.output_collector import OutputCollector


def delta(index: int, text: str, token_ids: list[int], **more: Any) -> CompletionOutput:
    logprobs = [{token: Logprob(-0.5, 1, "x")} for token in token_ids]
    return CompletionOutput(index, text, token_ids, -0.5, logprobs, **more)


def output(*deltas: CompletionOutput, is_first: bool = False, finished: bool = False) -> RequestOutput:
    """An output as the engine process sends it."""
    return RequestOutput(
        request_id="engine's",
        prompt="a b" if is_first else None,
        prompt_token_ids=[1, 2] if is_first else [],
        outputs=list(deltas),
        finished=finished,
        prompt_logprobs=[None, {2: Logprob(-1.0, 3, "b")}] if is_first else None,
        metrics=RequestMetrics(first_token_latency=3.0) if finished else None,
        num_cached_tokens=1,
    )


def test_unread_deltas_are_joined_in_order_and_by_index() -> None:
    async def main() -> None:
        collector = OutputCollector()
        collector.put(output(delta(1, "é", [10]), is_first=True))
        collector.put(output(delta(0, "x", [20]), delta(1, "b", [11, 12])))
        collector.put(output(delta(1, "c", [13], finish_reason="stop", stop_reason="c")))
        found = await collector.get()
        assert [one.index for one in found.outputs] == [0, 1]
        assert found.outputs[1] == delta(1, "ébc", [10, 11, 12, 13], finish_reason="stop", stop_reason="c")
        assert found.outputs[0] == delta(0, "x", [20])
        assert (found.prompt, found.prompt_token_ids, found.num_cached_tokens) == ("a b", [1, 2], 1)
        assert found.prompt_logprobs == [None, {2: Logprob(-1.0, 3, "b")}]
        assert not found.finished and found.metrics is None
        collector.put(output(delta(0, "y", [21], finish_reason="length"), finished=True))
        last = await collector.get()
        assert last.outputs == [delta(0, "y", [21], finish_reason="length")]
        assert last.finished and last.prompt_token_ids == [] and last.prompt_logprobs is None
        assert last.metrics == RequestMetrics(first_token_latency=3.0)

    asyncio.run(main())


def test_a_reader_waits_for_an_output() -> None:
    async def main() -> None:
        collector = OutputCollector()
        reading = asyncio.ensure_future(collector.get())
        await asyncio.sleep(0)
        assert not reading.done()
        collector.put(output(delta(0, "x", [20]), is_first=True))
        assert (await reading).outputs[0].text == "x"

    asyncio.run(main())


def test_an_error_comes_behind_what_was_there() -> None:
    async def main() -> None:
        collector = OutputCollector()
        collector.put(output(delta(0, "x", [20]), is_first=True))
        collector.put(DeadlineError("late"))
        assert collector.has_ended
        found = await collector.get()
        assert found.outputs[0].text == "x" and not found.finished
        collector.fail(EngineDeadError("dead"))  # the first error stays
        with pytest.raises(DeadlineError, match="late"):
            await collector.get()

    asyncio.run(main())


def test_what_came_in_full_is_read_after_the_engine_has_died() -> None:
    async def main() -> None:
        collector = OutputCollector()
        collector.put(output(delta(0, "x", [20], finish_reason="stop"), is_first=True, finished=True))
        collector.fail(EngineDeadError("dead"))
        assert (await collector.get()).finished

    asyncio.run(main())


def test_a_deadline_that_the_engine_process_does_not_keep_is_kept_here() -> None:
    async def main() -> None:
        collector = OutputCollector(0.05)
        with pytest.raises(DeadlineError, match=r"not finished within 0\.05 s"):
            await collector.get()
        assert not collector.has_ended  # so that its request is cancelled

    asyncio.run(main())


def test_what_came_in_full_is_read_after_its_deadline() -> None:
    async def main() -> None:
        collector = OutputCollector(0.0)
        collector.put(output(delta(0, "x", [20], finish_reason="stop"), finished=True))
        await asyncio.sleep(0.6)  # the collector keeps deadlines half a second later than the engine process
        found = await collector.get()
        assert found.finished
        assert found.outputs == [delta(0, "x", [20], finish_reason="stop")]

    asyncio.run(main())
