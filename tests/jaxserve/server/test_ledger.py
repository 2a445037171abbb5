"""What a server takes at a time."""

import contextlib

import pytest

from jaxserve.api.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError
from jaxserve.server.ledger import RECENT_S, Ledger

ANYBODY = Caller("anybody", frozenset())


class Clock:
    """A clock that stands until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_closed_until_opened_and_after_closing() -> None:
    ledger = Ledger()
    with pytest.raises(UnavailableError, match="starting"), ledger.admit(ANYBODY, 1):
        pass
    ledger.open(1)
    with ledger.admit(ANYBODY, 1):
        assert ledger.num_in_flight == 1
        ledger.close("draining")
    with pytest.raises(UnavailableError, match="draining"), ledger.admit(ANYBODY, 1):
        pass
    assert ledger.num_in_flight == 0


def test_each_text_counts() -> None:
    ledger = Ledger()
    ledger.open(4)
    with ledger.admit(ANYBODY, 3):
        with pytest.raises(
            OverloadedError, match="queue full: 3 sequences in flight, limit 4 .*, and this request has 2; retry later"
        ) as failure:
            with ledger.admit(ANYBODY, 2):
                pass
        assert failure.value.retry_after_s > 0
        with ledger.admit(ANYBODY, 1):
            assert ledger.num_in_flight == 4
    assert (ledger.num_in_flight, ledger.num_refused) == (0, 1)


def test_what_can_never_pass_is_wrong_and_not_too_much() -> None:
    ledger = Ledger()
    ledger.open(4)
    with pytest.raises(RequestError, match="at most 4 sequences"), ledger.admit(ANYBODY, 5):
        pass


def test_a_failed_request_gives_its_place_back() -> None:
    ledger = Ledger()
    ledger.open(1)
    for _ in range(3):
        with contextlib.suppress(KeyError), ledger.admit(ANYBODY, 1):
            raise KeyError
    assert ledger.num_in_flight == 0


def test_a_key_has_limits_of_its_own() -> None:
    ledger = Ledger()
    ledger.open(100)
    one = Caller("one", frozenset(), max_concurrent_requests=2)
    with ledger.admit(one, 2), ledger.admit(ANYBODY, 50):
        with pytest.raises(OverloadedError, match="2 sequences in flight, limit 2"), ledger.admit(one, 1):
            pass


def test_no_key_keeps_another_one_out() -> None:
    """A key below an equal part is admitted although another one has taken all."""
    ledger = Ledger()
    ledger.open(10)
    one, other = (Caller(name, frozenset()) for name in ("one", "other"))
    with ledger.admit(one, 10):
        with ledger.admit(other, 4):
            ledger.check_room(other)
            for caller in (one, other):
                with pytest.raises(OverloadedError, match="queue full: 14 sequences in flight"):
                    with ledger.admit(caller, 2):
                        pass
        with pytest.raises(OverloadedError, match="queue full"), ledger.admit(other, 6):
            pass
    with ledger.admit(one, 10), pytest.raises(OverloadedError, match="queue full"), ledger.admit(one, 1):
        pass


def test_a_key_has_a_rate() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    ledger.open(100)
    one = Caller("one", frozenset(), requests_per_minute=2)
    for _ in range(2):
        with ledger.admit(one, 1):
            clock.now += 10
    with pytest.raises(OverloadedError, match="2 requests per minute") as failure:
        with ledger.admit(one, 1):
            pass
    assert failure.value.retry_after_s == pytest.approx(40)
    clock.now += 40
    with ledger.admit(one, 1):
        pass


def test_a_key_has_others_while_they_have_requests_and_soon_after() -> None:
    now_s = 100.0
    ledger = Ledger(clock=lambda: now_s)
    ledger.open(8)
    with ledger.admit(Caller("one", frozenset())):
        assert not ledger.has_others("one") and ledger.has_others("other")
        with ledger.admit(Caller("other", frozenset())):
            now_s += 2 * RECENT_S
            assert ledger.has_others("one")
        now_s += RECENT_S - 1
        assert ledger.has_others("one")
        now_s += 2
        assert not ledger.has_others("one")


def test_a_full_server_refuses_before_it_reads() -> None:
    ledger = Ledger()
    ledger.check_room(ANYBODY)  # it is not open yet: that is said later
    ledger.open(2)
    one = Caller("one", frozenset(), max_concurrent_requests=1, requests_per_minute=1)
    with ledger.admit(one, 1):
        ledger.check_room(ANYBODY)
        with pytest.raises(OverloadedError, match="this API key has 1 sequences in flight"):
            ledger.check_room(one)
        with ledger.admit(ANYBODY, 1), pytest.raises(OverloadedError, match="queue full: 2 sequences in flight"):
            ledger.check_room(ANYBODY)


# ---------------------------------------------------------------- prompts that wait


class Prompt:
    """A prompt of some sequences, in the ledger until ``leave``."""

    def __init__(self, ledger: Ledger, num_seqs: int = 1, caller: str = "anybody"):
        self.num_seqs = num_seqs
        self.caller = caller
        self.num_waiting_tokens = 0
        self._block = ledger.entered(self)
        self.waits = self._block.__enter__()

    def leave(self) -> None:
        self._block.__exit__(None, None, None)


def opened(max_num_seqs: int, max_num_queued_tokens: int) -> Ledger:
    ledger = Ledger()
    ledger.open(10_000, max_num_seqs=max_num_seqs, max_num_queued_tokens=max_num_queued_tokens)
    return ledger


def test_prompts_wait_once_more_sequences_came_than_the_steps_have_room_for() -> None:
    ledger = opened(4, 100)
    prompts = [Prompt(ledger, num_seqs) for num_seqs in (1, 3, 1)]
    assert [prompt.waits for prompt in prompts] == [False, False, True]
    prompts[1].leave()  # the last one runs now
    prompts += [Prompt(ledger, num_seqs) for num_seqs in (2, 1)]
    assert [prompt.waits for prompt in prompts[3:]] == [False, True]
    ledger.open(10_000, max_num_seqs=8, max_num_queued_tokens=100)
    prompts.append(Prompt(ledger))
    assert prompts[-1].waits  # after the one that waits
    prompts[0].leave()
    prompts.append(Prompt(ledger))
    assert not prompts[-1].waits


def test_waiting_tokens_of_one_key_keep_no_other_one_out() -> None:
    ledger = opened(1, 100)
    one, other = (Caller(name, frozenset()) for name in ("one", "other"))
    with ledger.admit(one), ledger.admit(other):
        prompts = [Prompt(ledger, 1, name) for name in ("one", "one", "other", "other")]
        ledger.note_prompt(prompts[1], 100)
        ledger.note_prompt(prompts[2], 30)
        with pytest.raises(OverloadedError, match="130 prompt tokens waiting, limit 100"):
            ledger.note_prompt(prompts[3], 21)
        ledger.note_prompt(prompts[3], 20)
        with pytest.raises(OverloadedError, match="50 prompt tokens waiting, limit 100"):
            ledger.note_prompt(prompts[1], 51)
        for prompt in prompts:
            prompt.leave()
    last = [Prompt(ledger), Prompt(ledger)]
    ledger.note_prompt(last[1], 100)  # all is as it was at first


def test_a_prompt_of_more_sequences_than_run_at_a_time_runs_alone() -> None:
    ledger = opened(4, 100)
    large, next_one = Prompt(ledger, 9), Prompt(ledger)
    assert (large.waits, next_one.waits) == (False, True)
    large.leave()
    last = Prompt(ledger)
    assert not last.waits


def test_prompts_of_requests_that_wait_are_counted() -> None:
    ledger = opened(1, 100)
    running = Prompt(ledger)
    ledger.note_prompt(running, 1000)  # runs at once
    first, second = Prompt(ledger), Prompt(ledger)
    ledger.note_prompt(first, 60)
    with pytest.raises(OverloadedError, match=r"60 prompt tokens waiting, limit 100 .* prompt has 50"):
        ledger.note_prompt(second, 50)
    ledger.note_prompt(second, 40)
    first.leave()
    third = Prompt(ledger)
    ledger.note_prompt(third, 60)


def test_a_prompt_waits_until_those_before_it_end() -> None:
    ledger = opened(1, 100)
    running, waiting, late = Prompt(ledger), Prompt(ledger), Prompt(ledger)
    ledger.note_prompt(waiting, 80)
    with pytest.raises(OverloadedError):
        ledger.note_prompt(late, 80)
    running.leave()
    ledger.note_prompt(waiting, 90)  # it runs: told too late to count
    ledger.note_prompt(late, 80)


def test_prompts_that_have_left_hold_nothing() -> None:
    ledger = opened(4, 10_000)
    prompts = [Prompt(ledger) for _ in range(1000)]
    refused = 0
    for prompt in prompts:
        try:
            ledger.note_prompt(prompt, 2000)
        except OverloadedError:
            prompt.leave()
            refused += 1
    assert refused == 1000 - (4 + 5)
    for prompt in prompts[:9]:
        prompt.leave()
    assert (ledger._num_running, ledger._waiting_tokens.total, len(ledger._waiting)) == (0, 0, 0)
