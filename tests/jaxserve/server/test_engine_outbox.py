"""What an engine process sends: one frame a step, nothing lost, nothing that grows while nobody reads."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from jaxserve import EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.api.errors import JaxserveError, OverloadedError, RequestFailedError
from jaxserve.api.logprobs import Logprob
from jaxserve.api.outputs import CompletionOutput
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.engine.request_state import RequestState
from jaxserve.frames import HEADER
from jaxserve.server.engine_process.outbox import Outbox, SocketStream
from jaxserve.server.wire import (
    FromEngine,
    Heartbeat,
    Outputs,
    QueryResult,
    unpack,
)
from tests.jaxserve.fake_engine import DELTA, PATIENCE_S, FakeEngine, make_request, start_loop

Content = RequestOutput | JaxserveError


def is_last(content: Content) -> bool:
    return isinstance(content, JaxserveError) or content.finished


def outputs_of(contents: list[Content]) -> list[RequestOutput]:
    """Outputs of which none is an error."""
    found = [content for content in contents if isinstance(content, RequestOutput)]
    assert len(found) == len(contents)
    return found


class Line:
    """An engine's thread and outbox, and the front end's end of the socket."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        own, self.front_end = socket.socketpair()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.front_end.settimeout(PATIENCE_S)
        self.own = own
        self.engine = FakeEngine()
        self.thread = start_loop(self.engine)
        self.outbox = Outbox(own, limit_bytes)
        self.ended: list[SocketStream] = []

    def submit(self, number: int, num_tokens: int = 5, params: SamplingParams = DELTA) -> SocketStream:
        stream = self.stream(number)
        self.thread.submit(stream, lambda: make_request(number, num_tokens, params))
        return stream

    def stream(self, number: int, turn: Turn = SHARED_TURN) -> SocketStream:
        return SocketStream(
            outbox=self.outbox,
            number=number,
            turn=turn,
            on_end=self.ended.append,
            request_id=f"request-{number}",
            metrics="last",
        )

    def run(self, count: int) -> None:
        asyncio.run(self.engine.run(count))

    def fill_socket(self) -> int:
        """Fill the socket before any frame is sent, so that none can be, and return with how many bytes."""
        num_bytes = 0
        self.own.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                num_bytes += self.own.send(bytes(512))
        self.own.setblocking(True)
        return num_bytes

    def read(self) -> FromEngine:
        """The next frame."""
        (length,) = HEADER.unpack(self.receive(HEADER.size))
        return unpack(self.receive(length))

    def receive(self, length: int) -> bytes:
        parts = b""
        while len(parts) < length:
            part = self.front_end.recv(length - len(parts))
            assert part, "the line is closed"
            parts += part
        return parts

    def read_outputs(self) -> list[tuple[int, Content]]:
        """The outputs of the next frame, which has nothing else."""
        frame = self.read()
        assert isinstance(frame, Outputs)
        return list(frame.outputs)

    def read_until_finished(self, *numbers: int) -> dict[int, list[Content]]:
        """All outputs of all requests, until these have ended."""
        found: dict[int, list[Content]] = {}
        while not all(number in found and is_last(found[number][-1]) for number in numbers):
            for number, content in self.read_outputs():
                found.setdefault(number, []).append(content)
        return found

    def close(self) -> None:
        self.engine.allow(1_000_000)
        self.thread.stop()
        self.outbox.close(0.0)
        self.front_end.close()
        self.own.close()


@pytest.fixture
def make_line() -> Iterator[Callable[..., Line]]:
    """Makes lines that are closed after the test."""
    made: list[Line] = []

    def make(**options: Any) -> Line:
        made.append(Line(**options))
        return made[-1]

    yield make
    for line in made:
        line.close()


def token_ids(contents: list[Content]) -> list[int]:
    return [token for output in outputs_of(contents) for one in output.outputs for token in one.token_ids]


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_step_is_one_frame_for_all_requests(make_line: Callable[..., Line]) -> None:
    line = make_line()
    for number in range(1, 9):
        line.submit(number, 1000)
    while len(line.engine.requests) < 8:
        line.run(1)
        line.read()
    for _ in range(3):
        line.run(1)
        found = line.read_outputs()
        assert [number for number, _ in found] == [*range(1, 9)]
        assert all(len(output.outputs) == 1 for output in outputs_of([content for _, content in found]))


def test_the_first_output_has_the_prompt_and_the_last_the_times(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(7, 3)
    line.engine.allow(3)
    outputs = outputs_of(line.read_until_finished(7)[7])
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [], []]
    assert [output.metrics is not None for output in outputs] == [False, False, True]
    assert token_ids([*outputs]) == [7001, 7002, 7003]
    assert [stream.number for stream in line.ended] == [7]


def test_one_output_at_the_end_where_that_was_asked_for(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(3, 4, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, n=2))
    line.engine.allow(4)
    (output,) = outputs_of(line.read_until_finished(3)[3])
    assert [one.token_ids for one in output.outputs] == [[3001, 3002, 3003, 3004]] * 2
    assert output.prompt_token_ids and output.metrics is not None


def test_a_front_end_that_does_not_read_stops_no_step_and_loses_nothing(make_line: Callable[..., Line]) -> None:
    """Far more than the socket and the outbox hold: the steps go on, and what waits has a bound."""
    limit_bytes, num_tokens = 5_000, 1_000
    line = make_line(limit_bytes=limit_bytes)
    num_filled = line.fill_socket()
    numbers = range(1, 5)
    for number in numbers:
        line.submit(number, num_tokens)
    line.engine.allow(2 * num_tokens)
    wait_for(lambda: line.engine.num_steps >= num_tokens and not line.engine.num_unfinished)  # without a single read
    assert line.outbox.is_full()
    rests = len(numbers) * (100 + 4 * num_tokens)  # the last output of each, which needs no room
    assert line.outbox._num_bytes.total < 2 * limit_bytes + rests
    line.receive(num_filled)
    found = line.read_until_finished(*numbers)
    for number in numbers:
        assert token_ids(found[number]) == [*range(1000 * number + 1, 1000 * number + 1 + num_tokens)]
        outputs = outputs_of(found[number])
        assert sum(output.finished for output in outputs) == 1
        assert outputs[-1].outputs[0].finish_reason
    assert sorted(stream.number for stream in line.ended) == [*numbers]
    wait_for(lambda: not line.outbox.is_full())  # the sender counts a frame as sent just after it is read


def test_requests_that_run_on_catch_up_when_the_front_end_reads_again(make_line: Callable[..., Line]) -> None:
    line = make_line(limit_bytes=5_000)
    num_filled = line.fill_socket()
    line.submit(1, 2_000)
    line.engine.allow(1_500)
    wait_for(lambda: line.engine.num_steps == 1_500)
    assert line.outbox.is_full()
    line.receive(num_filled)
    line.engine.allow(1_000)
    assert token_ids(line.read_until_finished(1)[1]) == [*range(1001, 3_001)]


def test_an_aborted_request_that_is_behind_says_so_once(make_line: Callable[..., Line]) -> None:
    line = make_line(limit_bytes=0)
    for number in range(1, 9):
        line.submit(number, 100_000)
    line.engine.allow(200)
    wait_for(lambda: line.engine.num_steps == 200)
    aborting = line.thread.abort([str(number) for number in range(1, 9)])
    line.engine.allow(1)
    aborting.result(PATIENCE_S)
    found = line.read_until_finished(*range(1, 9))
    line.outbox.send(QueryResult(99, None))
    while not isinstance(frame := line.read(), QueryResult):
        assert isinstance(frame, Outputs)
        for number, content in frame.outputs:
            found[number].append(content)
    for number, outputs in found.items():
        assert sum(is_last(output) for output in outputs) == 1
        tokens = token_ids(outputs)
        assert tokens == [*range(1000 * number + 1, 1000 * number + 1 + len(tokens))]


def test_nothing_more_is_said_to_nobody(make_line: Callable[..., Line]) -> None:
    line = make_line()
    first, second = line.submit(1, 100), line.submit(2, 4)
    line.run(1)
    first.silence()
    line.thread.drop(first)
    line.engine.allow(100)
    found = line.read_until_finished(2)
    assert 1 not in found or len(found[1]) == 1
    assert line.engine.aborted == ["1"]
    assert line.ended == [first, second]


def test_a_refused_request_gets_its_error(make_line: Callable[..., Line]) -> None:
    line = make_line()
    stream = line.stream(5)
    line.thread.refuse(stream, OverloadedError("too many"))
    line.thread.refuse(stream, OverloadedError("too many"))
    ((number, error),) = line.read_outputs()
    assert (number, type(error), str(error)) == (5, OverloadedError, "too many")
    assert line.ended == [stream]


def test_a_name_in_use_and_a_dead_engine_are_errors_of_a_request(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(1, 100_000)
    line.thread.submit(line.stream(11), lambda: make_request(1))
    line.engine.allow(1)
    (error,) = line.read_until_finished(11)[11]
    assert str(error) == "request id '1' is in use"

    def die() -> None:
        raise OSError("/secret/device is gone")

    line.engine.before_step = die
    line.engine.allow(1)
    found = line.read_until_finished(1)
    assert isinstance(found[1][-1], EngineDeadError)
    assert str(found[1][-1]) == "the engine stopped after a failure"
    line.thread.wait_ended()
    with pytest.raises(EngineDeadError):
        line.submit(3)


@pytest.mark.parametrize("where", ["on the engine's thread", "behind it", "in the message"])
def test_an_output_that_cannot_be_made_fails_its_request_alone(
    make_line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original_output = RequestState.next_output

    def next_output(self: RequestState, with_metrics: bool = False) -> RequestOutput | None:
        output = original_output(self, with_metrics)
        if self.request_id == "1" and output is not None:
            if where == "in the message":
                output.error = cast("Any", lambda: "cannot be pickled")
            elif self.samples[0].sequence.num_output_tokens > 1 and (
                where == "on the engine's thread" or output.finished
            ):
                raise ArithmeticError("/secret/path")
        return output

    line = make_line(limit_bytes=0 if where == "behind it" else 1 << 20)
    monkeypatch.setattr(RequestState, "next_output", next_output)
    for number in (1, 2):
        line.submit(number, 5)
    line.engine.allow(10)
    found = line.read_until_finished(1, 2)
    assert isinstance(found[1][-1], RequestFailedError)
    why = "its output cannot be sent, see the log" if where == "in the message" else "ArithmeticError, see the log"
    assert str(found[1][-1]).endswith(f"failed: {why}")
    assert token_ids(found[2]) == [*range(2001, 2006)]


def test_a_front_end_that_has_gone_stops_no_step(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(1, 1000)
    line.run(1)
    line.front_end.close()
    line.engine.allow(2000)
    wait_for(lambda: line.engine.num_steps >= 1000 and not line.engine.num_unfinished)
    line.outbox.send(QueryResult(1, None))
    line.outbox.close(PATIENCE_S)
    assert not line.outbox._messages


def test_what_waits_is_sent_before_the_end(make_line: Callable[..., Line]) -> None:
    line = make_line()
    reader = threading.Thread(target=lambda: found.extend(line.read() for _ in range(50)))
    found: list[FromEngine] = []
    for number in range(50):
        line.outbox.send(QueryResult(number, "x" * 10_000))
    reader.start()
    line.outbox.close(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert [frame.number for frame in found if isinstance(frame, QueryResult)] == [*range(50)]


def test_heartbeats_do_not_pile_up(make_line: Callable[..., Line]) -> None:
    line = make_line()
    big = "x" * (4 << 20)
    line.outbox.send(QueryResult(1, big))  # more than the socket takes
    wait_for(lambda: not line.outbox._messages)
    for _ in range(1000):
        line.outbox.send_heartbeat()
    assert len(line.outbox._messages) == 1
    assert line.read() == QueryResult(1, big)
    assert line.read() == Heartbeat()


def test_large_outputs_of_a_key_hold_up_no_other(make_line: Callable[..., Line]) -> None:
    line = make_line(limit_bytes=4 << 20)
    num_filled = line.fill_socket()
    streams = [line.stream(number, Turn("large")) for number in range(1, 11)]
    line.outbox.take([(stream, output_of("x" * (1 << 20))) for stream in streams])
    wait_for(lambda: len(line.outbox._waiting._items["large"]) == 9)  # the first is being sent
    assert line.outbox.is_full("large") and not line.outbox.is_full("small")
    line.outbox.take([(line.stream(11, Turn("small")), output_of("y"))])
    line.outbox.send(QueryResult(99, None))
    assert not line.outbox.is_full("small")
    line.receive(num_filled)
    assert [number for number, _ in line.read_outputs()] == [1]
    assert line.read() == QueryResult(99, None)
    assert [number for number, _ in line.read_outputs()] == [11, 2]
    assert [line.read_outputs()[0][0] for _ in range(8)] == [*range(3, 11)]
    wait_for(lambda: not line.outbox.is_full("large"))


def test_log_probabilities_of_prompts_count(make_line: Callable[..., Line]) -> None:
    line = make_line(limit_bytes=4000)
    line.fill_socket()
    output = output_of("x")
    output.prompt_logprobs = [None, *({token: Logprob(-1.0, 1, "x") for token in range(20)} for _ in range(10))]
    line.outbox.take([(line.stream(1), output)])
    assert line.outbox.is_full()


def output_of(text: str) -> RequestOutput:
    """The only output of a request."""
    completion = CompletionOutput(0, text, [1], finish_reason="stop")
    return RequestOutput(request_id="r", prompt="p", prompt_token_ids=[1], outputs=[completion], finished=True)
