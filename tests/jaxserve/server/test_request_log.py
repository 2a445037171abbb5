"""What is noted of requests: counters by outcome, log lines where they are asked for, and nothing secret."""

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import pytest

from jaxserve.api.errors import (
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.errors import OUTCOMES, NotImplementedRequestError, UnavailableError, UnknownModelError
from jaxserve.server.frontend import Frontend
from jaxserve.server.request_log import RequestLog, outcome_of
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tracing import remember_trace
from tests.observed_engine import ANSWER, ANYBODY, ObservedEngine, make_frontend, output, read_all

PARAMS = SamplingParams(max_tokens=8)


def outcomes(frontend: Frontend) -> dict[str, int]:
    """Those that came about."""
    return {name: number for name, number in frontend.log.counts.finished.items() if number}


# ---------------------------------------------------------------- counters


def test_numbers_of_an_answer() -> None:
    frontend = make_frontend()
    asyncio.run(read_all(frontend))
    counts = frontend.log.counts
    assert (counts.started, counts.in_flight, outcomes(frontend)) == (1, 0, {"ok": 1})
    assert (counts.prompt_tokens, counts.cached_tokens, counts.generation_tokens) == (3, 1, 3)


def test_numbers_move_while_an_answer_comes() -> None:
    frontend = make_frontend()

    async def run() -> None:
        outputs = frontend.generate(frontend.entry(ANYBODY, Request(request_id="cmpl-1", text="a", params=PARAMS)))
        async with aclosing(outputs):
            await anext(outputs)
            counts = frontend.log.counts
            assert (counts.in_flight, counts.prompt_tokens, counts.generation_tokens) == (1, 3, 1)

    asyncio.run(run())


def test_all_samples_count() -> None:
    frontend = make_frontend(ObservedEngine(output(("a", 2), ("b", 3)), output(("c", 1), ("d", 4), reason="stop")))
    asyncio.run(read_all(frontend))
    assert frontend.log.counts.generation_tokens == 10
    assert frontend.log.counts.prompt_tokens == 3


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestError("wrong"), "client_error"),
        (UnknownModelError("none"), "client_error"),
        (NotImplementedRequestError("no"), "client_error"),
        (RequestFailedError("NaN"), "failed"),
        (RuntimeError("a bug"), "failed"),
        (JaxserveError("another"), "failed"),
        (OverloadedError("full"), "overloaded"),
        (DeadlineError("late"), "deadline"),
        (EngineDeadError("gone"), "engine_dead"),
        (UnavailableError("gone"), "engine_dead"),
        (asyncio.CancelledError(), "cancelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_error_is_one_outcome(error: BaseException, outcome: str) -> None:
    frontend = make_frontend(ObservedEngine(ANSWER[0], error))
    with pytest.raises(type(error)):
        asyncio.run(read_all(frontend))
    assert outcomes(frontend) == {outcome: 1}
    assert frontend.log.counts.in_flight == 0


def test_outcomes_are_a_closed_set() -> None:
    assert tuple(RequestLog(ServerConfig()).counts.finished) == OUTCOMES


def test_a_reader_who_leaves_has_cancelled() -> None:
    frontend = make_frontend(ObservedEngine(ANSWER[0], 60.0, ANSWER[1]))

    async def leave(closes: bool) -> None:
        outputs = frontend.generate(frontend.entry(ANYBODY, Request(request_id="cmpl-1", text="a", params=PARAMS)))
        await anext(outputs)
        if closes:
            await outputs.aclose()
            return
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave(closes=True))
    asyncio.run(leave(closes=False))
    assert outcomes(frontend) == {"cancelled": 2}


def test_leaving_behind_the_last_output_is_no_cancellation() -> None:
    frontend = make_frontend()

    async def run() -> None:
        outputs = frontend.generate(frontend.entry(ANYBODY, Request(request_id="cmpl-1", text="a", params=PARAMS)))
        async for one in outputs:
            if one.finished:
                break
        await outputs.aclose()

    asyncio.run(run())
    assert outcomes(frontend) == {"ok": 1}


def test_a_cancellation_at_the_deadline_is_the_deadline() -> None:
    """gRPC cancels a call whose deadline has passed, perhaps before the engine says so."""
    gone = asyncio.CancelledError()
    cases = {(9.0, 10.0): "cancelled", (9.97, 10.0): "deadline", (11.0, 10.0): "deadline", (11.0, None): "cancelled"}
    for (elapsed_s, timeout_s), expected in cases.items():
        assert outcome_of(gone, (), is_finished=False, elapsed_s=elapsed_s, timeout_s=timeout_s) == expected


@pytest.mark.parametrize(("reason", "outcome"), [("abort", "cancelled"), ("repetition", "ok")])
def test_finish_reasons_that_are_outcomes(reason: str, outcome: str) -> None:
    frontend = make_frontend(ObservedEngine(output(("a", 1), reason=reason)))
    asyncio.run(read_all(frontend))
    assert outcomes(frontend) == {outcome: 1}


def test_a_completion_that_failed_is_an_error() -> None:
    frontend = make_frontend(ObservedEngine(output(("a", 1), reason="error")))
    with pytest.raises(RequestFailedError, match="the engine failed at this request"):
        asyncio.run(read_all(frontend))
    assert outcomes(frontend) == {"failed": 1}


def test_requests_that_were_refused_never_began() -> None:
    frontend = make_frontend()
    frontend.ledger.close("draining")
    with pytest.raises(UnavailableError, match="draining"):
        asyncio.run(read_all(frontend))
    assert frontend.log.counts.started == 0


# ---------------------------------------------------------------- lines


def test_silent_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxserve")
    asyncio.run(read_all(make_frontend()))
    with pytest.raises(RequestError, match="wrong"):
        asyncio.run(read_all(make_frontend(ObservedEngine(RequestError("wrong")))))
    assert caplog.messages == []


def test_lines_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    asyncio.run(read_all(make_frontend(enable_log_requests=True), "Tell\nme", "cmpl-7"))
    begin, end = caplog.messages
    assert begin == r"Request cmpl-7 of anybody: prompt 'Tell\nme', params: SamplingParams(max_tokens=8)"
    assert end.startswith(
        "Request cmpl-7 of anybody ended: ok, 3 prompt tokens (1 cached), 3 generated, finish reasons ['length'], 0."
    )
    assert end.endswith("first token after 3.000 s")
    assert "text" not in end


def test_first_token_of_an_answer_that_was_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    frontend = make_frontend(ObservedEngine(ANSWER[0], DeadlineError("late")), enable_log_requests=True)
    with pytest.raises(DeadlineError):
        asyncio.run(read_all(frontend))
    assert "ended: deadline, 3 prompt tokens (1 cached), 1 generated, finish reasons []" in caplog.messages[1]
    assert "first token after 0.0" in caplog.messages[1]


def test_lines_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    engine = ObservedEngine(output(("one\n", 1), ("other", 1)), output((" more", 1), ("", 0), reason="stop"))
    asyncio.run(read_all(make_frontend(engine, enable_log_outputs=True), "a prompt that stays out"))
    (line,) = caplog.messages
    assert line.endswith(r"text 0: 'one\n more', text 1: 'other'")
    assert "stays out" not in line


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"text": "abcdefgh"}, "prompt 'abcd'…"),
        ({"text": "abcd"}, "prompt 'abcd',"),
        ({"token_ids": (7, 8, 9)}, "prompt of 3 tokens '[7, '…"),
        ({"chat": {"messages": [{"role": "user"}]}}, "prompt '{\"me'…"),
    ],
)
def test_long_prompts_and_answers_are_cut(fields: dict[str, Any], shown: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    engine = ObservedEngine(output(("123", 1)), output(("456", 1)), output(("789", 1), reason="stop"))
    frontend = make_frontend(engine, enable_log_requests=True, enable_log_outputs=True, max_log_len=4)
    asyncio.run(read_all(frontend, **{"text": None, **fields}))
    assert shown in caplog.messages[0]
    assert caplog.messages[1].endswith("text 0: '1234'…")


def test_nothing_of_a_prompt_at_length_zero(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    frontend = make_frontend(enable_log_requests=True, enable_log_outputs=True, max_log_len=0)
    asyncio.run(read_all(frontend, "a secret"))
    assert "secret" not in caplog.text
    assert " a b" not in caplog.text


def test_a_client_s_name_for_a_request_is_a_label(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")

    async def run() -> None:
        remember_trace({"X-Request-Id": "mine\n42", "Authorization": "Bearer sk-secret"})
        await read_all(make_frontend(enable_log_requests=True))

    asyncio.run(run())
    assert r"Request cmpl-1 ('mine\n42') of anybody" in caplog.messages[0]
    assert "sk-secret" not in caplog.text


@pytest.mark.parametrize("error", [RequestFailedError("NaN"), EngineDeadError("gone"), KeyError("a bug")])
def test_failures_are_warned_of(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)):
        asyncio.run(read_all(make_frontend(ObservedEngine(error)), "a prompt that stays out"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"Request cmpl-1 of anybody failed: {error!r}"
    # Only what nobody foresaw comes with where it happened.
    assert bool(record.exc_info) == isinstance(error, KeyError)
    assert "stays out" not in caplog.text


@pytest.mark.parametrize("error", [RequestError("wrong"), OverloadedError("full"), DeadlineError("late")])
def test_what_clients_do_is_not_warned_of(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)):
        asyncio.run(read_all(make_frontend(ObservedEngine(error))))
    assert caplog.records == []


def test_keys_and_salts_are_in_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    frontend = make_frontend(enable_log_requests=True, enable_log_outputs=True, api_key=["sk-secret"])
    caller = frontend.authenticator.caller("Bearer sk-secret")

    async def run() -> None:
        request = Request(request_id="cmpl-1", text="a", params=PARAMS, cache_salt="salt-secret")
        async for _ in frontend.generate(frontend.entry(caller, request)):
            pass

    asyncio.run(run())
    assert "of key-1" in caplog.text
    assert "secret" not in caplog.text
