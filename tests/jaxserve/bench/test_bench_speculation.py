"""Speculative decoding against none in turns: the replayed drafts, the interval of the ratio, and the command."""

import json
import math

import pytest

from jaxserve.api.request import Request
from jaxserve.bench.replay import Replay
from jaxserve.bench.speculation import median_interval
from jaxserve.cli import main
from jaxserve.scheduling.sequence import Sequence
from tests.sequences import proposed

PROMPT, OUTPUT = [1, 2, 3], [*range(10, 90)] * 50


def sequence(num_output_tokens: int, num_in_flight: int = 0) -> Sequence:
    """A sequence with a row in the step that is being planned."""
    tokens = PROMPT + OUTPUT[:num_output_tokens]
    return Sequence(Request(request_id="s"), tokens, len(PROMPT), 9000, num_pending=1 + num_in_flight)


def test_a_replay_is_right_at_the_set_rate_and_the_same_wherever_it_is_asked() -> None:
    replay = Replay(4, 0.8, vocab_size=100)
    replay.learn(PROMPT, OUTPUT, seed=0)
    assert len(proposed(replay, sequence(0))) == 4 and len(proposed(replay, sequence(0, 2))) == 6
    drafts = [proposed(replay, sequence(place))[0] for place in range(len(OUTPUT))]
    assert proposed(replay, sequence(7, 2)) == drafts[7:13] and proposed(replay, sequence(len(OUTPUT))) == []
    right = [draft == token for draft, token in zip(drafts, OUTPUT, strict=True)]
    assert abs(sum(right) / len(right) - 0.8) < 0.03
    replay.learn(PROMPT, OUTPUT, seed=1)
    assert [proposed(replay, sequence(place))[0] for place in range(len(OUTPUT))] != drafts


def test_the_interval_of_a_median_needs_six_values() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, -math.inf, math.inf)
    assert median_interval([6.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == (3.5, 1.0, 6.0)
    assert median_interval([float(value) for value in range(20)]) == (9.5, 5.0, 14.0), "as in tables of the sign test"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replay-acceptance", "1.5"], "--replay-acceptance: expected a number from 0 to 1, got 1.5"),
        ([], "there is nothing to compare: give --speculative-config, or --spec-method and --spec-tokens"),
    ],
)
def test_what_cannot_be_compared(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speculation", "--model", "demo", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_takes_as_many_steps_as_its_rate_says(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "64", "--quiet"]
    fixed = {"method": "ngram", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
    speculation = ["--speculative-config", json.dumps(fixed), "--replay-acceptance", "1", "--no-async-scheduling"]
    runs = ["--num-iters", "2", "--num-iters-warmup", "1", "--output-len", "51", "--temperature", "1", "--json"]
    main(["bench", "speculation", "--model", "demo", *small, *speculation, *runs])
    found = json.loads(capsys.readouterr().out)
    assert (found["steps_without"], found["steps_with"], found["different_outputs"]) == (51, 11, 0)
    assert found["mean_acceptance_length"] == 5 and len(found["seconds_with"]) == 2
