"""What would hold up the event loop runs on threads, on which API keys take turns."""

import asyncio
import contextvars
import threading

from jaxserve.api.logprobs import Logprob
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.server.long_work import MAX_ENTRIES_ON_LOOP, LongWork


def test_many_log_probabilities_are_written_on_a_thread() -> None:
    def thread(num_entries: int) -> threading.Thread:
        packed = PackedLogprobs.of([{token: Logprob(-1.0, 1, "x") for token in range(num_entries)}])
        completion = CompletionOutput(0, "x", [], -1.0, packed)  # pyright: ignore[reportArgumentType]
        output = RequestOutput(request_id="r", prompt="p", prompt_token_ids=[], outputs=[completion], finished=True)
        return asyncio.run(work.write_output(SHARED_TURN, output, lambda _: threading.current_thread()))

    work = LongWork()
    assert thread(MAX_ENTRIES_ON_LOOP) is threading.current_thread()
    assert thread(MAX_ENTRIES_ON_LOOP + 1) is not threading.current_thread()
    work.close()


def test_a_key_does_not_wait_for_the_long_work_of_another() -> None:
    end, field = threading.Event(), contextvars.ContextVar("field", default="")

    async def run() -> tuple[str, list[bool]]:
        work = LongWork()
        busy = [asyncio.create_task(work.run(Turn("one"), end.wait, 60.0)) for _ in range(8)]
        await asyncio.sleep(0)
        field.set("in this context")
        found = await work.run(Turn("other"), field.get)
        end.set()
        waited = await asyncio.gather(*busy)
        work.close()
        return found, waited

    assert asyncio.run(run()) == ("in this context", [True] * 8)
