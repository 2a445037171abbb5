"""The compiled step: its collectives, its memory, and the same tokens however it is laid out."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.batch import build
from jaxserve.device.buckets import Buckets
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.slots import Slots
from jaxserve.device.split_steps import trace_model, trace_sampler, trace_scorer
from jaxserve.device.stage import Stage
from jaxserve.device.state_updates import trace_set_up
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.step_state import StepState
from jaxserve.device.steps import trace_step
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.registry import build_model
from jaxserve.scheduling.plan import ON_DEVICE, PageGrant, Sampling, SlotSetup, StepPlan
from sharding.plan import (
    bytes_per_device,
    collectives,
    compiled_collectives,
    count_collectives,
    stated_collectives,
    stated_sampling,
)
from tests.plan_rows import Row, decode_rows, make_plan, rows_of
from tests.tiny_programs import (
    BACKEND,
    NUM_LAYERS,
    make_program,
    make_runner,
    random_params,
    sparse_config,
    tiny_config,
)

PAGE_SIZE, NUM_SLOTS, TABLE_PAGES = 8, 4, 4
BUCKETS = Buckets(decode_rows=(4,), mixed_tokens=(16,), max_num_seqs=4, table_pages=TABLE_PAGES)
DECODE, MIXED = BUCKETS.shapes()
SCORING = BUCKETS.scoring_shape
# Norms over all heads need the other devices' sums: one more all-reduce a layer.
WIDTH_NORM = {"qk_norm": "width", "norm_after": True}
both_ways = pytest.mark.parametrize("is_split", [False, True], ids=["one program", "split"])
copies_nothing = pytest.mark.skipif("interpret" in (BACKEND or ""), reason="interpreted kernels copy what they change")


def text_of(compiled: jax.stages.Compiled) -> str:
    """The optimized program."""
    text = compiled.as_text()
    assert text is not None
    return text


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program takes on a device while it runs."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def trace(program: ShardedModel, shape: BatchShape, is_split: bool, variant: str = "any") -> jax.stages.Traced:
    """A step as accelerators run it, or the part of one with the model as CPUs do."""
    return trace_model(program, shape, MIXED.num_tokens) if is_split else trace_step(program, shape, variant)


@functools.cache
def compiled_decode(
    tensor: int, is_olmo: bool, is_split: bool
) -> tuple[dict[str, int], jax.stages.Compiled, ShardedModel]:
    """Collectives of the jaxpr, and the compiled decode step, with pools much larger than anything else."""
    program = make_program(tiny_config(**WIDTH_NORM if is_olmo else {}), tensor=tensor, num_pages=2000)
    traced = trace(program, DECODE, is_split)
    return count_collectives(traced), traced.lower().compile(), program


@both_ways
@pytest.mark.parametrize("is_olmo", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_decode_step_communicates_what_its_layout_states(tensor: int, is_olmo: bool, is_split: bool) -> None:
    counted, compiled, program = compiled_decode(tensor, is_olmo, is_split)
    stated = stated_collectives(program.layout, NUM_LAYERS)
    assert stated == {"all-reduce": 2 * NUM_LAYERS + 1, "all-gather": 1}
    assert counted == {**stated, "all-reduce": stated["all-reduce"] + is_olmo * NUM_LAYERS}
    assert compiled_collectives(text_of(compiled)) == counted, "XLA added or lost collectives"


@both_ways
def test_one_device_communicates_nothing(is_split: bool) -> None:
    counted, compiled, _ = compiled_decode(1, False, is_split)
    assert counted == {}
    assert compiled_collectives(text_of(compiled)) == {}


@pytest.mark.parametrize("layout", ["tensor_parallel", "split_logits"])
@pytest.mark.parametrize("variant", ["greedy", "sampled", "full"])
def test_sampling_communicates_what_its_layout_states(variant: str, layout: str) -> None:
    """Nothing, if every device has all logits."""
    program = make_program(tiny_config(vocab_size=1100), tensor=2, layout=layout)
    counted = collections.Counter(count_collectives(trace_step(program, DECODE, variant)))
    counted.subtract(stated_sampling(program.layout, variant))
    layers = stated_collectives(program.layout, NUM_LAYERS)
    assert counted == collections.Counter(layers)
    assert layers == {"all-reduce": 2 * NUM_LAYERS + 1} | ({"all-gather": 1} if layout == "tensor_parallel" else {})


def test_prompts_are_scored_without_gathering_logits() -> None:
    program = make_program(tiny_config(), tensor=2, layout="split_logits", max_logprobs=3)
    traced = trace_scorer(program, 32)
    assert count_collectives(traced) == {"all-reduce": 2, "all-gather": 3}
    assert max(each.num_bytes for each in collectives(traced.jaxpr.jaxpr)) == 2 * (2 * 3) * 4 * 32
    assert count_collectives(trace_set_up(program)) == {}


@pytest.mark.parametrize("layout", ["expert_all_reduce", "expert_all_to_all", "expert_gather"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_steps_with_experts_communicate_what_their_layout_states(layout: str, tensor: int) -> None:
    """Whole or split; with row tiles, devices with rows of their own agree on the number of tiles."""
    tiled = 8 if layout == "expert_gather" else None
    for row_tile in {None, tiled}:
        program = make_program(sparse_config(), tensor=tensor, expert=2, layout=layout, row_tile=row_tile)
        stated = stated_collectives(program.layout, NUM_LAYERS, 1)
        if row_tile is not None:
            stated["all-reduce"] = stated.get("all-reduce", 0) + 1
        shape = dataclasses.replace(MIXED, num_rows=8)
        assert count_collectives(trace_model(program, shape, 32)) == stated
        assert count_collectives(trace_step(program, shape, "any")) == stated
        gathers = {"all-gather": 1} if tensor > 1 else {}
        assert count_collectives(trace_scorer(program, 32)) == gathers
        assert count_collectives(trace_sampler(program, shape.sampler)) == {}
        assert count_collectives(trace_set_up(program)) == {}


def test_prompt_logprobs_gather_only_where_asked() -> None:
    """The program that scores prompts has one gather more, in a loop that runs as often as logprobs are wanted."""
    program = make_program(tiny_config(), tensor=2)
    for shape, gathers in ((MIXED, 1), (SCORING, 2)):
        counted = count_collectives(trace_step(program, shape, "any"))
        assert counted == {"all-reduce": 2 * NUM_LAYERS + 1, "all-gather": gathers}
    assert count_collectives(trace_model(program, MIXED, 32)) == {"all-reduce": 2 * NUM_LAYERS + 1, "all-gather": 1}
    assert count_collectives(trace_scorer(program, 32)) == {"all-gather": 1}


@copies_nothing
@both_ways
@pytest.mark.parametrize(("tensor", "is_olmo"), [(1, False), (2, False), (4, True)])
def test_the_state_is_updated_in_place(tensor: int, is_olmo: bool, is_split: bool) -> None:
    """All of it is donated, and no copy of a pool, of a share of it, or of a weight is made on the way."""
    _, compiled, program = compiled_decode(tensor, is_olmo, is_split)
    state = jax.tree.leaves(program.abstract_state())
    sizes = [bytes_per_device(leaf.shape, leaf.dtype.itemsize, leaf.sharding) for leaf in state]
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes >= sum(sizes)
    pools = jax.tree.leaves(program.abstract_state().pools)
    pool = min(bytes_per_device(leaf.shape, leaf.dtype.itemsize, leaf.sharding) for leaf in pools)
    assert temporary_bytes(compiled) < pool // 4


@copies_nothing
@pytest.mark.parametrize(("variant", "is_split"), [("any", False), ("full", False), ("any", True)])
def test_slot_tables_are_updated_in_place(variant: str, is_split: bool) -> None:
    """With more slots than rows: a step takes no copy of what it keeps of all slots, nor of the rows it reads."""
    program = make_program(tiny_config(), num_slots=1000)
    compiled = trace(program, DECODE, is_split, variant).lower().compile()
    state = program.abstract_state()
    sizes = [math.prod(leaf.shape) * 4 for leaf in (*state.tables, state.sums)]
    assert sum(sizes) + 2 * 4000 == program.slot_state_bytes
    assert temporary_bytes(compiled) < min(sizes) // 4


@copies_nothing
@both_ways
def test_sums_of_hidden_states_are_updated_in_place(is_split: bool) -> None:
    program = make_program(tiny_config(), num_slots=10_000)
    temporary = temporary_bytes(trace(program, MIXED, is_split).lower().compile())
    assert temporary < math.prod(program.abstract_state().sums.shape)


@both_ways
def test_no_copy_of_the_weights_is_made(is_split: bool) -> None:
    """Stored in the type they are multiplied in, weights are read in place."""
    config = tiny_config(hidden_size=256, ffn_size=1024, vocab_size=2048)
    for weights in ("float32", "bfloat16"):
        program = make_program(config, policy=DtypePolicy(weights=weights))
        compiled = trace(program, DECODE, is_split, "greedy").lower().compile()
        params = program.abstract_model.params.values()
        largest = max(math.prod(param.shape) * param.dtype.itemsize for param in params)
        assert temporary_bytes(compiled) < largest // 2, weights


def addresses(state: StepState) -> list[int]:
    """Of every shard of every pool."""
    return [
        shard.data.unsafe_buffer_pointer() for pool in jax.tree.leaves(state.pools) for shard in pool.addressable_shards
    ]


@copies_nothing
@pytest.mark.parametrize("tensor", [1, 2])
def test_pools_keep_their_addresses(tensor: int) -> None:
    _, compiled, program = compiled_decode(tensor, False, False)
    params, state = random_params(program), program.empty_state()
    plan = make_plan(0, [SlotSetup(0, Sampling(), 9)], [PageGrant(0, 0, [3])], decode_rows([0], [0], [5]))
    slots = Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, program.num_pages, program.config.vocab_size)
    slots.apply(plan)
    mask = np.full(program.mask_shape(DECODE.num_rows), -1, np.int32)
    before = addresses(state)
    output = None
    for _ in range(3):
        old = state
        state, output = compiled(params, state, build(slots, plan, DECODE, 0), mask)
        assert addresses(state) == before
        assert all(array.is_deleted() for array in jax.tree.leaves(old))
        assert not any(array.is_deleted() for array in params)
    assert output is not None and int(state.latest.token_ids[0]) == int(output.tokens[0])
    assert int(state.latest.positions[0]) == 1
    keys = np.asarray(state.pools[0][0])
    for pages in keys.reshape(-1, program.pool_pages, keys[0].size):
        written = np.flatnonzero(np.abs(pages).sum(1)).tolist()
        assert set(written) | {program.num_pages + 1} == {3, program.num_pages + 1}, "padding has a page of its own"


pytestmark = pytest.mark.usefixtures("switchable_family")
PROMPTS = {0: [3, 50, 7, 21, 0, 9, 9, 30, 2, 17, 44], 1: [52, 9], 2: [1, 2, 3, 4, 5, 6, 7, 8, 11]}
SAMPLINGS = {
    0: Sampling(num_logprobs=3),
    1: Sampling(OptionValues(temperature=1.0, top_k=20), seed=3),
    2: Sampling(OptionValues(temperature=0.8, top_p=0.9, min_p=0.01), seed=2**31 + 5),
}
NUM_DECODE = 8


def pages_of(slot: int) -> list[int]:
    """Pages out of order, none shared."""
    return [slot + 15 - 4 * i for i in range(TABLE_PAGES)]


def prefill_plans() -> list[StepPlan]:
    """Three requests; the first in chunks, the second joins its second chunk, the third decodes of both in between."""
    setups = [SlotSetup(slot, SAMPLINGS[slot], len(prompt) + NUM_DECODE) for slot, prompt in PROMPTS.items()]
    grants = [PageGrant(slot, 0, pages_of(slot)) for slot in PROMPTS]
    first, second = PROMPTS[0], PROMPTS[2]
    return [
        make_plan(0, setups, grants, [Row(0, 0, first[:6], 0, first[1:7])]),
        make_plan(
            1,
            [],
            [],
            [Row(0, 6, first[6:], 1, [*first[7:], -1]), Row(1, 0, PROMPTS[1], 1)],
        ),
        make_plan(2, [], [], [*decode_rows([1, 0], [2, 11]), Row(2, 0, second, 1)]),
    ]


def run_requests(
    config: ModelConfig, tensor: int, layout: str, in_flight: int, platform: str = "cpu"
) -> tuple[dict[int, list[int]], list[StepResult]]:
    """Tokens of each request, and results of all steps.

    Fewer than ``in_flight`` steps run unread; at 1 the host names and places each token, else the device does.
    """
    program = make_program(config, tensor=tensor, layout=layout, num_pages=20)
    stage = Stage(program, BUCKETS, platform)
    stage.compile()
    runner = make_runner(stage)
    tokens: dict[int, list[int]] = {slot: [] for slot in PROMPTS}
    results, pending = [], []

    def read() -> None:
        plan = pending.pop(0)
        (result,) = runner.collect()
        results.append(result)
        for row, new in zip(rows_of(plan), result.tokens, strict=True):
            assert len(new) == row.num_samples
            tokens[row.slot] += new

    def launch(plan: StepPlan) -> None:
        runner.launch([plan])
        pending.append(plan)
        while len(pending) >= in_flight:
            read()

    for plan in prefill_plans():
        launch(plan)
    lengths = {slot: len(prompt) + (1 if slot < 2 else 0) for slot, prompt in PROMPTS.items()}
    for i in range(NUM_DECODE):
        slots = [[2, 0, 1], [1, 2], [0, 1, 2]][i % 3]
        if in_flight == 1:
            rows = decode_rows(slots, [lengths[slot] for slot in slots], [tokens[slot][-1] for slot in slots])
        else:
            rows = decode_rows(slots, [ON_DEVICE] * len(slots))
        launch(make_plan(3 + i, [], [], rows))
        for slot in slots:
            lengths[slot] += 1
    while pending:
        read()
    runner.close()
    return tokens, results


@functools.cache
def on_one_device() -> tuple[dict[int, list[int]], list[StepResult]]:
    return run_requests(tiny_config(), 1, "tensor_parallel", 1)


def test_greedy_tokens_are_those_of_the_model_on_its_own() -> None:
    """Pages, chunks and batches against one dense forward of prompt and answer together."""
    tokens, results = on_one_device()
    program = make_program(tiny_config())
    model = build_model(tiny_config())
    load(model, program)
    text = PROMPTS[0] + tokens[0]
    logits = np.asarray(model(np.array([text], np.int32))[0], np.float64)
    start = len(PROMPTS[0]) - 1
    assert logits[start:-1].argmax(1).tolist() == tokens[0]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chunks = [(results[0].prompt_logprobs, 6), (results[1].prompt_logprobs, 4)]
    found = np.concatenate([np.asarray(chunk.chosen)[:count] for chunk, count in chunks if chunk is not None])
    expected = logprobs[np.arange(10), PROMPTS[0][1:]]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    sampled = results[2].logprobs
    assert sampled is not None and results[2].prompt_logprobs is None
    assert sampled.top_ids[1, 0] == tokens[0][1], "row 1 of that step is slot 0"
    np.testing.assert_allclose(sampled.chosen[1], logprobs[len(PROMPTS[0])].max(), atol=1e-5)


def load(model: CausalLM, program: ShardedModel) -> None:
    """The program's random parameters, into a module of the notebook's kind."""
    for name, array in zip(program.abstract_model.params, random_params(program), strict=True):
        target: Any = model
        for part in name.split("."):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        target[...] = array


def test_launching_ahead_changes_nothing() -> None:
    """The device finds the latest token of each slot itself."""
    assert run_requests(tiny_config(), 1, "tensor_parallel", 2)[0] == on_one_device()[0]


@pytest.mark.parametrize(("layout", "tensor"), [("tensor_parallel", 2), ("tensor_parallel", 4), ("replicated", 2)])
def test_tokens_do_not_depend_on_the_layout(layout: str, tensor: int) -> None:
    """Two key/value heads: with 4 devices each is on two of them."""
    tokens, results = run_requests(tiny_config(), tensor, layout, 2)
    expected, expected_results = on_one_device()
    assert tokens == expected
    for found, one in zip(results, expected_results, strict=True):
        for array, other in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(one[1:]), strict=True):
            if array.dtype == np.float32:
                np.testing.assert_allclose(array, other, atol=1e-4)


@pytest.mark.parametrize(("layout", "tensor"), [("tensor_parallel", 1), ("tensor_parallel", 2), ("split_logits", 2)])
def test_one_program_a_step_gives_what_several_do(layout: str, tensor: int) -> None:
    """Steps as accelerators run them, prompt logprobs included."""
    tokens, results = run_requests(tiny_config(), tensor, layout, 2, "gpu")
    expected, expected_results = on_one_device()
    assert tokens == expected
    for found, one in zip(results, expected_results, strict=True):
        assert (found.logprobs is None, found.prompt_logprobs is None) == (
            one.logprobs is None,
            one.prompt_logprobs is None,
        )
        for array, other in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(one[1:]), strict=True):
            if array.dtype == np.float32:
                np.testing.assert_allclose(array, other, atol=1e-4)


def run_lanes(delays: list[int], platform: str, logits: str = "gathered", **layout: Any) -> list[list[StepResult]]:
    """Results of each lane, which runs the plans of all requests that many steps after the first launch."""
    program = make_program(sparse_config(), num_pages=20, **layout)
    program = dataclasses.replace(program, layout=dataclasses.replace(program.layout, logits=logits))
    stage = Stage(program, BUCKETS, platform)
    stage.compile()
    runner = make_runner(stage)
    slots = [[2, 0, 1], [1, 2], [0, 1, 2]]
    plans = prefill_plans()
    plans += [make_plan(3 + i, [], [], decode_rows(slots[i % 3], [ON_DEVICE] * len(slots[i % 3]))) for i in range(6)]
    nothing = make_plan(-1, [], [], [])
    results: list[list[StepResult]] = [[] for _ in delays]
    for step in range(len(plans) + max(delays)):
        taken = [plans[step - delay] if 0 <= step - delay < len(plans) else nothing for delay in delays]
        runner.launch(taken)
        for lane, (plan, result) in enumerate(zip(taken, runner.collect(), strict=True)):
            results[lane] += [] if plan is nothing else [result]
            assert plan is not nothing or result.tokens == []
    runner.close()
    return results


@pytest.mark.parametrize(
    ("tensor", "logits"), [(1, "gathered"), pytest.param(2, "gathered", marks=pytest.mark.slow), (2, "split")]
)
def test_lanes_of_one_program_do_not_see_each_other(tensor: int, logits: str) -> None:
    """Steps as accelerators run them: one lane prefills while another decodes or has nothing to do."""
    (expected,) = run_lanes([0], "cpu")
    for results in run_lanes([0, 2], "gpu", logits, tensor=tensor, expert=2, layout="expert_gather"):
        for found, one in zip(results, expected, strict=True):
            assert found.tokens == one.tokens
            assert one.prompt_logprobs is None or found.prompt_logprobs is not None
            for array, other in zip(one.logprobs or (), found.logprobs or (), strict=False):
                if array.dtype == np.float32:
                    np.testing.assert_allclose(array[: len(one.tokens)], other[: len(one.tokens)], atol=1e-4)


def test_width_norms_do_not_depend_on_the_layout() -> None:
    config = tiny_config(**WIDTH_NORM)
    assert run_requests(config, 4, "tensor_parallel", 1)[0] == run_requests(config, 1, "tensor_parallel", 1)[0]
