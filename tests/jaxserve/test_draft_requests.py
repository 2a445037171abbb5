"""Requests with drafts, end to end on the demo model: what they return is what they return without any."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxserve import RequestOutput, SamplingParams
from jaxserve.api import speculation
from jaxserve.api.config import EngineConfig
from jaxserve.api.metric_types import Counter
from jaxserve.api.request import parse_prompt
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.engine.startup import StartedEngine, start_engine
from jaxserve.scheduling.proposers import registry
from jaxserve.scheduling.sequence import Sequence
from tests.sequences import NoState

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "dtype": "float32",
    "deterministic": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 8,
    "compilation_cache_dir": "",
    "speculative_config": {"method": "known", "num_speculative_tokens": 4, "enable_adaptive_verification": False},
}
PROMPT = "What is 12 plus 30?"
LONG = {"max_tokens": 40, "ignore_eos": True}
REQUESTS = [
    SamplingParams(temperature=0.0, logprobs=3, **LONG),
    SamplingParams(temperature=1.0, seed=5, logprobs=0, **LONG),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=30, seed=2**31 + 7, **LONG),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, logprobs=1, **LONG),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, seed=9, logprobs=2, **LONG),
    SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=11, min_tokens=12, max_tokens=40),
    SamplingParams(temperature=1.0, seed=13, logit_bias={5: 3.0}, bad_words=["e"], logprobs=1, **LONG),
    SamplingParams(temperature=1.0, seed=17, allowed_token_ids=list(range(40, 80)), prompt_logprobs=2, **LONG),
    SamplingParams(temperature=1.0, seed=19, structured_outputs=StructuredOutputsParams(regex="[a-z]{20}"), **LONG),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, ignore_eos=True),
]


class Proposer(NoState):
    """Knows what each sequence will say, and proposes that, something else, or a mixture; nothing at first."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.kind = "none"
        self.rng = np.random.default_rng(0)
        self.num_proposals = 0

    def follow(self, sequence: Sequence) -> list[int]:
        """Up to twelve tokens."""
        if self.kind == "none":
            return []
        self.num_proposals += 1
        future = self.texts[f"{sequence.request.request_id}-{sequence.index}"][sequence.num_output_tokens :][:12]
        is_right = {"right": 1.0, "wrong": 0.0, "mixed": 0.8}[self.kind]
        return [token if self.rng.random() < is_right else (token + 1) % 200 for token in future]


class Run:
    """An engine with the proposer, or settings of its own, and requests of names that come again in each run."""

    def __init__(self, **settings: Any):
        self.proposer = Proposer()
        with contextlib.nullcontext() if "speculative_config" in settings else self.proposing():
            self.started: StartedEngine = start_engine(EngineConfig(**{**SETTINGS, **settings}))
        self.engine = self.started.engine

    @contextlib.contextmanager
    def proposing(self) -> Iterator[None]:
        """Engines that are started or moved meanwhile ask the proposer."""
        keys = ("num_speculative_tokens", "enable_adaptive_verification")
        methods, proposers = {"known": keys}, {"known": lambda config: self.proposer}
        with (
            mock.patch.object(speculation, "METHODS", methods),
            mock.patch.object(registry, "PROPOSERS", proposers),
        ):
            yield

    def answers(
        self, kind: str, params: list[SamplingParams], prompts: Mapping[int, str] = MappingProxyType({})
    ) -> list[RequestOutput]:
        """What the requests return; their prompts are computed anew each time. Some have prompts of their own."""
        self.proposer.kind = kind
        self.engine.reset_prefix_cache()
        states = []
        for index, some in enumerate(params):
            request = parse_prompt(prompts.get(index, PROMPT + " abc"[: (some.seed or 0) % 4]), some)
            states.append(self.engine.submit(dataclasses.replace(request, request_id=str(index))))
        while self.engine.num_unfinished:
            self.engine.step()
        replica = self.engine.replicas[0]
        while replica.has_steps_in_flight:
            self.engine.step()
        allocator = replica.schedulers[0].allocator
        assert allocator.num_free == allocator.num_pages
        return [state.output() for state in states]

    def without_drafts(self, params: list[SamplingParams]) -> list[RequestOutput]:
        """The same, and it becomes what the proposer knows."""
        outputs = self.answers("none", params)
        self.learn(outputs)
        return outputs

    def learn(self, outputs: list[RequestOutput]) -> None:
        """They become what the proposer knows."""
        self.proposer.texts = {
            f"{output.request_id}-{one.index}": list(one.token_ids) for output in outputs for one in output.outputs
        }

    def counter(self, name: str) -> float:
        """A metric's value."""
        (found,) = [metric for metric in self.engine.metrics() if metric.name == f"jaxserve:{name}"]
        assert isinstance(found, Counter)
        return found.value


RUNS: dict[str, dict[str, Any]] = {
    "overlapping": {"async_scheduling": True},
    "one step at a time": {"async_scheduling": False},
    "in stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(**RUNS[request.param])
    yield made
    assert made.counter("compiles_after_ready") == 0
    made.engine.close()


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens, texts, reasons and the bits of all logprobs."""
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        for text, wanted in zip(one.outputs, other.outputs, strict=True):
            assert text == wanted


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_drafts_change_no_answer(run: Run, kind: str) -> None:
    expected = run.without_drafts(REQUESTS)
    assert [one.finished for one in expected] == [True] * len(REQUESTS)
    replica = run.engine.replicas[0]
    steps, tokens = replica.num_steps, run.counter("generation_tokens")
    check_same(run.answers(kind, REQUESTS), expected)
    num_tokens = sum(len(text.token_ids) for output in expected for text in output.outputs)
    assert run.counter("generation_tokens") - tokens == num_tokens
    assert kind != "right" or replica.num_steps - steps < 60


def test_right_drafts_save_steps(run: Run) -> None:
    params = [REQUESTS[0]]
    run.without_drafts(params)
    replica = run.engine.replicas[0]
    steps = replica.num_steps
    run.answers("right", params)
    assert replica.num_steps - steps <= 12, "40 tokens, five at a time"


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_a_text_ends_among_accepted_drafts(run: Run, kind: str) -> None:
    """By a stop string or token that lies anywhere in the text; tokens and logprobs after it are dropped."""
    tokenizer = run.started.tokenizer
    whole = run.without_drafts([SamplingParams(temperature=1.0, seed=23, logprobs=1, **LONG)])[0].outputs[0]
    base = functools.partial(SamplingParams, temperature=1.0, seed=23, logprobs=1, **LONG)
    texts = [tokenizer.decode([*whole.token_ids][:end]) for end in range(6, 30, 3)]
    stops = [text[-2:] for text in texts if text[-2:].isprintable()]
    params = [base(stop=[stop], include_stop_str_in_output=bool(i % 2)) for i, stop in enumerate(stops)]
    params += [base(stop_token_ids=[token]) for token in whole.token_ids[7:20:4]]
    params += [base(stop=stops[:3], stop_token_ids=whole.token_ids[10:11]), base(stop=stops[-1:], min_tokens=9)]
    expected = run.without_drafts(params)
    assert {text.finish_reason for one in expected for text in one.outputs} == {"stop"}
    full = [SamplingParams(temperature=1.0, seed=23, **LONG)] * len(params)
    known = run.without_drafts(full)  # the proposer goes on after the ends
    assert all(one.outputs[0].token_ids == whole.token_ids for one in known)
    tokens = run.counter("generation_tokens")
    check_same(run.answers(kind, params), expected)
    num_tokens = sum(len(one.outputs[0].token_ids) for one in expected)
    assert run.counter("generation_tokens") - tokens == num_tokens


def test_drafts_and_preemption(run: Run) -> None:
    """Too few pages for all: sequences lose theirs with drafts in flight, and go on with the tokens they had."""
    few = Run(async_scheduling=run.engine.replicas[0]._depth == 2, num_gpu_blocks_override=17)
    expected = run.without_drafts(REQUESTS)
    few.proposer.texts = run.proposer.texts
    for kind in ("right", "mixed"):
        check_same(few.answers(kind, REQUESTS), expected)
    assert few.engine.replicas[0].schedulers[0].num_preemptions > 5
    few.engine.close()
