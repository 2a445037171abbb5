"""The outputs of a request by kind, what a step's tokens do to it, and its logprobs."""

import dataclasses
from collections.abc import Sequence as Items
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import CompletionOutput, FlatLogprobs, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.api.errors import RequestFailedError
from jaxserve.api.outputs import RequestMetrics
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.request import Request
from jaxserve.engine.request_state import RequestState, Sample, logprob_entry, sample_entry
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.endings import Ending, find_stop_string
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import ScoredChunk
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

PROMPT = [1, 5, 9]
DELTA = RequestOutputKind.DELTA
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


def make_request(
    tokenizer: Tokenizer | None, params: SamplingParams, name: str = "7", stop_ids: Items[int] = ()
) -> RequestState:
    """A request as admission makes it, that nothing runs."""
    samples = []
    asked = Request(request_id=name, text="abc", params=params)
    for index in range(params.n):
        sequence = Sequence(asked, list(PROMPT), len(PROMPT), 1000, index=index, stop_ids=dict.fromkeys(stop_ids))
        pieces = None if tokenizer is None else tokenizer.pieces(params.skip_special_tokens)
        detokenizer = None
        if pieces is not None and params.detokenize:
            detokenizer = Detokenizer(
                pieces, stop=params.stop_strings, include_stop_str_in_output=params.include_stop_str_in_output
            )
        wants = params.logprobs is not None or params.logprob_token_ids
        empty: Any = FlatLogprobs() if params.flat_logprobs else []
        sequence.stop_strings = detokenizer if params.stop_strings else None
        samples.append(Sample(sequence, detokenizer, empty if wants else None))
    prompt_logprobs = None if params.prompt_logprobs is None else PackedLogprobs.empty()
    tokenizer = tokenizer if params.detokenize else None
    return RequestState(asked, list(PROMPT), samples, 1.0, 2.0, tokenizer, prompt_logprobs)


def make_scores(num_rows: int, num_top: int = 4, num_tracked: int = 3) -> TokenLogprobs:
    """Numbers that tell rows and places apart: the top of row r is tokens 100, 101 … with -r - 0.1, -r - 0.2 …."""
    rows = np.arange(num_rows, dtype=np.float32)[:, None]
    return TokenLogprobs(
        chosen=cast(Any, -rows[:, 0] - 0.5),
        ranks=cast(Any, np.arange(num_rows, dtype=np.int32) + 2),
        top_ids=cast(Any, np.tile(np.arange(100, 100 + num_top, dtype=np.int32), (num_rows, 1))),
        top=cast(Any, -rows - 0.1 * (1 + np.arange(num_top, dtype=np.float32))),
        tracked=cast(Any, -rows - 10.0 * (1 + np.arange(num_tracked, dtype=np.float32))),
    )


def give(
    request: RequestState, *tokens: tuple[int, int], now: float = 3.0, scores: TokenLogprobs | None = None
) -> None:
    """One step in which samples, by their index, get a token each; they end as the scheduler would end them."""
    for row, (index, token) in enumerate(tokens):
        sample = request.samples[index]
        sequence = sample.sequence
        sequence.token_ids.append(token)
        sequence.first_token_s, sequence.last_token_s = sequence.first_token_s or now, now
        ending = Ending("stop", sequence.stop_ids[token]) if token in sequence.stop_ids else None
        if sequence.stop_strings is not None:
            ending = find_stop_string(sequence, 1, ending)
        if ending is not None:
            sequence.finish_reason, sequence.stop_reason = ending.reason, ending.stop_reason
        if sample.logprobs is not None:
            assert scores is not None
            sample.score(row, scores)


def end(request: RequestState, reason: Any = "length", index: int | None = None) -> None:
    for sample in request.samples:
        if index in (None, sample.sequence.index) and sample.sequence.finish_reason is None:
            sample.sequence.finish_reason = reason


def merged(outputs: Items[RequestOutput], index: int) -> CompletionOutput:
    """What deltas of one sample add up to; checks what comes once."""
    parts = [one for output in outputs for one in output.outputs if one.index == index]
    assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.stop_reason is None for part in parts[:-1])
    logprobs = None
    if parts[0].logprobs is not None:
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=logprobs,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


@pytest.fixture
def byte_level(tiny_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tiny_tokenizers["byte-level"]


def test_cumulative_outputs_hold_everything_and_do_not_change_later(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(logprobs=1))
    first, second = byte_level.encode("ab")
    give(request, (0, first), scores=make_scores(1))
    early = request.next_output()
    give(request, (0, second), scores=make_scores(1))
    late = request.next_output()
    assert early is not None and late is not None
    assert (early.outputs[0].text, early.outputs[0].token_ids) == ("a", [first])
    assert (late.outputs[0].text, late.outputs[0].token_ids) == ("ab", [first, second])
    assert [len(output.outputs[0].logprobs or ()) for output in (early, late)] == [1, 2]
    assert not late.finished


def test_a_final_only_request_gives_nothing_before_its_end(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(n=2, output_kind=FINAL_ONLY))
    (token,) = byte_level.encode("a")
    give(request, (0, token), (1, token))
    end(request, index=0)
    assert request.next_output() is None
    end(request)
    output = request.next_output()
    assert output is not None and output.finished
    assert [one.text for one in output.outputs] == ["a", "a"]


def test_a_delta_holds_what_is_new_and_leaves_out_samples_without_news(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(n=2, output_kind=DELTA))
    assert request.next_output() is None
    a, b, c = byte_level.encode("abc")
    give(request, (0, a))
    give(request, (0, b), (1, c))
    output = request.next_output()
    assert output is not None
    assert [(one.index, one.text, one.token_ids) for one in output.outputs] == [(0, "ab", [a, b]), (1, "c", [c])]
    assert request.next_output() is None
    give(request, (1, a))
    output = request.next_output()
    assert output is not None
    assert [(one.index, one.text) for one in output.outputs] == [(1, "a")]
    end(request, index=0)
    output = request.next_output()
    assert output is not None
    assert [(one.index, one.token_ids, one.finish_reason) for one in output.outputs] == [(0, [], "length")]
    assert not output.finished
    end(request, "abort")
    output = request.next_output()
    assert output is not None and output.finished
    assert [(one.index, one.finish_reason) for one in output.outputs] == [(1, "abort")]
    assert request.next_output() is None


def test_an_interval_holds_tokens_back_but_for_the_first_and_the_last(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(output_kind=DELTA))
    for sample in request.samples:
        sample.sequence.request = dataclasses.replace(request.request, stream_interval=3)
    tokens = byte_level.encode("abcdefghi")
    found: list[list[int]] = []
    for token in tokens:
        give(request, (0, token))
        output = request.next_output()
        if output is not None:
            found.append(output.outputs[0].token_ids)
    end(request)
    output = request.next_output()
    assert output is not None
    assert [*found, output.outputs[0].token_ids] == [tokens[:1], tokens[1:4], tokens[4:7], tokens[7:]]


def test_a_whole_output_can_be_had_beside_deltas(byte_level: Tokenizer) -> None:
    """What ``LLM.generate`` returns does not depend on the kind that was asked for."""
    request = make_request(byte_level, SamplingParams(output_kind=DELTA))
    for token in byte_level.encode("hé!"):
        give(request, (0, token))
        request.next_output()
    end(request)
    assert request.output().outputs[0].text == "hé!"
    assert request.output().outputs[0].token_ids == byte_level.encode("hé!")


def test_half_a_character_waits_and_comes_as_a_replacement_at_the_end(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(output_kind=DELTA))
    token_ids = byte_level.encode("🙂")
    give(request, (0, token_ids[0]))
    output = request.next_output()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [token_ids[0]])
    end(request, "abort")
    output = request.next_output()
    assert output is not None
    assert output.outputs[0].text == "\ufffd"


def test_the_beginning_of_a_stop_string_comes_at_the_end_if_it_was_none(byte_level: Tokenizer) -> None:
    request = make_request(byte_level, SamplingParams(output_kind=DELTA, stop="hello!"))
    outputs = []
    for token in byte_level.encode("ahe"):
        give(request, (0, token))
        outputs.append(request.next_output())
    end(request)
    outputs.append(request.next_output())
    assert "".join(output.outputs[0].text for output in outputs[:-1]) == "a"
    assert outputs[-1].outputs[0].text == "he"


@pytest.mark.parametrize("keeps", [False, True])
def test_the_text_of_a_stop_token(byte_level: Tokenizer, keeps: bool) -> None:
    """A stop token is no part of the text unless asked for; the last token of a text that is complete is."""
    a, b = byte_level.encode("ab")
    request = make_request(byte_level, SamplingParams(include_stop_str_in_output=keeps), stop_ids=[b])
    give(request, (0, a))
    give(request, (0, b))
    assert request.output().outputs[0].text == ("ab" if keeps else "a")
    assert request.output().outputs[0].token_ids == [a, b]
    complete = make_request(byte_level, SamplingParams())
    complete.samples[0].sequence.finish_reason = "stop"  # as a constraint does
    give(complete, (0, b))
    assert complete.output().outputs[0].text == "b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    request = make_request(None, SamplingParams(output_kind=DELTA))
    give(request, (0, 3))
    output = request.next_output()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [3])


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.data())
def test_deltas_add_up_whenever_they_are_taken(
    tiny_tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    """Readers of any speed get the same: text, ids, logprobs; no half character, no part of a stop string."""
    tokenizer = tiny_tokenizers[name]
    stops = data.draw(st.lists(st.text("ab é🙂", min_size=1, max_size=3), max_size=2))
    params = SamplingParams(n=2, output_kind=DELTA, stop=stops, logprobs=1, flat_logprobs=data.draw(st.booleans()))
    request = make_request(tokenizer, params)
    texts = data.draw(st.tuples(*[st.text("ab é🙂", max_size=12)] * 2))
    queues = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    whole = [tokenizer.decode(queue) for queue in queues]
    outputs = []
    while any(queues):
        step = []
        for index, queue in enumerate(queues):
            if request.samples[index].sequence.finish_reason is not None:
                queue.clear()
            elif queue and data.draw(st.booleans()):
                step.append((index, queue.pop(0)))
        give(request, *step, scores=make_scores(2))
        if data.draw(st.booleans()):
            outputs.append(request.next_output())
    end(request)
    outputs = [output for output in [*outputs, request.next_output()] if output is not None]
    assert request.next_output() is None
    for expected in request.output().outputs:
        found = merged(outputs, expected.index)
        assert found.text == expected.text
        assert found.token_ids == expected.token_ids
        assert found.logprobs == list(expected.logprobs or ())
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert found.cumulative_logprob == expected.cumulative_logprob
        assert whole[expected.index].startswith(found.text)
        assert not any(stop in found.text for stop in stops)
        assert "\ufffd" not in found.text


def test_a_delta_reads_no_more_than_what_is_new(byte_level: Tokenizer) -> None:
    """Beside a long text the parts that were given out are not looked at again."""
    request = make_request(byte_level, SamplingParams(output_kind=DELTA))
    (token,) = byte_level.encode("a")
    for _ in range(500):
        give(request, (0, token))
        request.next_output()
    detokenizer = request.samples[0].detokenizer
    assert detokenizer is not None
    detokenizer._parts[:500] = [cast(Any, None)] * 500  # joining any of them would fail
    give(request, (0, token))
    output = request.next_output()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", [token])


def test_logprobs_wait_as_arrays_of_their_own_until_they_are_read() -> None:
    """What waits has no reference to the arrays of whole steps, and only as many tokens as were asked for."""
    request = make_request(None, SamplingParams(logprobs=2, output_kind=DELTA))
    for _ in range(3):
        give(request, (0, 7), scores=make_scores(50, num_top=20))
    (sample,) = request.samples
    assert sample.logprobs == [] and len(sample.scores) == 3
    waiting: list[Any] = [array for scores in sample.scores for array in scores]
    assert all(array.base is None and array.nbytes <= 16 for array in waiting)
    output = request.next_output()
    assert output is not None
    assert [list(entry) for entry in output.outputs[0].logprobs or ()] == [[7, 100, 101]] * 3
    assert not sample.scores


def test_text_that_cannot_be_made_leaves_what_was_made(byte_level: Tokenizer) -> None:
    """The first try says why; once the request has failed, its output has the text before."""
    request = make_request(byte_level, SamplingParams(logprobs=0))
    (a,) = byte_level.encode("a")
    give(request, (0, a), scores=make_scores(1))
    assert request.output().outputs[0].text == "a"
    give(request, (0, cast(Any, "no token")), scores=make_scores(1))
    with pytest.raises(TypeError):
        request.output()
    end(request)
    request.error = RequestFailedError("no luck")
    output = request.output()
    assert (output.error, output.outputs[0].text, output.outputs[0].finish_reason) == ("no luck", "a", "error")


# ---------------------------------------------------------------- what else an output says


def test_cached_tokens_are_those_of_the_first_sample() -> None:
    request = make_request(None, SamplingParams(n=2))
    assert request.output().num_cached_tokens is None
    request.samples[0].sequence.num_cached_tokens = 2
    request.samples[1].sequence.num_cached_tokens = 3
    assert request.output().num_cached_tokens == 2


def test_times_and_error() -> None:
    request = make_request(None, SamplingParams(output_kind=DELTA))
    request.samples[0].sequence.scheduled_s = 2.5
    give(request, (0, 3), now=3.0)
    first = request.next_output(with_metrics=True)
    give(request, (0, 4), now=4.0)
    end(request, "error")
    request.error = RequestFailedError("no luck")
    last = request.next_output(with_metrics=True)
    assert first is not None and last is not None
    assert first.metrics is not None and last.metrics is not None
    times = RequestMetrics(
        num_generation_tokens=1,
        arrival_time=request.arrival_time,
        queued_ts=2.0,
        scheduled_ts=2.5,
        first_token_ts=3.0,
        last_token_ts=3.0,
        first_token_latency=2.0,
    )
    assert first.metrics == times
    assert last.metrics == dataclasses.replace(times, num_generation_tokens=2, last_token_ts=4.0)
    assert (first.error, last.error) == (None, "no luck")
    assert request.output().metrics is None


# ---------------------------------------------------------------- logprobs


def test_an_entry_has_the_token_and_the_likeliest() -> None:
    scores = make_scores(2)
    entry = logprob_entry(101, 1, scores, 3, None)
    assert list(entry) == [101, 100, 102]
    assert (entry[101].logprob, entry[101].rank) == (-1.5, 3)
    assert [entry[token].rank for token in (100, 102)] == [1, 3]
    assert entry[102].logprob == pytest.approx(-1.3)
    assert list(logprob_entry(7, 0, scores, 0, None)) == [7]
    assert list(logprob_entry(7, 0, scores, -1, None)) == [7, 100, 101, 102, 103]


def test_named_tokens_take_the_place_of_the_likeliest() -> None:
    params = SamplingParams(logprob_token_ids=[50, 7, 60])
    entry = sample_entry(7, 1, make_scores(2), params, None)
    assert {token: found.rank for token, found in entry.items()} == {7: 3, 50: None, 60: None}
    assert {token: found.logprob for token, found in entry.items()} == {7: -1.5, 50: -11.0, 60: -31.0}
    everything = SamplingParams(logprobs=-1)
    assert len(sample_entry(7, 0, make_scores(1), everything, None)) == 5


def prompt_chunk(request: RequestState, first: int) -> ScoredChunk:
    """All of the prompt, from a query token of a step."""
    return ScoredChunk(request.samples[0].sequence, 0, first, PROMPT[1:])


def test_entries_have_the_tokens_texts(byte_level: Tokenizer) -> None:
    entry = logprob_entry(byte_level.encode("a")[0], 0, make_scores(1), 1, byte_level)
    assert [found.decoded_token for found in entry.values()] == ["a", byte_level.token_text(100)]


def test_entries_have_no_texts_without_detokenize(byte_level: Tokenizer) -> None:
    most_likely = SamplingParams(detokenize=False, logprobs=2)
    for params in (most_likely, SamplingParams(detokenize=False, logprob_token_ids=[50, 60])):
        request = make_request(byte_level, params)
        give(request, (0, 7), scores=make_scores(1))
        entries = list(request.output().outputs[0].logprobs or ())
        assert [[found.decoded_token for found in entry.values()] for entry in entries] == [[None] * 3]
    request = make_request(byte_level, SamplingParams(detokenize=False, prompt_logprobs=1))
    request.add_prompt_logprobs(prompt_chunk(request, 0), make_scores(2))
    positions = request.output().prompt_logprobs
    assert positions is not None
    assert [found.decoded_token for entry in positions for found in (entry or {}).values()] == [None] * 4


@pytest.mark.parametrize("is_flat", [False, True])
def test_prompt_logprobs_come_once_in_deltas(is_flat: bool) -> None:
    request = make_request(None, SamplingParams(prompt_logprobs=1, output_kind=DELTA, flat_logprobs=is_flat))
    request.add_prompt_logprobs(prompt_chunk(request, 4), make_scores(8))
    give(request, (0, 3))
    first = request.next_output()
    give(request, (0, 4))
    second = request.next_output()
    assert first is not None and second is not None
    found = first.prompt_logprobs
    assert found is not None and second.prompt_logprobs is None
    assert isinstance(found, FlatLogprobs) == is_flat
    assert [list(entry or ()) for entry in found] == [[], [5, 100], [9, 100]]
    entry = found[2]
    assert entry is not None
    assert entry[9].logprob == -5.5
    whole = request.output().prompt_logprobs
    assert whole is not None and len(whole) == 3
