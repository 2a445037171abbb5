"""Pipeline stages: the answers of one device, whatever the stages, and every stage busy when there is enough work."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, PoolingParams, RequestOutput, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import EnginePlan, load_params, plan_engine
from jaxserve.device.handed_over import abstract_input
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_hidden, trace_step
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.models.stage_balance import LayerCost, allowed_cuts, balanced_stages, check_cuts
from jaxserve.models.stages import StageLayers, stages_of
from sharding.plan import count_collectives
from tests.jaxserve.test_lanes import CONFIG as SPARSE
from tests.jaxserve.test_request_mix import REQUESTS, SETTINGS, answers_alone, outcome, scores
from tests.random_checkpoint import write_checkpoint, write_checkpoint_with_tokenizer
from tests.runners import weights_of
from tests.tiny_programs import make_program, random_params, tiny_config

TILES = {"kernels": "xla", "deterministic": True}
MESHES: dict[str, dict[str, Any]] = {
    "two": {"pipeline_parallel_size": 2},
    "two with tensor": {"mesh": "stage=2,tensor=2"},
    "three": {"stage_layers": [1, 2, 1]},
    "four, one step after the other": {"pipeline_parallel_size": 4, "async_scheduling": False},
    "two, deterministic tiles": {"pipeline_parallel_size": 2, **TILES},
}
COUNTED: dict[str, Any] = {"dtype": "float32", "expert_load_metrics": 1, "enable_prefix_caching": False}
FAST = ("two", "two with tensor", "three")


def value(llm: LLM, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"jaxserve:{name}")


@pytest.fixture(scope="module")
def expected() -> Iterator[list[RequestOutput]]:
    """Each request alone, on one device."""
    with LLM("demo", **SETTINGS) as llm:
        yield answers_alone(llm)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MESHES]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine with stages; after the tests nothing has compiled, and no page is in use."""
    with LLM("demo", **SETTINGS, **MESHES[request.param]) as made:
        yield made
        assert value(made, "compiles_after_ready") == 0
        assert value(made, "kv_cache_usage_perc") == 0


def kernels_of(llm: LLM) -> dict[str, Any]:
    """The settings of kernels, whose rounding and KV pages differ."""
    return TILES if llm.config.deterministic else {}


@pytest.fixture(scope="module")
def alone(llm: LLM, expected: list[RequestOutput]) -> list[RequestOutput]:
    """Each request alone, on one device with the kernels of the stages."""
    if not kernels_of(llm):
        return expected
    with LLM("demo", **SETTINGS, **kernels_of(llm)) as one:
        return answers_alone(one)


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_of_every_kind_are_as_on_one_device(seed: int, llm: LLM, alone: list[RequestOutput]) -> None:
    """Sampled, penalized, constrained, with logprobs of samples and prompts, in random order; some hit cached pages."""
    order = random.Random(seed).sample(range(len(REQUESTS)), len(REQUESTS))
    pairs = [(REQUESTS[index][0], SamplingParams(**REQUESTS[index][1])) for index in order]
    found = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    tolerance = 2e-3 if llm.plan.models[0].policy.weights == "float32" else 3e-2
    for index, output in zip(order, found, strict=True):
        assert outcome(output) == outcome(alone[index]), REQUESTS[index]
        assert scores(output) == pytest.approx(scores(alone[index]), abs=tolerance)


def test_requests_that_are_preempted_are_as_on_one_device(expected: list[RequestOutput]) -> None:
    params = [SamplingParams(**params) for _, params in REQUESTS]
    with LLM("demo", **SETTINGS, pipeline_parallel_size=2, num_gpu_blocks_override=16) as llm:
        found = llm.generate([prompt for prompt, _ in REQUESTS], params, use_tqdm=False)
        assert value(llm, "num_preemptions") > 0
        assert value(llm, "kv_cache_usage_perc") == 0
    assert [outcome(output) for output in found] == [outcome(output) for output in expected]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_one_device(pooling: Any, llm: LLM) -> None:
    """Of prompts longer than a step has tokens, so that the last stage adds up the sums of several steps."""
    prompts = ["12+30=" * count for count in (1, 4, 17)]
    params = PoolingParams(pooling=pooling)
    found = llm.embed(prompts, pooling_params=params, use_tqdm=False)
    with LLM("demo", **SETTINGS, **kernels_of(llm)) as one:
        expected = one.embed(prompts, pooling_params=params, use_tqdm=False)
    tolerance = 1e-5 if llm.plan.models[0].policy.weights == "float32" else 3e-2
    for output, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, other.outputs.embedding, atol=tolerance)


def test_one_request_alone_is_as_on_one_device(llm: LLM, alone: list[RequestOutput]) -> None:
    """Fewer requests than stages: nothing waits for another request."""
    for index in (0, 3, 9):
        (found,) = llm.generate(REQUESTS[index][0], SamplingParams(**REQUESTS[index][1]), use_tqdm=False)
        assert outcome(found) == outcome(alone[index])


def test_every_stage_has_work(llm: LLM) -> None:
    """With several requests for each stage, arriving while others run, at most 5 % of the stage-ticks are idle."""
    ticks, idle = value(llm, "stage_ticks"), value(llm, "idle_stage_ticks")
    params = [SamplingParams(temperature=0.0, max_tokens=20 + index % 13, ignore_eos=True) for index in range(64)]
    llm.generate([f"{index}+{3 * index}=" for index in range(64)], params, use_tqdm=False)
    ticks, idle = value(llm, "stage_ticks") - ticks, value(llm, "idle_stage_ticks") - idle
    assert ticks > 64 * 20 * llm.plan.num_stages / 8
    assert idle <= 0.05 * ticks


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "stage=2,expert=2"},
        pytest.param({"mesh": "stage=2,expert=2,tensor=2", "deterministic": True}, marks=pytest.mark.slow),
        pytest.param({"mesh": "data=2,stage=2,expert=2"}, marks=pytest.mark.slow),
        pytest.param({"mesh": "stage=2,tensor=2", "enable_expert_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_in_stages(settings: dict[str, Any], tmp_path: Path) -> None:
    """Tokens, and the tokens of each expert of each layer, whichever stage has it."""
    write_checkpoint_with_tokenizer(tmp_path, SPARSE | {"num_hidden_layers": 3}, seed=1)
    prompts = [{"prompt_token_ids": [*range(3, 8 + index)]} for index in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found, loads = [], []
    for mesh in ({}, settings):
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "compilation_cache_dir": ""}
        with LLM(str(tmp_path), **COUNTED, **sizes, **mesh) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            loads.append(llm.expert_load())
            assert value(llm, "compiles_after_ready") == 0
    assert found[0] == found[1]
    np.testing.assert_array_equal(loads[0], loads[1])


def test_weights_have_the_names_of_the_whole_model(llm: LLM) -> None:
    """In every stage that holds them."""
    with LLM("demo", **SETTINGS, **kernels_of(llm)) as one:
        whole = weights_of(one.engine.replicas[0].runner)
    runner = llm.engine.replicas[0].runner
    held = weights_of(runner)
    assert held.keys() == whole.keys()
    if llm.plan.models[0].mesh.size > 1:
        return  # in another order of rows
    for name, array in held.items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)


# ---------------------------------------------------------------- plans


def plan(**settings: Any) -> EnginePlan:
    return plan_engine(EngineConfig(model="demo", max_num_seqs=4, block_size=8, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline_parallel_size": 5},
            "pipeline_parallel_size=5 exceeds the 4 layers of LlamaForCausalLM; use 1 to 4",
        ),
        ({"stage_layers": [1, 2]}, r"stage_layers: 1 \+ 2 = 3 layers, but LlamaForCausalLM has 4"),
        (
            {"stage_layers": [1, 3], "pipeline_parallel_size": 3},
            "stage_layers has 2 numbers, but pipeline_parallel_size=3; use one of them",
        ),
        ({"mesh": "stage=3,data=3"}, "the mesh needs 9 devices, but JAX has 8"),
    ],
)
def test_stages_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**settings)


def test_the_layers_of_each_stage_are_as_told() -> None:
    made = plan(stage_layers=[1, 3], data_parallel_size=2)
    assert [program.stage for program in made.models] == [StageLayers(0, 1, 4), StageLayers(1, 4, 4)] * 2
    assert made.mesh_sizes == {"data": 2, "stage": 2, "tensor": 1}
    assert len({device for program in made.models for device in program.mesh.devices.flat}) == made.num_devices == 4
    assert plan(stage_layers=[4]).models[0].stage is None


def test_one_stage_may_be_named() -> None:
    assert plan(mesh="stage=1,tensor=2").mesh_sizes == {"data": 1, "tensor": 2}


@pytest.mark.parametrize("settings", [{"pipeline_parallel_size": 2}, {"mesh": "stage=3,tensor=2"}], ids=str)
def test_every_device_holds_what_is_planned_for_it(settings: dict[str, Any]) -> None:
    """Weights, pages and, in the last stage, the state of slots; all stages have equally many pages."""
    made = plan(**settings, dtype="float32", num_gpu_blocks_override=80)
    for program in made.models:
        state = program.empty_state() if program.is_last else program.empty_state().pools
        held = dict.fromkeys(program.mesh.devices.flat, 0)
        for array in jax.tree.leaves((load_params(made, program), state)):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        slots = program.slot_state_bytes if program.is_last else 0
        for size in held.values():
            assert size == pytest.approx(program.weight_bytes + program.pool_bytes + slots, rel=0.02)
        assert program.num_pages == 80
    page = max(program.pool_bytes for program in made.models) // made.models[0].pool_pages
    assert made.needs.page == pytest.approx(page, abs=0) or made.needs.weights == max(
        program.weight_bytes for program in made.models
    )


def test_stages_communicate_as_whole_models_do() -> None:
    """A stage that is not the last has two all-reduces per layer, and the first one more for the embedding."""
    made = plan(mesh="stage=2,tensor=2", stage_layers=[3, 1])
    shape = made.buckets.shapes()[0]
    assert count_collectives(trace_hidden(made.models[0], shape)) == {"all-reduce": 2 * 3 + 1}


@pytest.mark.parametrize("layout", ["tensor_parallel", "sequence_parallel", "split_logits", "context_parallel"])
def test_stages_lower_for_gpus(layout: str) -> None:
    """A stage that hands over, and the last one with everything in one program."""
    shape = BatchShape(num_tokens=16, num_rows=4, table_pages=4, decode_only=False)
    first, last = (
        make_program(tiny_config(), tensor=2, layout=layout, stage=StageLayers(n, n + 1, 2)) for n in range(2)
    )
    for traced in (trace_hidden(first, shape), trace_step(last, shape, "any")):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.all_reduce" in text or "stablehlo.reduce_scatter" in text


@pytest.mark.parametrize("layout", ["tensor_parallel", "sequence_parallel"])
def test_what_a_draft_head_reads_goes_from_stage_to_stage(layout: str) -> None:
    """The inputs of layers, whole; the last stage is given those of all earlier ones, and keeps the embedding."""
    config = tiny_config(num_layers=4, rope_layers=(True,) * 4, sliding_windows=(None,) * 4)
    stages = [
        make_program(config, tensor=2, layout=layout, stage=stage, aux_layers=(1, 2)) for stage in stages_of([1] * 4)
    ]
    shape = BatchShape(num_tokens=16, num_rows=4, table_pages=4, decode_only=False)
    buffer, given, hidden = np.arange(shape.buffer_size, dtype=np.int32) % 7, [], []
    for model in stages[:-1]:
        state = model.empty_state()
        step = trace_hidden(model, shape).lower().compile()
        _, output = step(random_params(model), state.pools, state.latest, buffer, *given)
        given = [each for each in (output.hidden, output.aux) if each is not None]
        hidden.append(np.asarray(output.hidden))
    assert [each.shape for each in given] == [each.shape for each in abstract_input(stages[-1], 16)]
    np.testing.assert_array_equal(given[1], np.concatenate(hidden[:2], 1))
    assert [any(path.startswith("embed.") for path in model.abstract_model.params) for model in stages] == [
        *(True, False, False, True)
    ]


def test_a_window_has_the_same_tables_in_every_stage(tmp_path: Path) -> None:
    """A stage whose layers have no window leaves the tables of the window unused."""
    windows = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 16, "num_hidden_layers": 5}
    write_checkpoint(tmp_path, SPARSE | windows, seed=0)
    made = plan_engine(EngineConfig(model=str(tmp_path), block_size=8, stage_layers=[1, 1, 3], max_num_seqs=4))
    layouts = [program.kv_layout for program in made.models]
    assert len({layout.windows for layout in layouts}) == 1 and len(layouts[0].windows) > 1
    for layout, program in zip(layouts, made.models, strict=True):
        assert program.stage is not None and len(layout.layer_indices) == len(program.stage.layers)
    assert [len(layout.pools) for layout in layouts[:2]] == [1, 1]


# ---------------------------------------------------------------- balance


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_division_has_a_smaller_largest_stage(num_stages: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    layers = [LayerCost(*generator.integers(1, 20, 2).tolist()) for _ in range(7)]
    embedding, head = LayerCost(30, 0), LayerCost(30, 25)
    whole = [LayerCost(0, 0)] * 7
    whole[0], whole[-1] = embedding, head
    costs = np.array(layers) + np.array(whole)

    def largest(counts: tuple[int, ...]) -> float:
        parts = [costs[stage.first : stage.stop].sum(0) / costs.sum(0) for stage in stages_of(counts)]
        return float(np.max(parts))

    divisions = [counts for counts in itertools.product(range(1, 8), repeat=num_stages) if sum(counts) == 7]
    found = balanced_stages(layers, num_stages, embedding, head)
    assert found[-1].stop == 7 and len(found) == num_stages
    assert largest(tuple(len(stage.layers) for stage in found)) == pytest.approx(min(map(largest, divisions)))


def test_equal_layers_without_a_head_are_divided_evenly() -> None:
    nothing = LayerCost(0, 0)
    found = balanced_stages([LayerCost(1, 1)] * 8, 3, nothing, nothing)
    assert [len(stage.layers) for stage in found] == [3, 3, 2]
    assert [stage.is_first for stage in found] == [True, False, False]
    assert [stage.is_last for stage in found] == [False, False, True]


def test_a_stage_does_not_separate_a_layer_from_the_one_whose_pages_it_reads() -> None:
    own = KVSpec(4, 2, 8, "float32", None)
    specs = [own] * 4 + [own._replace(reads=2), own._replace(reads=3)]
    assert allowed_cuts(specs) == [1, 2]
    nothing = LayerCost(0, 0)
    found = balanced_stages([LayerCost(1, 1)] * 6, 2, nothing, nothing, allowed_cuts(specs))
    assert [len(stage.layers) for stage in found] == [2, 4]
    with pytest.raises(ConfigError, match="begin only with layer 1, 2; use at most 3 stages"):
        balanced_stages([LayerCost(1, 1)] * 6, 4, nothing, nothing, allowed_cuts(specs))
    with pytest.raises(ConfigError, match="may not begin with layer 3: .* it may begin with: 1, 2"):
        check_cuts(stages_of([3, 3]), specs)


def test_a_real_model_is_divided(shared_data: Path) -> None:
    """The head of a large vocabulary weighs as much as several layers."""
    directory = str(shared_data / "configs" / "llama-3.2-3b-one-tensor-per-shard")
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "max_num_seqs": 1, "max_model_len": 128}
    made = plan_engine(EngineConfig(model=directory, dtype="bfloat16", **settings))
    first, second = (program.stage for program in made.models)
    assert first is not None and second is not None
    assert len(first.layers) > len(second.layers)
    with pytest.raises(ConfigError, match="exceeds the 28 layers"):
        plan_engine(EngineConfig(model=directory, pipeline_parallel_size=29))
