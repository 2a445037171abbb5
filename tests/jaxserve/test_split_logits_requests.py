"""Requests of every kind on devices that keep their part of the logits: what devices with all logits return."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import SamplingParams, StructuredOutputsParams
from tests.jaxserve.test_draft_requests import LONG, REQUESTS, Run, check_same
from tests.jaxserve.test_request_mix import SCHEMA, outcome, scores

FURTHER = [
    SamplingParams(temperature=1.2, min_p=0.05, seed=23, logprob_token_ids=[20, 300, 359], **LONG),
    SamplingParams(temperature=0.8, seed=29, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=20),
]
ALL = [*REQUESTS, *FURTHER]


def started(**settings: Any) -> Run:
    """An engine on two devices whose last logprobs have 360 tokens, 256 of them on the first device."""
    return Run(tensor_parallel_size=2, compile_sizes={"decode": [8], "mixed": [64]}, **settings)


@pytest.fixture(scope="module")
def split() -> Iterator[Run]:
    made = started(layout="split_logits")
    assert made.started.plan.models[0].vocab_width == 512
    yield made
    assert made.counter("compiles_after_ready") == 0
    made.engine.close()


def test_requests_are_as_with_gathered_logits(split: Run) -> None:
    """The same tokens and alternatives, and the same logprobs but for the order of sums."""
    gathered = started()
    found, expected = split.without_drafts(ALL), gathered.without_drafts(ALL)
    gathered.engine.close()
    for one, other, params in zip(found, expected, ALL, strict=True):
        assert outcome(one) == outcome(other), params
        assert scores(one) == pytest.approx(scores(other), abs=1e-4)
        for text, wanted in zip(one.outputs, other.outputs, strict=True):
            assert [[*table] for table in text.logprobs or ()] == [[*table] for table in wanted.logprobs or ()]
    assert {token for one in found for text in one.outputs for token in text.token_ids if token >= 256}


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_a_request_has_the_same_bits_whatever_is_in_its_steps(split: Run, kind: str) -> None:
    """With drafts, and alone."""
    expected = split.without_drafts(ALL)
    check_same(split.answers(kind, ALL), expected)
    if kind == "right":
        for params, together in zip(ALL[1::2], expected[1::2], strict=True):
            check_same(split.answers("none", [params]), [together])
