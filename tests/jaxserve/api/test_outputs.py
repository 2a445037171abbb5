"""What requests return, and how errors read."""

import dataclasses
import pickle

import pytest

from jaxserve.api.errors import ConfigError, EngineDeadError, JaxserveError, RequestError, UnsupportedModelError
from jaxserve.api.logprobs import FlatLogprobs, Logprob
from jaxserve.api.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestMetrics, RequestOutput


def completion(**changes: object) -> CompletionOutput:
    values: dict = {"index": 0, "text": " there", "token_ids": [5, 6]}
    return CompletionOutput(**{**values, **changes})


def test_completion_is_finished_when_it_has_a_reason() -> None:
    assert not completion().finished()
    assert completion(finish_reason="length").finished()


def test_repr_of_a_completion_is_short() -> None:
    assert repr(completion()) == "CompletionOutput(index=0, text=' there', token_ids=[5, 6], finish_reason=None)"
    long = completion(
        token_ids=list(range(100)),
        cumulative_logprob=-1.25,
        logprobs=[{5: Logprob(-0.5, 1, "a")}],
        finish_reason="stop",
        stop_reason="x",
    )
    assert repr(long) == (
        "CompletionOutput(index=0, text=' there', token_ids=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, … "
        "100 ids], cumulative_logprob=-1.2500, logprobs=[1 positions], finish_reason='stop', stop_reason='x')"
    )


def test_request_output() -> None:
    output = RequestOutput(
        request_id="0",
        prompt="Hi",
        prompt_token_ids=[1, 2],
        outputs=[completion()],
        finished=False,
        num_cached_tokens=0,
    )
    assert output.metrics is None
    assert repr(output) == (
        "RequestOutput(request_id='0', prompt='Hi', prompt_token_ids=[1, 2], outputs=[CompletionOutput(index=0, "
        "text=' there', token_ids=[5, 6], finish_reason=None)], finished=False, num_cached_tokens=0)"
    )


def test_repr_shows_the_error_and_counts_logprobs() -> None:
    output = RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[completion(logprobs=FlatLogprobs.of([{5: Logprob(-0.5)}, {6: Logprob(-0.5)}]), finish_reason="error")],
        finished=True,
        prompt_logprobs=FlatLogprobs.of([None]),
        error="the grammar has no start",
    )
    assert "logprobs=[2 positions], finish_reason='error'" in repr(output)
    assert repr(output).endswith("finished=True, prompt_logprobs=[1 positions], error='the grammar has no start')")


def test_beam_search_output() -> None:
    beam = BeamSearchSequence(tokens=[1, 2], logprobs=[{2: Logprob(-0.5)}], cum_logprob=-0.5)
    assert BeamSearchOutput([beam]).sequences == [beam]
    assert (beam.text, beam.finish_reason, beam.stop_reason) == (None, None, None)


def test_metrics_have_the_names_of_vllm() -> None:
    """Those of `RequestStateStats` in `vllm/v1/metrics/stats.py`, with its defaults, and what we count beside it."""
    times = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "first_token_latency")
    counts = ("num_generation_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    expected = {**dict.fromkeys(counts, 0), **dict.fromkeys(times, 0.0), "prefix": None, "is_corrupted": False}
    assert dataclasses.asdict(RequestMetrics()) == expected


def test_request_error_names_parameter_and_value() -> None:
    error = RequestError("must be small", parameter="size", value="x" * 500)
    assert str(error) == f"must be small (parameter=size, value='{'x' * 199}…)"
    assert len(error.value) == 500
    copy = pickle.loads(pickle.dumps(RequestError("no", parameter="size", value=3)))
    assert (str(copy), copy.parameter, copy.value) == ("no (parameter=size, value=3)", "size", 3)
    assert str(RequestError("plain")) == "plain"


@pytest.mark.parametrize("kind", [ConfigError, RequestError, UnsupportedModelError])
def test_bad_input_is_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)
    assert issubclass(kind, JaxserveError)


def test_a_dead_engine_is_not_bad_input() -> None:
    assert issubclass(EngineDeadError, RuntimeError)
    assert not issubclass(EngineDeadError, ValueError)
