"""An engine survives whatever enters or leaves a call that waits for it, or a step; see ``Calls`` and ``Loop``."""

import gc
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tqdm import tqdm

import jaxserve
from jaxserve import LLM, BeamSearchParams, EngineDeadError, SamplingParams
from jaxserve.api.errors import EngineBusyError
from jaxserve.device.runner import LocalRunner, PendingStep
from jaxserve.device.stage import Stage
from jaxserve.engine import resharding
from jaxserve.engine.engine import Engine
from jaxserve.engine.replica import Replica
from jaxserve.reshard import device_move
from jaxserve.scheduling.scheduler import Scheduler
from tests.random_checkpoint import LLAMA, write_checkpoint_with_tokenizer

SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "compile_sizes": {"decode": [2], "mixed": [32]},
    "kv_cache_memory_bytes": 1 << 20,
    "compilation_cache_dir": "",
    "warm_up": False,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["12+30=", "reverse moon:"]
MESSAGES = [{"role": "user", "content": "12+30="}]
PLACES = [
    (Scheduler, "schedule"),
    (Scheduler, "complete"),
    (LocalRunner, "launch"),
    (PendingStep, "wait"),
    (Replica, "collect"),
    (Engine, "_deliver"),
]


class Alarm(Exception):
    """What the handler of an alarm raises."""


class Strange(BaseException):
    """An exception that is no ``Exception``, as those that end a pytest test are."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("little")
    write_checkpoint_with_tokenizer(made, {**LLAMA, "vocab_size": 360, "num_hidden_layers": 1}, seed=1)
    return made


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm)


@pytest.fixture(autouse=True)
def whole(llm: LLM, expected: list[list[int]]) -> Iterator[None]:
    """After each test, the next call is right, nothing is held, and the handlers of signals are as before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    yield
    assert tokens(llm) == expected
    assert_idle(llm)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)] == handlers
    signal.signal(signal.SIGINT, before)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """No request, slot or page is in use."""
    assert llm.engine.num_unfinished == 0
    for scheduler in (scheduler for replica in llm.engine.replicas for scheduler in replica.schedulers):
        assert not scheduler.waiting and not scheduler.running
        assert scheduler.allocator.num_free == scheduler.allocator.num_pages
        assert len(scheduler._queues.free_slots) == SETTINGS["max_num_seqs"]


def beams(llm: LLM) -> None:
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=4))


def read_stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[0], PARAMS):
        pass


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": tokens,
    "chat": lambda llm: llm.chat(MESSAGES, PARAMS, use_tqdm=False),
    "embed": lambda llm: llm.embed(PROMPTS, use_tqdm=False),
    "encode": lambda llm: llm.encode(PROMPTS, use_tqdm=False),
    "beam_search": beams,
    "stream": read_stream,
}


def send(number: int) -> None:
    """Send a signal to the main thread, which waits, as the kernel does with that of Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def do_once(patch: pytest.MonkeyPatch, place: tuple[Any, str], action: Callable[[], None], after: bool) -> list[int]:
    """Make a function do something, once, before or after its work; return its calls so far."""
    owner, name = place
    original, calls = getattr(owner, name), list[int]()

    def acting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1 and not after:
            action()
        found = original(*arguments, **options)
        if len(calls) == 1 and after:
            action()
        return found

    patch.setattr(owner, name, acting)
    return calls


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_a_signal_in_a_step_ends_its_call_alone(
    llm: LLM, call: str, place: tuple[Any, str], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is open meanwhile loses nothing."""
    stream = llm.stream(PROMPTS[0], PARAMS)
    seen = [next(stream)]
    epoch = llm.engine.replicas[0].schedulers
    with monkeypatch.context() as patch:
        do_once(patch, place, lambda: send(signal.SIGINT), after=True)
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](llm)
    seen += list(stream)
    assert seen[-1].outputs[0].token_ids == expected[0] and seen[-1].error is None
    assert llm.engine.replicas[0].schedulers is epoch, "no state was lost"


@pytest.mark.parametrize("error", [Alarm, Strange, SystemExit])
def test_whatever_a_handler_raises_ends_the_call_alone(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error("time is up")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patch:
            do_once(patch, PLACES[2], lambda: send(signal.SIGALRM), after=False)
            with pytest.raises(error, match="time is up"):
                tokens(llm)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_an_interrupt_inside_a_step(
    llm: LLM, place: tuple[Any, str], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the engine's thread, where another thread may raise one: unfinished requests fail, and say why."""
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        do_once(patch, place, interrupt, after)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for last in (*outputs, list(stream)[-1]):
        assert last.finished and last.error == "a step was interrupted before the request finished"


def test_an_exception_at_any_line(llm: LLM, expected: list[list[int]]) -> None:
    """Raised by a trace function at lines of a call, while it prepares requests and waits for them."""
    folder = Path(jaxserve.__file__).parent
    files = {str(path) for name in ("engine", "scheduling", "device") for path in (folder / name).glob("*.py")}

    def run(stop_at: int) -> int:
        counter = itertools.count(1)

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            if event == "line" and next(counter) == stop_at:
                sys.settrace(None)
                raise Strange
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            tokens(llm)
        except Strange:
            pass
        finally:
            sys.settrace(before)
        return next(counter)

    num_lines = run(0)
    assert num_lines > 100
    for stop_at in {round(num_lines * part / 16) for part in range(16)}:
        run(stop_at + 1)
        assert tokens(llm) == expected, stop_at
        assert_idle(llm)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_bar_or_a_reader_that_raises(llm: LLM, call: str) -> None:
    def failing_bar(*arguments: Any, **options: Any) -> tqdm:
        made: Any = tqdm(*arguments, **{**options, "disable": True})
        made.update = lambda count: (_ for _ in ()).throw(KeyboardInterrupt)
        return made

    with pytest.raises(KeyboardInterrupt):
        if call == "generate":
            llm.generate([*PROMPTS, "a", "b"], [PARAMS.clone(max_tokens=n) for n in (2, 6, 6, 6)], use_tqdm=failing_bar)
        for _ in llm.stream(PROMPTS[0], PARAMS):
            raise KeyboardInterrupt
    gc.collect()


def test_calls_inside_a_callback_and_a_handler(llm: LLM, expected: list[list[int]]) -> None:
    """Both come between two steps, and run the same engine."""
    found: list[list[list[int]]] = []

    def bar(*arguments: Any, **options: Any) -> tqdm:
        found.append(tokens(llm))
        return tqdm(*arguments, **{**options, "disable": True})

    def handler(number: int, frame: FrameType | None) -> None:
        found.append(tokens(llm))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            do_once(patch, PLACES[3], lambda: send(signal.SIGALRM), after=False)
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=bar)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found == [expected, expected]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_call_inside_a_step_is_refused(llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a finalizer or a log handler would be; the step goes on."""
    refused: list[str] = []
    calls = [*CALLS.values(), LLM.reshard, LLM.reset_prefix_cache, LLM.close]

    def call_all() -> None:
        for call in calls:
            with pytest.raises(EngineBusyError, match="comes from inside a step of the same engine") as caught:
                call(llm)
            refused.append(str(caught.value))

    with monkeypatch.context() as patch:
        do_once(patch, PLACES[2], call_all, after=False)
        assert tokens(llm) == expected
    assert len(refused) == len(calls)


def test_a_stream_that_is_dropped_inside_a_step_is_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector drops one."""
    streams = [llm.stream(PROMPTS[0], PARAMS.clone(max_tokens=50))]
    next(streams[0])
    with monkeypatch.context() as patch:
        calls = do_once(patch, PLACES[2], streams.clear, after=False)
        tokens(llm)
    assert len(calls) < 20 and llm.engine.num_unfinished == 0


def test_threads_share_an_engine(llm: LLM, expected: list[list[int]]) -> None:
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(tokens(llm)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 4


def test_an_interrupt_of_one_thread_leaves_the_others(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, found = threading.Event(), []
    step = llm.engine.step

    def watched() -> Any:
        changed = step()
        if not has_begun.is_set():
            has_begun.set()
            send(signal.SIGINT)
        return changed

    def other() -> None:
        assert has_begun.wait(60)
        found.append(tokens(llm))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", watched)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
        thread.join(60)
    assert found == [expected]


@pytest.mark.parametrize("name", ["prepare_reshard", "move_weights"])
def test_reshard_and_signals(llm: LLM, name: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the move waits for its end; one while programs compile ends the call, and nothing has changed."""
    plan = llm.plan
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    with monkeypatch.context() as patch:
        module = resharding if name == "prepare_reshard" else device_move
        do_once(patch, (module, name), lambda: send(signal.SIGINT), after=False)
        with pytest.raises(KeyboardInterrupt):
            llm.reshard("tensor=1")
    assert (llm.plan is plan) == (name == "prepare_reshard")
    assert list(stream)[-1].outputs[0].token_ids == expected[0]


def test_an_interrupt_inside_the_move_stops_the_engine_by_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with LLM(str(directory), **SETTINGS) as made:
        monkeypatch.setattr(Stage, "compile", lambda self: None)  # the move does not get that far
        do_once(monkeypatch, (device_move, "move_weights"), interrupt, after=False)
        with pytest.raises(KeyboardInterrupt):
            made.reshard("tensor=1")
        for call in CALLS.values():
            with pytest.raises(EngineDeadError, match="the engine stopped: KeyboardInterrupt"):
                call(made)


def test_close_in_the_middle_of_a_call(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the step, and the call fails."""
    made, is_closing = LLM(str(directory), **SETTINGS), threading.Event()

    def close(number: int, frame: Any) -> None:
        is_closing.set()
        made.close()

    def ask_to_close() -> None:
        send(signal.SIGALRM)
        is_closing.wait(30)  # or a busy machine has all tokens before the handler runs

    before = signal.signal(signal.SIGALRM, close)
    try:
        do_once(monkeypatch, PLACES[2], ask_to_close, after=True)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="it was closed"):
                made.generate(PROMPTS, PARAMS.clone(max_tokens=50), use_tqdm=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    made.close()
    runner: Any = made.engine.replicas[0].runner
    assert all(array.is_deleted() for array in runner._last.params)
