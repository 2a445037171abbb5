"""Drafts of requests whose masks the host makes: what they return is what an engine without drafts returns."""

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from jaxserve import RequestOutput, SamplingParams, StructuredOutputsParams
from jaxserve.device.slots import TokenMasks
from jaxserve.parsers.tool_choice import tool_choice_schema
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step
from jaxserve.structured_output.grammar_constraint import GrammarConstraint
from tests.jaxserve.test_draft_requests import LONG, Run, check_same
from tests.jaxserve.test_request_mix import SCHEMA

OBJECT = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "description": {"enum": ["mild", "extreme"]}},
    "required": ["temperature", "description"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}]
WORDS = ["th", "12", " plus", "ee", "42", "zz", "s "]


def structured(**fields: Any) -> dict[str, Any]:
    """The parameter."""
    return {"structured_outputs": StructuredOutputsParams(**fields)}


MASKED = [
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=60, **structured(json=OBJECT, disable_any_whitespace=True)),
    SamplingParams(temperature=1.0, seed=31, logprobs=1, max_tokens=60, **structured(json=OBJECT)),
    SamplingParams(temperature=1.5, seed=37, n=2, max_tokens=40, **structured(regex="[a-f]{3,9}(-[0-9]{2})+")),
    SamplingParams(temperature=1.0, seed=41, max_tokens=20, **structured(choice=["yes", "yesterday", "no"])),
    SamplingParams(temperature=0.7, seed=43, max_tokens=60, **structured(json=tool_choice_schema(TOOLS, "required"))),
    SamplingParams(temperature=1.2, seed=47, min_tokens=9, max_tokens=30, logprobs=1),
    SamplingParams(temperature=0.0, min_tokens=23, max_tokens=40),
    SamplingParams(temperature=1.0, seed=53, min_tokens=6, stop_token_ids=[282, 283, 284], max_tokens=30),
    SamplingParams(temperature=1.3, seed=59, bad_words=WORDS, logprobs=1, **LONG),
    SamplingParams(temperature=0.0, bad_words=WORDS, frequency_penalty=0.5, **LONG),
    SamplingParams(
        temperature=1.0, seed=61, min_tokens=15, bad_words=WORDS, max_tokens=40, **structured(regex="[a-z ]*")
    ),
    SamplingParams(temperature=0.0, thinking_token_budget=5, logprobs=1, **LONG),
    SamplingParams(temperature=1.0, seed=67, thinking_token_budget=0, bad_words=WORDS, **LONG),
    SamplingParams(
        temperature=1.0, seed=71, thinking_token_budget=7, max_tokens=40, **structured(choice=["on", "off"])
    ),
    SamplingParams(temperature=1.0, seed=73, repetition_penalty=1.2, max_tokens=30, **structured(json_object=True)),
    SamplingParams(temperature=1.0, seed=79, logprobs=1, **LONG),
]
PROMPTS = {11: "<think>sort 9 8 7", 12: "<think>1+1=", 13: "1+1=<think>\n"}


@functools.cache
def without_drafts(layout: str) -> list[RequestOutput]:
    """What an engine without speculative decoding returns, on the same devices where these count."""
    plain = Run(speculative_config=None, reasoning_parser="think", **LAYOUTS.get(layout, {}))
    expected = plain.answers("none", MASKED, PROMPTS)
    plain.engine.close()
    assert all(one.finished for one in expected)
    return expected


LAYOUTS = {"split logits": {"tensor_parallel_size": 2, "layout": "split_logits"}}
METHODS: list[dict[str, Any]] = [
    {"method": "grammar"},
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "draft_model", "model": "demo"},
]
RUNS: dict[str, dict[str, Any]] = {
    "overlapping": {"async_scheduling": True},
    "one step at a time": {"async_scheduling": False},
    "in stages": {"pipeline_parallel_size": 2},
    "few pages": {"num_gpu_blocks_override": 17},
    "replicas": {"data_parallel_size": 2},
    **LAYOUTS,
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name != "overlapping" else []) for name in RUNS],
)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(reasoning_parser="think", **RUNS[request.param])
    made.learn(without_drafts(request.param))
    yield made
    assert made.counter("compiles_after_ready") == 0
    made.engine.close()


@pytest.mark.parametrize("kind", ["right", "mixed", pytest.param("wrong", marks=pytest.mark.slow), "none"])
def test_drafts_change_no_answer(run: Run, kind: str, request: pytest.FixtureRequest) -> None:
    """Right drafts are all kept; with none, there are those that grammars and budgets force."""
    expected = without_drafts(request.node.callspec.params["run"])
    before = counts(run)
    check_same(run.answers(kind, MASKED, PROMPTS), expected)
    drafted, accepted = (after - one for after, one in zip(counts(run), before, strict=True))
    assert drafted > 30 and accepted >= drafted * {"right": 1.0, "none": 0.9}.get(kind, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config["method"])
def test_methods_change_no_answer(config: dict[str, Any]) -> None:
    made = Run(speculative_config={"num_speculative_tokens": 5, **config}, reasoning_parser="think")
    for _ in range(2):
        check_same(made.answers("none", MASKED, PROMPTS), without_drafts("overlapping"))
    assert counts(made)[1] > 30 and made.counter("compiles_after_ready") == 0
    made.engine.close()


def counts(run: Run) -> tuple[float, float]:
    """Draft tokens and accepted ones so far."""
    return run.counter("spec_decode_num_draft_tokens"), run.counter("spec_decode_num_accepted_tokens")


def mask_before(self: Step, slot: int, masks: list[bytes | None]) -> None:
    """Each sample gets the mask of the state before."""
    first = next((mask.words for mask in self.plan.masks if mask.slot == slot), None)
    ADD_MASKS(self, slot, [first, *masks[:-1]] if masks else [])


ADD_MASKS = Step.add_draft_masks
BREAKS: dict[str, tuple[Any, str, Any]] = {
    "masks of the state before": (Step, "add_draft_masks", mask_before),
    "one mask for a row": (Step, "add_draft_masks", lambda self, slot, masks: None),
    "no way back": (GrammarConstraint, "restore", lambda self, state: None),
    "a minimum of unknown tokens": (
        Sequence,
        "waits_for_host",
        property(lambda self: self.constraint is not None and self.num_pending > 0),
    ),
    "bans of the row's start": (
        TokenMasks,
        "_row_words",
        lambda self, slot, positions, masks: ROW_WORDS(self, slot, [positions[0]] * len(positions), masks),
    ),
}
ROW_WORDS = TokenMasks._row_words


@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param("in stages", name, marks=pytest.mark.slow) if "unknown" in name else ("overlapping", name)
        for name in BREAKS
    ],
    indirect=["run"],
)
def test_breaks_are_seen(run: Run, name: str, request: pytest.FixtureRequest) -> None:
    expected = without_drafts(request.node.callspec.params["run"])
    with mock.patch.object(*BREAKS[name]):
        found = run.answers("mixed", MASKED, PROMPTS)
    with pytest.raises(AssertionError):
        check_same(found, expected)
