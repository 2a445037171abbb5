"""A draft model on the device: answers are those without it, and it is right where it is the model itself."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import RequestOutput, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, MemoryPlanError
from jaxserve.api.metric_types import Counter
from jaxserve.api.request import parse_prompt
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.device.build import plan_engine
from jaxserve.device.catching_up import CatchUp
from jaxserve.device.runner import LocalRunner
from jaxserve.device.stage import num_programs
from jaxserve.engine.engine import Engine
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import start_engine
from jaxserve.scheduling.draft_passes import DraftPasses
from jaxserve.scheduling.plan import StepPlan
from tests.random_checkpoint import write_checkpoint

NUM_DRAFTS = 3
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "dtype": "float32",
    "deterministic": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "block_size": 8,
    "compilation_cache_dir": "",
    "compile_sizes": {"decode": [4], "mixed": [24]},
}
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
PLAIN = [
    SamplingParams(temperature=0.0, **LONG),
    SamplingParams(temperature=1.0, seed=5, **LONG),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=30, seed=2**31 + 7, **LONG),
    SamplingParams(temperature=1.0, seed=9, min_p=0.05, **LONG),
]
OTHERS = [
    SamplingParams(temperature=0.0, logprobs=2, frequency_penalty=0.7, presence_penalty=0.4, **LONG),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=9, logprobs=1, **LONG),
    SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=11, min_tokens=12, max_tokens=20),
    SamplingParams(temperature=1.0, seed=13, logit_bias={5: 3.0}, bad_words=["e"], logprobs=1, **LONG),
    SamplingParams(temperature=1.0, seed=19, structured_outputs=StructuredOutputsParams(regex="[a-z]{20}"), **LONG),
    SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
]


def drafting(directory: str | Path, **keys: Any) -> dict[str, Any]:
    """The settings of a draft model, all of whose drafts are verified, whatever it costs."""
    config = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": {**config, "enable_adaptive_verification": False, **keys}}


def answers(engine: Engine, params: list[SamplingParams], keeps_cache: bool = False) -> list[RequestOutput]:
    """What requests with a long prompt, of which several begin alike, return."""
    if not keeps_cache:
        engine.reset_prefix_cache()
    states = []
    for index, some in enumerate(params):
        request = parse_prompt("What is 12 plus 30? It is, as ever" + " abc"[: index % 4], some)
        states.append(engine.submit(dataclasses.replace(request, request_id=str(index))))
    while engine.num_unfinished or any(replica.has_steps_in_flight for replica in engine.replicas):
        engine.step()
    for replica in engine.replicas:
        for scheduler in replica.schedulers:
            assert scheduler.allocator.num_free == scheduler.allocator.num_pages
    return [state.output() for state in states]


def content(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, reasons and the bits of all logprobs."""
    return [[(list(one.token_ids), one.finish_reason, str(one.logprobs)) for one in each.outputs] for each in outputs]


def counts(engine: Engine) -> tuple[int, int]:
    """Drafts that were verified, and accepted ones."""
    found = [scheduler.draft_counts for replica in engine.replicas for scheduler in replica.schedulers]
    return sum(each.num_tokens for each in found), sum(sum(each.num_accepted.values()) for each in found)


def compiles(engine: Engine) -> float:
    """Programs compiled since the engine was ready."""
    (found,) = [metric for metric in engine.metrics() if metric.name == "jaxserve:compiles_after_ready"]
    assert isinstance(found, Counter)
    return found.value


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The answers without drafts."""
    engine = start_engine(EngineConfig(**SETTINGS)).engine
    found = content(answers(engine, PLAIN + OTHERS))
    engine.close()
    return found


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer with the vocabulary of the demo model, whose sizes are others."""
    directory = tmp_path_factory.mktemp("small")
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    write_checkpoint(directory, config | sizes | {"num_key_value_heads": 2, "torch_dtype": "float32"}, seed=1)
    for path in MODEL_DIRECTORY.glob("*token*.json"):
        shutil.copy(path, directory)
    return directory


MESHES: list[Any] = [
    {},
    pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"num_gpu_blocks_override": 10}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "layout": "context_parallel"}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "layout": "split_logits"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", MESHES, ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(settings: dict[str, Any], expected: list[Any]) -> None:
    """Greedy and sampled: each draft has the noise of its position; also after cached prefixes and preemption."""
    engine = start_engine(EngineConfig(**SETTINGS, **settings, **drafting("demo"))).engine
    assert content(answers(engine, PLAIN)) == expected[: len(PLAIN)]
    assert content(answers(engine, PLAIN, keeps_cache=True)) == expected[: len(PLAIN)]
    num_drafts, num_accepted = counts(engine)
    assert 0 < num_drafts == num_accepted
    schedulers = [scheduler for replica in engine.replicas for scheduler in replica.schedulers]
    assert sum(scheduler.pages.num_hit_tokens for scheduler in schedulers) > 0
    assert ("num_gpu_blocks_override" in settings) == any(scheduler.num_preemptions for scheduler in schedulers)
    assert compiles(engine) == 0
    engine.close()


def test_passes_follow_the_number_of_drafts(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    """However it changes: the model has taken in every token, so that it is right after steps without drafts too.

    With native kernels, those of such steps wait for the next one with drafts.
    """
    numbers = itertools.cycle([3, 0, 0, 0, 2, 1, 0, 3])
    monkeypatch.setattr(DraftPasses, "choose", lambda *_: next(numbers))
    engine = start_engine(EngineConfig(**SETTINGS, **drafting("demo"))).engine
    runner, planned, made, verified = engine.replicas[0].runner, list[int](), list[int](), list[int]()
    assert isinstance(runner, LocalRunner)
    launch, take_in, late = runner.launch, CatchUp.run, list[int]()

    def noted_late(catch_up: CatchUp, *given: Any) -> Any:
        late.append(len(catch_up._postponed))
        return take_in(catch_up, *given)

    def noted(plans: Sequence[StepPlan]) -> None:
        launch(plans)
        planned.append(plans[0].num_drafts)
        verified.append(max(plans[0].num_samples, default=1) - 1)
        drafts = runner._stages[-1].state.latest.drafts
        assert drafts is not None
        made.append(int(np.asarray(drafts).any(0).sum()))

    monkeypatch.setattr(runner, "launch", noted)
    monkeypatch.setattr(CatchUp, "run", noted_late)
    assert content(answers(engine, PLAIN[:1])) == expected[:1]
    assert 2 in late or runner._stages[-1].catch_up is None
    assert made[1:] == planned[1:], "the first step computes only a part of the prompt"
    assert verified[1:] == planned[:-1] and {0, 1, 2, 3} == set(planned)
    num_drafts, num_accepted = counts(engine)
    assert num_drafts == num_accepted > 0
    assert content(answers(engine, PLAIN)) == expected[: len(PLAIN)]
    engine.close()


@pytest.fixture(scope="module")
def with_small(small_model: Path) -> Iterator[Engine]:
    """The demo model with a random draft model."""
    engine = start_engine(EngineConfig(**SETTINGS, **drafting(small_model))).engine
    yield engine
    assert compiles(engine) == 0
    engine.close()


def test_a_draft_model_changes_no_answer(with_small: Engine, expected: list[Any]) -> None:
    """Whatever requests ask for; those that the host masks get no drafts."""
    assert content(answers(with_small, PLAIN + OTHERS)) == expected
    num_drafts, num_accepted = counts(with_small)
    assert 0 < num_accepted < num_drafts


@pytest.mark.slow
def test_greedy_drafts_change_no_answer(small_model: Path, expected: list[Any]) -> None:
    """Two data slices of two stages each, on which the draft model is of the last."""
    mesh = {"data_parallel_size": 2, "pipeline_parallel_size": 2}
    config = EngineConfig(**SETTINGS, **mesh, **drafting(small_model, draft_sample_method="greedy"))
    engine = start_engine(config).engine
    assert content(answers(engine, PLAIN + OTHERS)) == expected
    engine.close()


@pytest.mark.slow
def test_a_draft_model_moves_to_another_mesh(expected: list[Any]) -> None:
    """In the middle of texts, with its weights and pages: it is right as before."""
    config = EngineConfig(**SETTINGS, **drafting("demo"))
    started = start_engine(config)
    assert content(answers(started.engine, PLAIN)) == expected[: len(PLAIN)]
    resharder = Resharder(config, started)
    for mesh in ("tensor=2", "stage=2", "tensor=1"):
        report = resharder.reshard(mesh, None)
        assert report.num_pages > 0
        assert content(answers(started.engine, PLAIN, keeps_cache=True)) == expected[: len(PLAIN)]
    num_drafts, num_accepted = counts(started.engine)
    assert 0 < num_drafts == num_accepted
    assert compiles(started.engine) == 0
    started.engine.close()


def test_a_draft_model_is_planned(small_model: Path) -> None:
    """Its weights and pages count; shapes without drafts are few, so that there is room for its programs."""
    config = EngineConfig(model="demo", max_model_len=64)
    alone, drafted = plan_engine(config), plan_engine(dataclasses.replace(config, **drafting(small_model)))
    drafter = drafted.models[0].drafter
    assert drafter is not None and drafted.needs.drafter == drafter.sharded.weight_bytes > 0
    assert drafted.needs.weights == alone.needs.weights + drafted.needs.drafter
    assert drafted.needs.page > alone.needs.page
    assert num_programs(drafted.buckets, "cpu", drafting=drafted.models[-1]) <= 40
    with pytest.raises(MemoryPlanError, match=r"for weights \(0\.00 GiB of them of the draft model\)"):
        plan_engine(dataclasses.replace(config, gpu_memory_utilization=1e-6, **drafting(small_model)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": None}, "speculative_config.model: expected the directory or hub id of a draft model"),
        ({"draft_sample_method": "best"}, "draft_sample_method: expected one of probabilistic, greedy, got 'best'"),
        ({"model": 3}, "speculative_config.model: expected a text, got 3"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2: .* expected 1"),
        ({"prompt_lookup_max": 2}, "expected method, num_speculative_tokens, .*, model, .*got 'prompt_lookup_max'"),
    ],
)
def test_what_a_draft_model_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model="demo", **drafting("demo", **keys)))


def test_a_draft_model_has_the_same_vocabulary(tmp_path: Path) -> None:
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 361}))
    with pytest.raises(ConfigError, match="a vocabulary of 361 tokens, demo one of 360; a draft model needs the same"):
        plan_engine(EngineConfig(model="demo", **drafting(tmp_path)))
