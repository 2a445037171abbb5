"""API keys take turns: what one asks for does not wait until all that another one asked for is done."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import RequestError
from jaxserve.api.errors import ConfigError
from jaxserve.api.request import Request
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.api.turns import SHARED_TURN, FairThreads, Turn, TurnQueue, Turns
from jaxserve.engine.loop import Loop
from jaxserve.scheduling.queues import SequenceQueues
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.auth import Authenticator
from jaxserve.server.errors import UnavailableError
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.renderers import Renderers
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo
from jaxserve.structured_output.grammars import GrammarCompiler, GrammarLimits
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.fake_engine import DELTA, PATIENCE_S, FakeEngine, make_request
from tests.jaxserve.test_engine_thread import Reader
from tests.observed_engine import ANYBODY, make_frontend

ONE, OTHER = Turn("one"), Turn("other")


def served(weights: dict[str, float], number: int) -> list[str]:
    """The keys of some turns, if all keys have work all the time."""
    turns = Turns()
    for key in weights:
        turns.join(key)
    found = list[str]()
    for _ in range(number):
        found.append(turns.next(weights))
        turns.take(Turn(found[-1], weights[found[-1]]), 1.0)
    return found


def test_keys_have_turns_by_their_weights() -> None:
    assert served({"a": 1, "b": 1}, 6) == ["a", "b"] * 3
    assert [served({"a": 1, "b": 3, "c": 0.5}, 90).count(key) for key in "abc"] == [20, 60, 10]


def test_items_of_a_key_are_in_order_and_those_of_several_in_turns() -> None:
    queue = TurnQueue[int]()
    for item in range(3):
        queue.put(item, ONE, 1.0)
    queue.put(10, OTHER, 5.0)
    queue.put(11, OTHER, 5.0)
    assert [queue.take(queue.keys) for _ in range(3)] == [0, 10, 1]
    assert queue.take([OTHER.key]) == 11
    assert [*queue.keys] == [ONE.key]
    assert (queue.clear(), [*queue.keys]) == ([2], [])


def test_who_comes_later_does_not_catch_up() -> None:
    turns = Turns()
    turns.join("a")
    for _ in range(10):
        turns.take(Turn("a"), 1.0)
    turns.join("b")
    found = list[str]()
    for _ in range(4):
        found.append(turns.next(("a", "b")))
        turns.take(Turn(found[-1]), 1.0)
    assert found == ["b", "a", "b", "a"]


# ---------------------------------------------------------------- threads


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(2, "test")
    yield made
    made.shutdown(cancel_futures=True)


def test_a_key_holds_all_threads_but_one(threads: FairThreads) -> None:
    go, begun = threading.Event(), list[int]()

    def slow(number: int) -> None:
        begun.append(number)
        assert go.wait(PATIENCE_S)

    flood = [threads.submit(slow, number, turn=ONE) for number in range(20)]
    for number in range(3):  # while the first of the flood still runs
        assert threads.submit(lambda number=number: number, turn=OTHER).result(PATIENCE_S) == number
    assert begun == [0]
    go.set()
    concurrent.futures.wait(flood, PATIENCE_S)
    assert begun == [*range(20)]


def test_without_keys_all_threads_work(threads: FairThreads) -> None:
    barrier = threading.Barrier(2)
    both = [threads.submit(barrier.wait, PATIENCE_S) for _ in range(2)]
    assert sorted(one.result(PATIENCE_S) for one in both) == [0, 1]


def test_long_ones_have_fewer_turns() -> None:
    """With one thread, which is busy until all wait."""
    threads, go, order = FairThreads(1, "test"), threading.Event(), list[str]()
    threads.submit(go.wait, PATIENCE_S)
    for cost, turn in ((3.0, ONE), (1.0, OTHER)):
        for _ in range(6):
            threads.submit(order.append, turn.key, turn=turn, cost=cost)
    go.set()
    threads.shutdown()
    assert [order[:8].count(turn.key) for turn in (ONE, OTHER)] == [2, 6]
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(int)


def test_failures_and_cancellations_are_those_of_one_function(threads: FairThreads) -> None:
    go = threading.Event()
    first, failing, last = (threads.submit(call, turn=ONE) for call in (go.wait, lambda: 1 // 0, lambda: "done"))
    cancelled = threads.submit(list, turn=ONE)
    assert cancelled.cancel()
    go.set()
    assert first.result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)
    assert last.result(PATIENCE_S) == "done"


def test_prompts_are_prepared_in_turns() -> None:
    engine, go = FakeEngine(), threading.Event()
    loop = Loop(engine)

    async def run() -> None:
        def slow() -> Any:
            assert go.wait(PATIENCE_S)
            return make_request(1, 1, DELTA)

        flood = [Reader() for _ in range(5)]
        for reader in flood:
            loop.submit(reader, slow, ONE)
        short = Reader()
        loop.submit(short, lambda: make_request(2, 1, DELTA), OTHER)
        engine.allow(100)
        assert (await asyncio.wait_for(short.get(), PATIENCE_S)).finished
        assert not any(reader.contents for reader in flood)
        assert loop.call_aside(lambda: "text", OTHER).result(PATIENCE_S) == "text"
        go.set()

    asyncio.run(run())
    loop.stop()


# ---------------------------------------------------------------- templates and grammars

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def test_templates_are_rendered_in_turns() -> None:
    """A flood of endless ones of one key holds no other up."""
    renderers = Renderers(20.0)
    slow, fast = (EngineInfo(model_pb2.Model(), {}, None, {"default": text}) for text in (LOOP, "done"))

    async def run() -> None:
        flood = [asyncio.create_task(renderers.render(CHAT, slow, turn=ONE)) for _ in range(8)]
        await asyncio.sleep(0)
        rendered = await asyncio.wait_for(renderers.render(CHAT, fast, turn=OTHER), PATIENCE_S)
        assert rendered is not None and rendered.text == "done"
        assert not any(task.done() for task in flood)
        renderers.end(UnavailableError("over"))
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(run())
    renderers.close()


def test_grammars_are_compiled_in_turns(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """Bad ones of one key neither hold others up nor take their places."""
    limits = GrammarLimits(time_s=60.0, max_waiting=2)
    compiler = GrammarCompiler(tiny_tokenizers["byte-level"], 262, [262], limits=limits)
    slow = compiler.submit(StructuredOutputsParams(json={"type": "integer", "multipleOf": 62615533}), ONE)
    shared = StructuredOutputsParams(regex="ab")
    waiting = compiler.submit(shared, ONE)
    with pytest.raises(RequestError, match="2 grammars are waiting to be compiled"):
        compiler.submit(StructuredOutputsParams(regex="b"), ONE).result(PATIENCE_S)
    own = compiler.submit(shared, OTHER)
    assert own.result(PATIENCE_S).constraint() is not None
    assert not slow.done() and not waiting.done()
    assert compiler.submit(shared, ONE) is own
    compiler.close()


# ---------------------------------------------------------------- the scheduler's queue


def enqueued(queues: SequenceQueues, turn: Turn, names: str, num_tokens: int = 10, priority: int = 0) -> None:
    """Adds a sequence for each name."""
    for name in names:
        request = Request(request_id=name, turn=turn, priority=priority)
        sequence = Sequence(request, [1] * num_tokens, num_tokens, 100, arrival=len(queues.waiting))
        queues.enqueue(sequence)


def started(queues: SequenceQueues, number: int) -> str:
    """The names of the sequences that are admitted next."""
    found = ""
    for _ in range(number):
        found += queues.next.request.request_id
        queues.start(queues.next)
    return found


def test_sequences_are_admitted_in_turns() -> None:
    queues = SequenceQueues(100)
    enqueued(queues, ONE, "abcdefgh")
    assert started(queues, 2) == "ab"
    enqueued(queues, OTHER, "xyz")
    assert started(queues, 9) == "xcydzefgh"
    assert not queues.waiting


def test_a_turn_costs_the_tokens_of_its_prompt_by_weight() -> None:
    queues = SequenceQueues(100)
    enqueued(queues, ONE, "ab", num_tokens=40)
    enqueued(queues, OTHER, "stuvwxyz", num_tokens=10)
    assert started(queues, 7) == "astuvbw"
    queues = SequenceQueues(100)
    enqueued(queues, Turn("one", 2.0), "abcd")
    enqueued(queues, OTHER, "xy")
    assert started(queues, 6) == "axbcyd"


def test_priorities_order_the_sequences_of_one_key() -> None:
    queues = SequenceQueues(100)
    enqueued(queues, OTHER, "xy")
    enqueued(queues, ONE, "ab", priority=-1)
    enqueued(queues, ONE, "c", priority=-2)
    assert started(queues, 5) == "xcyab"
    queues = SequenceQueues(100)
    enqueued(queues, SHARED_TURN, "ab")
    enqueued(queues, SHARED_TURN, "c", priority=-1)
    assert started(queues, 3) == "cab"


def test_a_preempted_sequence_goes_first() -> None:
    queues = SequenceQueues(100)
    enqueued(queues, ONE, "ab")
    enqueued(queues, OTHER, "xy")
    preempted = queues.next
    queues.start(preempted)
    queues.remove(preempted)
    preempted.num_preemptions += 1
    queues.enqueue(preempted)
    assert started(queues, 4) == "axby"


# ---------------------------------------------------------------- keys


def test_requests_have_the_turns_of_their_keys(tmp_path: Path) -> None:
    assert make_frontend().entry(ANYBODY, Request(text="a")).request.turn == Turn("anybody")
    (nobody,) = Authenticator(ServerConfig()).callers
    assert nobody.turn is SHARED_TURN
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: a, name: one}\n- {key: b, name: two, weight: 2.5}\n")
    callers = Authenticator(ServerConfig(auth_file=str(keys), api_key=["c"])).callers
    assert [caller.turn for caller in callers] == [Turn("key-1"), Turn("one"), Turn("two", 2.5)]
    for wrong in ("0", "1001", "true", "x"):
        keys.write_text(f"- {{key: a, name: one, weight: {wrong}}}\n")
        with pytest.raises(ConfigError, match="weight: expected a number from 0.001 to 1000"):
            Authenticator(ServerConfig(auth_file=str(keys)))
