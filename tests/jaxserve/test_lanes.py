"""Devices that share experts and have requests of their own: the answers of one device, whatever the others run."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, PoolingParams, RequestOutput, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.request import parse_prompt
from jaxserve.device.build import plan_engine
from jaxserve.engine.model_defaults import find_tokenizer
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import assemble_engine
from jaxserve.scheduling.plan_codec import decode_plans
from jaxserve.scheduling.scheduler import Scheduler
from sharding import get_layout
from tests.jaxserve.test_request_mix import REQUESTS, answers_alone, outcome, scores
from tests.random_checkpoint import write_checkpoint_with_tokenizer
from tests.remote_runner import RemoteRunner

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 360,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "decoder_sparse_step": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "block_size": 8,
    "compile_sizes": {"decode": [2, 4], "mixed": [48]},
    "compilation_cache_dir": "",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "gather": {"expert_parallel_size": 2},
    "gather with tensor": {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    "deterministic": {"expert_parallel_size": 2, "deterministic": True},
    "deterministic on four": {"expert_parallel_size": 4, "deterministic": True},
    "deterministic with tensor": {"expert_parallel_size": 2, "tensor_parallel_size": 2, "deterministic": True},
    "deterministic with split logits": {
        "expert_parallel_size": 2,
        "tensor_parallel_size": 2,
        "deterministic": True,
        "layout": dataclasses.replace(get_layout("expert_all_to_all"), logits="split"),
    },
    "all_to_all": {"expert_parallel_size": 4, "layout": "expert_all_to_all"},
    "one step at a time": {"expert_parallel_size": 2, "async_scheduling": False},
    "two replicas": {"expert_parallel_size": 2, "data_parallel_size": 2},
}
for dispatch in ("gather", "all_to_all"):
    shared = dataclasses.replace(get_layout(f"expert_{dispatch}"), residual="tokens")
    LAYOUTS[f"{dispatch} with shared tokens"] = {**LAYOUTS["gather with tensor"], "layout": shared}
LAYOUTS["all_to_all with shared tokens"]["deterministic"] = True
FAST = ("gather", "deterministic")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with experts in every layer, and the demo's tokenizer."""
    directory = tmp_path_factory.mktemp("sparse")
    write_checkpoint_with_tokenizer(directory, CONFIG, seed=1)
    return directory


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[LLM]:
    """An engine on one device."""
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole: LLM) -> list[RequestOutput]:
    """Each request alone, on one device."""
    return answers_alone(whole)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in LAYOUTS],
)
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    """An engine with several lanes; after the tests nothing has compiled, and no page is in use."""
    with LLM(str(model), **SETTINGS, **LAYOUTS[request.param]) as made:
        yield made
        assert value(made, "compiles_after_ready") == 0
        assert value(made, "kv_cache_usage_perc") == 0
        assert made.engine.num_unfinished == 0


def value(llm: LLM, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"jaxserve:{name}")


def schedulers(llm: LLM) -> list[Scheduler]:
    """Those of all lanes."""
    return [scheduler for replica in llm.engine.replicas for scheduler in replica.schedulers]


def submit(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> RequestState:
    return llm.engine.submit(parse_prompt(prompt, params))


def finish(llm: LLM) -> None:
    """Runs steps until every request has finished."""
    while llm.engine.num_unfinished or any(replica.has_steps_in_flight for replica in llm.engine.replicas):
        llm.engine.step()


def tokens(request: RequestState) -> list[int]:
    return request.samples[0].output().token_ids


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_of_every_kind_are_as_on_one_device(seed: int, llm: LLM, expected: list[RequestOutput]) -> None:
    """In random order over the lanes; a deterministic engine gives the bits that each request has alone."""
    order = random.Random(seed).sample(range(len(REQUESTS)), len(REQUESTS))
    pairs = [(REQUESTS[index][0], SamplingParams(**REQUESTS[index][1])) for index in order]
    found = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    for index, output in zip(order, found, strict=True):
        assert outcome(output) == outcome(expected[index]), REQUESTS[index]
        assert scores(output) == pytest.approx(scores(expected[index]), abs=1e-3)
    if llm.config.deterministic:
        llm.reset_prefix_cache()
        for (prompt, params), output in zip(pairs, found, strict=True):
            (alone,) = llm.generate(prompt, params, use_tqdm=False)
            assert scores(alone) == scores(output)


def test_the_plan_counts_all_lanes(llm: LLM) -> None:
    """A request has the pages of one lane, and the engine those of all."""
    (program, *_), num_lanes = llm.plan.models, len(schedulers(llm))
    assert [scheduler.allocator.num_pages for scheduler in schedulers(llm)] == [program.num_pages] * num_lanes
    assert llm.ledger.num_pages == num_lanes * program.num_pages
    assert llm.ledger.max_concurrency == num_lanes * program.num_pages / (128 // 8)
    names = ("data", "tensor", "expert")
    sizes = [getattr(llm.config, f"{name}_parallel_size") for name in names]
    assert llm.plan.mesh_sizes == dict(zip(names, sizes, strict=True))
    assert llm.plan.num_lanes == sizes[0] * sizes[2] == num_lanes
    is_exchanged = llm.config.deterministic or llm.config.layout == "expert_all_to_all"
    assert program.layout.name == ("expert_all_to_all" if is_exchanged else "expert_gather")


def test_requests_without_a_cached_prefix_go_to_the_lane_with_the_fewest(llm: LLM) -> None:
    llm.reset_prefix_cache()
    requests = [submit(llm, f"{number}+1=") for number in range(2 * len(schedulers(llm)))]
    assert [request.lane for request in requests] == [*range(len(schedulers(llm)))] * 2
    finish(llm)


def test_lanes_run_each_step_together(llm: LLM) -> None:
    """As many requests as all lanes have rows take as many steps as one of them."""
    steps = value(llm, "steps")
    num_lanes = len(llm.engine.replicas[0].schedulers)
    assert num_lanes == llm.config.expert_parallel_size
    requests = [submit(llm, f"count {number}:") for number in range(4 * len(schedulers(llm)))]
    finish(llm)
    assert all(len(tokens(request)) == 40 for request in requests)
    assert value(llm, "steps") - steps <= len(llm.engine.replicas) * (40 + 3)


def test_a_lane_without_work_changes_nothing(llm: LLM) -> None:
    """The first lane has no more work after two tokens, while the second one goes on."""
    alone = tokens(run_one(llm, "reverse garden:"))
    llm.reset_prefix_cache()
    first = submit(llm, "1+1=", GREEDY.clone(max_tokens=2))
    second = submit(llm, "reverse garden:")
    finish(llm)
    assert (first.lane, second.lane) == (0, 1)
    assert tokens(second) == alone


def run_one(llm: LLM, prompt: str) -> RequestState:
    request = submit(llm, prompt)
    finish(llm)
    return request


def test_aborts_on_one_lane_leave_the_others_alone(llm: LLM) -> None:
    prompts = [f"sort {number} 4 2:" for number in range(3 * len(schedulers(llm)))]
    alone = [tokens(run_one(llm, prompt)) for prompt in prompts]
    for num_steps in (0, 1, 2, 9):
        llm.reset_prefix_cache()
        requests = [submit(llm, prompt) for prompt in prompts]
        for _ in range(num_steps):
            llm.engine.step()
        for request in requests:
            if request.lane == 0:
                llm.engine.abort(request)
        assert not schedulers(llm)[0].num_unfinished and schedulers(llm)[1].num_unfinished == 3
        late = submit(llm, prompts[0])
        assert late.lane == 0
        finish(llm)
        for request, expected in zip([*requests, late], [*alone, alone[0]], strict=True):
            assert tokens(request) == (
                expected if request.lane or request is late else expected[: len(tokens(request))]
            )
    assert all(scheduler.allocator.usage == 0 for scheduler in schedulers(llm))


def test_requests_go_to_the_lane_that_has_their_prefix(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "sort 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15:"
    hits = [scheduler.pages.num_hit_tokens for scheduler in schedulers(llm)]

    def new_hits(lane: int) -> int:
        return schedulers(llm)[lane].pages.num_hit_tokens - hits[lane]

    busy = submit(llm, "5+6=", GREEDY.clone(max_tokens=2))
    first = submit(llm, prompt)
    finish(llm)
    assert (busy.lane, first.lane) == (0, 1) and new_hits(1) == 0
    again, more, other = submit(llm, prompt), submit(llm, prompt), submit(llm, prompt)
    finish(llm)
    assert (again.lane, more.lane, other.lane) == (1, 1, 0), "the lane that has the prompt, until it has two more"
    assert new_hits(1) > 2 * 16 and new_hits(0) < 8, "less than a page"
    assert tokens(first) == tokens(again) == tokens(more) == tokens(other)
    again, other = submit(llm, prompt), submit(llm, prompt)
    finish(llm)
    assert (again.lane, other.lane) == (0, 1)
    assert new_hits(0) > 16, "the first lane has the prompt now too"
    assert tokens(first) == tokens(again) == tokens(other)
    assert value(llm, "prefix_cache_hits") == sum(scheduler.pages.num_hit_tokens for scheduler in schedulers(llm))
    llm.reset_prefix_cache()
    hits = [scheduler.pages.num_hit_tokens for scheduler in schedulers(llm)]
    again, other = submit(llm, prompt), submit(llm, prompt)
    finish(llm)
    assert new_hits(0) == new_hits(1) == 0


def test_vectors_are_those_of_one_device(llm: LLM, whole: LLM) -> None:
    """Beside requests that generate, in chunks, on every lane."""
    prompts = ["reverse garden:", "count the trees of the long street:", "5+6=", "sort 3 2 1: " * 5]
    for number in range(3):
        submit(llm, f"{number}+{number}=")
    requests = [llm.engine.submit(parse_prompt(prompt, default=PoolingParams())) for prompt in prompts]
    finish(llm)
    assert len({request.lane for request in requests}) > 1
    vectors = [output.outputs.embedding for output in whole.embed(prompts, use_tqdm=False)]
    for request, vector in zip(requests, vectors, strict=True):
        assert request.embedding == pytest.approx(vector, rel=1e-4, abs=1e-5)


@pytest.fixture
def scarce(model: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines of few pages."""
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        made.append(LLM(str(model), **{**SETTINGS, "num_gpu_blocks_override": 16, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_a_lane_that_preempts_leaves_the_others_alone(scarce: Callable[..., LLM]) -> None:
    """Long requests on the first lane, which has too few pages for them, and short ones on the second."""
    llm = scarce(expert_parallel_size=2)
    prompts = [f"count tree {number}: " for number in range(8)]
    alone = [tokens(run_one(llm, prompt)) for prompt in prompts]
    llm.reset_prefix_cache()
    requests = [
        submit(llm, prompt, GREEDY.clone(max_tokens=40 if number % 2 == 0 else 5))
        for number, prompt in enumerate(prompts)
    ]
    assert [request.lane for request in requests] == [0, 1] * 4
    finish(llm)
    first, second = schedulers(llm)
    assert first.num_preemptions > 0 and second.num_preemptions == 0
    for request, expected in zip(requests, alone, strict=True):
        assert tokens(request) == expected[: len(tokens(request))]
        assert len(tokens(request)) == (5 if request.lane else 40)
    assert value(llm, "num_preemptions") == first.num_preemptions
    assert value(llm, "compiles_after_ready") == 0


@pytest.mark.slow
def test_a_runner_in_another_process_has_the_same_lanes(model: Path, expected: list[RequestOutput]) -> None:
    """Plans of all lanes go there, results of all come back."""
    config = EngineConfig(model=str(model), **SETTINGS, expert_parallel_size=2)
    runner = RemoteRunner(config)
    plan = plan_engine(config)
    engine = assemble_engine(config, plan, find_tokenizer(config, plan.directory), None, [runner])
    requests = [
        engine.submit(parse_prompt(prompt, SamplingParams(**params)))
        for prompt, params in REQUESTS
        if "n" not in params
    ]
    while engine.num_unfinished:
        engine.step()
    others = [output for output, (_, params) in zip(expected, REQUESTS, strict=True) if "n" not in params]
    assert [request.samples[0].output().token_ids for request in requests] == [
        one.outputs[0].token_ids for one in others
    ]
    assert {len(decode_plans(sent)) for sent in runner.plans} == {2}
    engine.close()
