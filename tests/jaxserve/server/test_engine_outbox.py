"""What an engine process sends: one frame a step, nothing lost, nothing that grows while nobody reads."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve import EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.request_state import RequestState
from jaxserve.errors import OverloadedError
from jaxserve.server.engine_frames import HEADER
from jaxserve.server.engine_process import outbox as outbox_module
from jaxserve.server.engine_process.outbox import Outbox
from jaxserve.server.engine_process.outbox_stream import OutboxStream
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from tests.jaxserve.fake_engine import DELTA, PATIENCE_S, FakeEngine, make_request


class Line:
    """An engine's thread and outbox, and the front end's end of the socket."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        own, self.front_end = socket.socketpair()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.front_end.settimeout(PATIENCE_S)
        self.own = own
        self.engine = FakeEngine()
        self.thread = EngineThread(self.engine)
        self.outbox = Outbox(own, limit_bytes)
        self.ended: list[OutboxStream] = []

    def submit(self, number: int, num_tokens: int = 5, params: SamplingParams = DELTA) -> OutboxStream:
        stream = OutboxStream(self.outbox, number, f"request-{number}", self.ended.append)
        self.thread.submit(stream, make_request(number, num_tokens, params))
        return stream

    def run(self, count: int) -> None:
        asyncio.run(self.engine.run(count))

    def read(self) -> engine_pb2.FromEngine:
        """The next frame."""
        (length,) = HEADER.unpack(self._receive(HEADER.size))
        return engine_pb2.FromEngine.FromString(self._receive(length))

    def _receive(self, length: int) -> bytes:
        parts = b""
        while len(parts) < length:
            part = self.front_end.recv(length - len(parts))
            assert part, "the line is closed"
            parts += part
        return parts

    def read_until_finished(self, *numbers: int) -> dict[int, list[engine_pb2.Output]]:
        """All outputs of all requests, until these have ended."""
        found: dict[int, list[engine_pb2.Output]] = {}
        while not all(number in found and found[number][-1].is_finished for number in numbers):
            for output in self.read().outputs.outputs:
                found.setdefault(output.id, []).append(output)
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


def token_ids(outputs: list[engine_pb2.Output]) -> list[int]:
    return [token for output in outputs for completion in output.completions for token in completion.token_ids]


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
        frame = line.read()
        assert [output.id for output in frame.outputs.outputs] == [*range(1, 9)]
        assert all(len(output.completions) == 1 for output in frame.outputs.outputs)


def test_the_first_output_has_the_prompt_and_the_last_the_times(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(7, 3)
    line.engine.allow(3)
    outputs = line.read_until_finished(7)[7]
    assert [list(output.prompt.token_ids) for output in outputs] == [[1, 2], [], []]
    assert [output.HasField("times") for output in outputs] == [False, False, True]
    assert token_ids(outputs) == [7001, 7002, 7003]
    assert [stream.number for stream in line.ended] == [7]


def test_one_output_at_the_end_where_that_was_asked_for(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(3, 4, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, n=2))
    line.engine.allow(4)
    (output,) = line.read_until_finished(3)[3]
    assert [list(one.token_ids) for one in output.completions] == [[3001, 3002, 3003, 3004]] * 2
    assert output.HasField("prompt") and output.HasField("times")


def test_a_front_end_that_does_not_read_stops_no_step_and_loses_nothing(make_line: Callable[..., Line]) -> None:
    """Far more than the socket and the outbox hold: the steps go on, and what waits has a bound."""
    limit_bytes, num_tokens = 5_000, 1_000
    line = make_line(limit_bytes=limit_bytes)
    numbers = range(1, 5)
    for number in numbers:
        line.submit(number, num_tokens)
    line.engine.allow(2 * num_tokens)
    wait_for(lambda: line.engine.num_steps >= num_tokens and not line.thread.num_unfinished)  # without a single read
    assert line.outbox.is_full
    assert line.outbox._num_waiting_bytes < 2 * limit_bytes
    found = line.read_until_finished(*numbers)
    for number in numbers:
        assert token_ids(found[number]) == [*range(1000 * number + 1, 1000 * number + 1 + num_tokens)]
        assert sum(output.is_finished for output in found[number]) == 1
        assert found[number][-1].completions[0].finish_reason
    assert sorted(stream.number for stream in line.ended) == [*numbers]
    wait_for(lambda: not line.outbox.is_full)  # the sender counts a frame as sent just after it is read


def test_requests_that_run_on_catch_up_when_the_front_end_reads_again(make_line: Callable[..., Line]) -> None:
    line = make_line(limit_bytes=5_000)
    line.submit(1, 2_000)
    line.engine.allow(1_500)
    wait_for(lambda: line.engine.num_steps == 1_500)
    assert line.outbox.is_full
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
    line.outbox.send(answer=engine_pb2.Answer(id=99))
    while not (frame := line.read()).HasField("answer"):
        for output in frame.outputs.outputs:
            found[output.id].append(output)
    for number, outputs in found.items():
        assert sum(output.is_finished for output in outputs) == 1
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
    stream = OutboxStream(line.outbox, 5, "five", line.ended.append)
    stream.refuse(OverloadedError("too many"))
    stream.refuse(OverloadedError("too many"))
    (output,) = line.read().outputs.outputs
    assert (output.id, output.is_finished, output.error.message) == (5, True, "too many")
    assert output.error.kind == engine_pb2.ERROR_KIND_OVERLOADED
    assert line.ended == [stream]


def test_a_name_in_use_and_a_dead_engine_are_errors_of_a_request(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(1, 100_000)
    twin = OutboxStream(line.outbox, 11, "twin", line.ended.append)
    line.thread.submit(twin, make_request(1))
    line.engine.allow(1)
    (output,) = line.read_until_finished(11)[11]
    assert output.error.message == "request id '1' is in use"

    def die() -> None:
        raise OSError("/secret/device is gone")

    line.engine.before_step = die
    line.engine.allow(1)
    found = line.read_until_finished(1)
    assert found[1][-1].error.kind == engine_pb2.ERROR_KIND_ENGINE_DEAD
    assert found[1][-1].error.message == "the engine stopped after a failure"
    line.thread.wait_ended()
    with pytest.raises(EngineDeadError):
        line.submit(3)


@pytest.mark.parametrize("where", ["on the engine's thread", "behind it", "in the message"])
def test_an_output_that_cannot_be_made_fails_its_request_alone(
    make_line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original_output, original_message = RequestState.next_output, outbox_module.news_to_proto

    def next_output(self: RequestState, with_metrics: bool = False) -> RequestOutput | None:
        is_it = self.request_id == "1" and (where == "on the engine's thread" or self.is_finished())
        if is_it and self.samples[0].sequence.num_output_tokens > 1:
            raise ArithmeticError("/secret/path")
        return original_output(self, with_metrics)

    def news_to_proto(number: int, output: RequestOutput, is_first: bool) -> engine_pb2.Output:
        if number == 1:
            raise ArithmeticError("/secret/path")
        return original_message(number, output, is_first)

    line = make_line(limit_bytes=0 if where == "behind it" else 1 << 20)
    if where == "in the message":
        monkeypatch.setattr(outbox_module, "news_to_proto", news_to_proto)
    else:
        monkeypatch.setattr(RequestState, "next_output", next_output)
    for number in (1, 2):
        line.submit(number, 5)
    line.engine.allow(10)
    found = line.read_until_finished(1, 2)
    assert found[1][-1].error.kind == engine_pb2.ERROR_KIND_INTERNAL
    assert "failed: ArithmeticError, see the log" in found[1][-1].error.message
    assert token_ids(found[2]) == [*range(2001, 2006)]


def test_a_front_end_that_has_gone_stops_no_step(make_line: Callable[..., Line]) -> None:
    line = make_line()
    line.submit(1, 1000)
    line.run(1)
    line.front_end.close()
    line.engine.allow(2000)
    wait_for(lambda: line.engine.num_steps >= 1000 and not line.thread.num_unfinished)
    line.outbox.send(answer=engine_pb2.Answer(id=1))
    line.outbox.close(PATIENCE_S)
    assert not line.outbox._news and not line.outbox._messages


def test_what_waits_is_sent_before_the_end(make_line: Callable[..., Line]) -> None:
    line = make_line()
    reader = threading.Thread(target=lambda: found.extend(line.read() for _ in range(50)))
    found: list[engine_pb2.FromEngine] = []
    for number in range(50):
        line.outbox.send(answer=engine_pb2.Answer(id=number, value_json="x" * 10_000))
    reader.start()
    line.outbox.close(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert [frame.answer.id for frame in found] == [*range(50)]


def test_heartbeats_do_not_pile_up(make_line: Callable[..., Line]) -> None:
    line = make_line()
    big = "x" * (4 << 20)
    line.outbox.send(answer=engine_pb2.Answer(id=1, value_json=big))  # more than the socket takes
    wait_for(lambda: not line.outbox._messages)
    for _ in range(1000):
        line.outbox.send_heartbeat()
    assert len(line.outbox._messages) == 1
    assert line.read().answer.value_json == big
    assert line.read().WhichOneof("frame") == "heartbeat"
