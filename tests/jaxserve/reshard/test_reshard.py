"""A running engine moves to other meshes and layouts: requests and streams continue; no bit, page or count is lost."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, ConfigError, EngineDeadError, PoolingParams, RequestOutput, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import MemoryPlanError
from jaxserve.api.request import parse_prompt
from jaxserve.device.build import EnginePlan, load_params, plan_engine
from jaxserve.device.packing import Packing
from jaxserve.device.runner_interface import Runner
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.engine import resharding
from jaxserve.engine.request_state import RequestState
from jaxserve.reshard import cached_contents, device_move, move_memory
from jaxserve.reshard.page_transfer import PageReader, PageWrite, PageWriter, can_share_pages, page_bytes
from jaxserve.reshard.resident_weights import check_same_parameters, move_weights
from sharding import LayoutError, MeshError
from tests.jaxserve.test_draft_requests import SETTINGS as DRAFT_SETTINGS
from tests.jaxserve.test_draft_requests import Run
from tests.jaxserve.test_kv_window import MIXED
from tests.jaxserve.test_lanes import CONFIG as SPARSE
from tests.jaxserve.test_lanes import GREEDY, SETTINGS, finish, schedulers, submit, tokens, value
from tests.jaxserve.test_request_mix import REQUESTS, outcome
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint, write_checkpoint_with_tokenizer
from tests.runners import set_weights, weights_of

LITTLE: dict[str, Any] = {**SETTINGS, "compile_sizes": {"decode": [4], "mixed": [48]}}
LONG = GREEDY.clone(max_tokens=60)
LISTED = "sort 1 2 3 4 5 6 7 8 9 10 11 12:"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with experts in every layer, and the demo's tokenizer."""
    directory = tmp_path_factory.mktemp("sparse")
    write_checkpoint_with_tokenizer(directory, SPARSE, seed=1)
    return directory


@pytest.fixture(scope="module")
def still(sparse: Path) -> Iterator[LLM]:
    """An engine that stays where it is."""
    with LLM(str(sparse), **LITTLE) as llm:
        yield llm


def check_pages(llm: LLM) -> None:
    """Every page of every lane is free or held, as it must be with no request left."""
    for scheduler in schedulers(llm):
        assert scheduler.allocator.num_free == scheduler.allocator.num_pages
    assert value(llm, "kv_cache_usage_perc") == 0
    assert value(llm, "compiles_after_ready") == 0


Change = tuple[str, str | None]
CHANGES: list[Change] = [
    ("tensor=2", None),
    ("data=2,stage=2", None),
    ("expert=2", None),
    ("tensor=2", "replicated_attention"),
    ("tensor=2", "split_logits"),
    ("stage=2,tensor=2", "sequence_parallel"),
    ("tensor=2", "context_parallel"),
    ("tensor=1", "tensor_parallel"),
]


@pytest.mark.parametrize(
    "changes", [CHANGES[1:3], pytest.param(CHANGES, marks=pytest.mark.slow)], ids=["two changes", "all changes"]
)
def test_requests_of_every_kind_continue(changes: list[Change], sparse: Path, still: LLM) -> None:
    """With more requests than slots, a stream, embeddings, and too few pages, so that some are preempted."""
    pairs = [(prompt, SamplingParams(**params)) for prompt, params in REQUESTS]
    expected = [still.generate(prompt, params, use_tqdm=False)[0] for prompt, params in pairs]
    longest = GREEDY.clone(max_tokens=90)
    long = still.generate(LISTED, longest, use_tqdm=False)[0].outputs[0].token_ids
    vector = still.embed("reverse garden: " * 5, use_tqdm=False)[0].outputs.embedding
    with LLM(str(sparse), **LITTLE, num_gpu_blocks_override=16) as llm:
        crowd = [submit(llm, LISTED, LONG) for _ in range(4)]
        requests = [llm.engine.submit(parse_prompt(prompt, params)) for prompt, params in pairs]
        stream = llm.stream(LISTED, longest)
        seen, embedded = [next(stream)], list[RequestState]()
        for mesh, layout in changes:
            embedded.append(llm.engine.submit(parse_prompt("reverse garden: " * 5, default=PoolingParams())))
            seen += [next(stream) for _ in range(6)]
            report = llm.reshard(mesh, layout)
            assert report.to_layout == llm.plan.models[0].layout.name
            assert len(schedulers(llm)) == llm.plan.num_lanes == (2 if "data=2" in mesh or "expert=2" in mesh else 1)
            assert sum(scheduler.num_unfinished for scheduler in schedulers(llm)) >= 1
            has_parts = "context_parallel" in (report.from_layout, report.to_layout)
            assert report.num_requeued and (report.num_pages > 0) != has_parts, "pages stay in the prefix cache"
            seen += [next(stream) for _ in range(3)]
        seen += list(stream)
        finish(llm)
        assert all(request.embedding == pytest.approx(vector, rel=1e-4, abs=1e-5) for request in embedded)
        assert [outcome(request.output()) for request in requests] == [outcome(output) for output in expected]
        assert all(tokens(request) == long[:60] for request in crowd) and seen[-1].outputs[0].token_ids == long
        check_pages(llm)
        assert value(llm, "num_preemptions") > 0


MODELS: dict[str, dict[str, Any]] = {
    "fewer heads than devices": LLAMA,
    "bfloat16 and fewer heads than devices": {**LLAMA, "dtype": "bfloat16"},
    "experts": SPARSE,
    "latents and experts": DEEPSEEK,
}
FAST = ("bfloat16 and fewer heads than devices", "latents and experts")
MESHES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 2, "layout": "replicated_attention"},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2},
]
EXPERT_MESHES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
]


def make_plan(directory: Path, **settings: Any) -> EnginePlan:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "block_size": 8}
    return plan_engine(EngineConfig(model=str(directory), **sizes, **settings))


def contents(arrays: Sequence[jax.Array]) -> list[tuple[Any, bytes]]:
    """Sharding and bits of every part of every array."""
    return [
        (array.sharding, b"".join(np.asarray(shard.data).tobytes() for shard in array.addressable_shards))
        for array in arrays
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MODELS]
)
def test_weights_keep_their_bits(name: str, tmp_path: Path) -> None:
    """On each mesh they are those that loading puts there, and at the end those of the beginning."""
    write_checkpoint(tmp_path, MODELS[name], seed=3)
    now = make_plan(tmp_path)
    held = [[load_params(now, program) for program in now.models]]
    begin = [contents(found) for found in held[0]]
    for settings in [*MESHES, *(EXPERT_MESHES if "experts" in name else []), {}]:
        new = make_plan(tmp_path, **settings)
        check_same_parameters(now.replicas[0], new.replicas[0])
        held = move_weights([[*zip(now.replicas[0], held.pop(0), strict=True)]], new.replicas)
        now = new
        for found, program in zip([stage for stages in held for stage in stages], now.models, strict=True):
            assert contents(found) == contents(load_params(now, program)), settings
    assert [contents(found) for found in held[0]] == begin


def test_stacked_weights_move_as_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where the layers' parameters of one kind are one argument."""
    write_checkpoint(tmp_path, LLAMA, seed=3)
    of = Packing.of
    monkeypatch.setattr(Packing, "of", lambda params, platform: of(params, "gpu"))
    old, new = make_plan(tmp_path), make_plan(tmp_path, tensor_parallel_size=4)
    assert any(len(group) > 1 for group in new.models[0].packing.groups)
    ((found,),) = move_weights([[(old.models[0], load_params(old, old.models[0]))]], new.replicas)
    assert contents(found) == contents(load_params(new, new.models[0]))


def rows_of(program: ShardedModel, state: Any, pages: list[int]) -> list[np.ndarray]:
    """The pages of each array, all pools of it one after the other."""
    places = [number * program.pool_pages + page for number in range(program.kv_layout.counts[0]) for page in pages]
    return [np.asarray(array)[places] for array in jax.tree.leaves(state.pools)]


@pytest.mark.parametrize("kernel", ["xla", None])
@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["heads", "latents"])
def test_pages_keep_their_bits(config: dict[str, Any], kernel: str | None, tmp_path: Path) -> None:
    """From one device to four, two of which have the same head, to two stages, and to a second replica."""
    write_checkpoint(tmp_path, config, seed=3)
    settings = {"num_gpu_blocks_override": 16, "attention_backend": kernel}
    old = make_plan(tmp_path, **settings).models[0]
    shapes = [array.shape for array in jax.tree.leaves(old.abstract_state().pools)]
    generator = np.random.default_rng(5)
    filled = iter([generator.normal(size=shape).astype(np.float32) for shape in shapes])
    state = jax.tree.map(lambda array: jax.device_put(next(filled), array.sharding), old.empty_state().pools)
    state = old.empty_state()._replace(pools=state)
    pages, expected = [3, 9, 0, 15, 7], rows_of(old, state, [3, 9, 0, 15, 7])
    (moved,) = PageReader(old).read(state.pools, [pages])

    wide = make_plan(tmp_path, tensor_parallel_size=4, **settings).models[0]
    assert can_share_pages([old], [wide])
    targets = [1, 2, 12, 4, 0]
    writes = [PageWrite(moved, index, target) for index, target in enumerate(targets)]
    pools = PageWriter(wide).write(wide.empty_state().pools, [writes])
    (array, *_), (first, *_) = jax.tree.leaves(pools), expected
    if config is LLAMA:
        for number, shard in enumerate(array.addressable_shards):
            head = np.split(first, 2, axis=1)[number * 2 // 4]
            assert np.array_equal(np.asarray(shard.data)[targets], head[: len(targets)])
    (again,) = PageReader(wide).read(pools, [targets])

    stages, merged = make_plan(tmp_path, pipeline_parallel_size=2, **settings).models, dict[int, Any]()
    for stage in stages:
        writes = [PageWrite(again, 4, 5), PageWrite(again, 0, 6), PageWrite(again, 2, 8)]
        pools = PageWriter(stage).write(stage.empty_state().pools, [writes])
        (found,) = PageReader(stage).read(pools, [[6, 5, 8]])
        assert [*found] == [*stage.layers]
        merged |= found

    last = make_plan(tmp_path, data_parallel_size=2, **settings).models[1]
    writes = [PageWrite(merged, number, number) for number in range(3)]
    pools = PageWriter(last).write(last.empty_state().pools, [writes])
    found = rows_of(last, last.empty_state()._replace(pools=pools), [0, 1, 2])
    wanted = rows_of(old, state, [3, 7, 0])
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_pages_are_not_shared_with_another_kernel_or_page_size(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, seed=3)
    first = make_plan(tmp_path).models
    assert can_share_pages(first, make_plan(tmp_path, tensor_parallel_size=2).models)
    assert can_share_pages(first, make_plan(tmp_path, pipeline_parallel_size=2).models)
    assert not can_share_pages(first, make_plan(tmp_path, attention_backend="xla").models)
    assert not can_share_pages(first, make_plan(tmp_path, tensor_parallel_size=2, layout="context_parallel").models)
    assert not can_share_pages(first, [dataclasses.replace(first[0], page_size=16)])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model, on one device between tests."""
    with LLM("demo", **LITTLE) as made:
        yield made
        check_pages(made)


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """The tokens of ``LISTED`` with nothing else."""
    with LLM("demo", **LITTLE) as made:
        return made.generate(LISTED, LONG, use_tqdm=False)[0].outputs[0].token_ids


def test_the_prefix_cache_moves(llm: LLM, alone: list[int]) -> None:
    """To all new lanes, and back from both; counters continue."""
    assert tokens(run_one(llm, LISTED, LONG)) == alone
    counters = {name: value(llm, name) for name in ("steps", "prefix_cache_queries", "generation_tokens")}
    report = llm.reshard("data=2")
    assert (report.from_mesh, report.to_mesh) == ({"data": 1, "tensor": 1}, {"data": 2, "tensor": 1})
    assert report.num_pages == report.num_cached_pages > 60 // 8
    assert report.num_programs > 2 * 5 and report.compile_s > 0
    assert report.pause_s == pytest.approx(report.drain_s + report.move_s + report.warm_up_s)
    assert {name: value(llm, name) for name in counters} == counters
    assert llm.plan.num_lanes == 2 and llm.config.mesh == "data=2"
    assert llm.ledger.num_pages == sum(scheduler.allocator.num_pages for scheduler in schedulers(llm))
    for lane, hits in enumerate(cached_tokens(llm)):
        assert hits >= 24, lane
    again = run_one(llm, LISTED, LONG)
    assert tokens(again) == alone and again.num_cached_tokens
    report = llm.reshard("tensor=1")
    assert report.num_pages > 60 // 8, "the second copy of a page is not kept"
    assert report.num_pages < report.num_cached_pages
    again = run_one(llm, LISTED, LONG)
    assert tokens(again) == alone and again.num_cached_tokens
    check_pages(llm)


def cached_tokens(llm: LLM) -> list[int]:
    """Tokens of ``LISTED`` that each lane has in its prefix cache."""
    sequence = llm.engine.prepare(parse_prompt(LISTED, LONG)).samples[0].sequence
    return [scheduler.pages.num_cached_tokens(sequence) for scheduler in schedulers(llm)]


def run_one(llm: LLM, prompt: str, params: SamplingParams) -> RequestState:
    request = submit(llm, prompt, params)
    finish(llm)
    return request


def test_nothing_stays_on_the_devices(llm: LLM) -> None:
    """The old weights and pages are freed, and replaced weights are kept."""
    runner: Any = llm.engine.replicas[0].runner
    weights = weights_of(runner)
    name = next(name for name in weights if name.endswith("norm.weight"))
    set_weights(runner, {name: weights[name] * 2})
    live = sum(array.nbytes for array in jax.live_arrays())
    llm.reshard("tensor=2")
    llm.reshard("tensor=1")
    del runner
    assert sum(array.nbytes for array in jax.live_arrays()) <= live
    runner = llm.engine.replicas[0].runner
    found = weights_of(runner)
    assert np.array_equal(found.pop(name), weights[name] * 2)
    assert all(np.array_equal(array, weights[each]) for each, array in found.items())
    set_weights(runner, {name: weights[name]})
    llm.reset_prefix_cache()


def test_a_change_that_cannot_be_made_changes_nothing(
    llm: LLM, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = submit(llm, LISTED, LONG)
    for _ in range(9):
        llm.engine.step()
    config, plan = llm.config, llm.plan
    with pytest.raises(MeshError, match="the mesh needs 16 devices, but JAX has 8 cpu"):
        llm.reshard("data=16")
    with pytest.raises(ConfigError, match="mesh: expected a size >= 1 for any of data"):
        llm.reshard("rows=2")
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 does not divide"):
        llm.reshard("tensor=5")
    with pytest.raises(LayoutError, match="unknown layout 'sideways'; supported layouts: context_parallel, "):
        llm.reshard(layout="sideways")
    with pytest.raises(ConfigError, match="expert_parallel_size=2 needs a model with experts"):
        llm.reshard("expert=2")
    with monkeypatch.context() as patch:
        patch.setattr(move_memory, "device_memory_bytes", lambda device: 64 << 20)
        with pytest.raises(MemoryPlanError, match=r"cannot reshard: moving .* GiB of weights per device"):
            llm.reshard("tensor=2")
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.replicas[0], "runner", Mock(spec=Runner))
        with pytest.raises(ConfigError, match="cannot reshard an engine whose steps run in another process"):
            llm.reshard("tensor=2")
    assert llm.config is config and llm.plan is plan
    finish(llm)
    assert tokens(request) == alone


def test_parameters_and_types_must_be_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, seed=3)
    plan, other = make_plan(tmp_path), make_plan(tmp_path, dtype="bfloat16")
    with pytest.raises(ConfigError, match="cannot reshard from layout .* store other parameters or element types"):
        check_same_parameters(plan.models, other.models)


def test_a_longer_context_must_still_fit(tmp_path: Path) -> None:
    """Pages of half the heads fit; those of all heads would not."""
    write_checkpoint(tmp_path, LLAMA, seed=3)
    page = make_plan(tmp_path, tensor_parallel_size=2).needs.page
    sizes = {**LITTLE, "max_model_len": 64, "kv_cache_memory_bytes": 9 * page}
    with LLM(str(tmp_path), **sizes, tensor_parallel_size=2) as llm:
        with pytest.raises(MemoryPlanError, match="one request of max_model_len=64 tokens needs 8 KV pages"):
            llm.reshard("tensor=1")


def test_pages_that_the_host_has_no_room_for_are_computed_again(
    llm: LLM, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = submit(llm, LISTED, LONG)
    for _ in range(30):
        llm.engine.step()
    two = 2 * sum(map(page_bytes, llm.plan.replicas[0]))
    monkeypatch.setattr(cached_contents, "host_room", lambda *sizes: two)
    report = llm.reshard("tensor=1")
    assert report.num_pages == 2 < report.num_cached_pages
    assert report.num_requeued == 1 and report.num_recomputed_tokens > 8
    finish(llm)
    assert tokens(request) == alone


def test_without_a_prefix_cache_sequences_are_computed_again(alone: list[int]) -> None:
    with LLM("demo", **LITTLE, enable_prefix_caching=False, warm_up=False) as llm:
        request = submit(llm, LISTED, LONG)
        for _ in range(20):
            llm.engine.step()
        report = llm.reshard("tensor=2")
        assert report.num_pages == report.num_cached_pages == 0 and report.warm_up_s == 0
        assert report.num_recomputed_tokens >= 20
        finish(llm)
        assert tokens(request) == alone
        check_pages(llm)


def test_pages_of_several_tables_move(tmp_path: Path) -> None:
    """Layers with a window have tables of their own: each page moves in the layers of its table."""
    write_checkpoint(tmp_path, MIXED, seed=4)
    sizes = {**LITTLE, "num_gpu_blocks_override": 256}
    prompt = [{"prompt_token_ids": [*range(3, 45)]}]
    with LLM(str(tmp_path), **sizes) as llm:
        alone = llm.generate(prompt, LONG, use_tqdm=False)[0].outputs[0].token_ids
        llm.reset_prefix_cache()
        assert llm.plan.buckets.num_tables == 5
        request = llm.engine.submit(parse_prompt(prompt, LONG))
        for _ in range(20):
            llm.engine.step()
        report = llm.reshard("tensor=2")
        assert report.num_requeued == 1 and report.num_pages == report.num_cached_pages > 5 * 2
        assert report.num_recomputed_tokens <= 8
        finish(llm)
        assert tokens(request) == alone
        again = llm.engine.submit(parse_prompt(prompt, LONG))
        finish(llm)
        assert tokens(again) == alone and again.num_cached_tokens
        check_pages(llm)


def test_drafts_are_verified_on_the_new_mesh() -> None:
    run, params = Run(), [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)] * 3
    alone = [outcome(output) for output in run.without_drafts(params)]
    with run.proposing():
        resharder = resharding.Resharder(EngineConfig(**DRAFT_SETTINGS), run.started)
        resharder.reshard("tensor=2", None)
    steps = run.counter("steps")
    assert [outcome(output) for output in run.answers("right", params)] == alone
    assert run.proposer.num_proposals and run.counter("steps") - steps < 30
    assert run.counter("compiles_after_ready") == 0
    run.engine.close()


def test_a_failed_move_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a device was lost")

    with LLM("demo", **LITTLE) as llm:
        request = submit(llm, LISTED, LONG)
        llm.engine.step()
        monkeypatch.setattr(device_move, "move_weights", fail)
        with pytest.raises(EngineDeadError, match="the engine stopped: a device was lost"):
            llm.reshard("tensor=1")
        with pytest.raises(EngineDeadError, match="a device was lost"):
            llm.engine.step()
        assert not request.is_finished()


def test_streams_stay_open(alone: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """While programs compile, streams go on, and another change is refused; then all continue on the new mesh."""
    begun, may_go_on = asyncio.Event(), threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        prepare = resharding.prepare_reshard

        def hold(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            assert may_go_on.wait(60)
            return prepare(*arguments)

        monkeypatch.setattr(resharding, "prepare_reshard", hold)
        async with AsyncLLM("demo", **LITTLE) as engine:
            streams = [engine.generate(LISTED, LONG), *(engine.generate(f"{i}+7=", LONG) for i in range(6))]
            reading = [asyncio.create_task(last(stream)) for stream in streams]
            moving = asyncio.create_task(engine.reshard("tensor=2"))
            await begun.wait()
            with pytest.raises(ConfigError, match="a change of mesh or layout is in progress"):
                await engine.reshard("data=2")
            may_go_on.set()
            report = await moving
            late = asyncio.create_task(last(engine.generate(LISTED, LONG)))
            outputs = await asyncio.gather(*reading, late)
            assert all(len(output.outputs[0].token_ids) == 60 for output in outputs)
            assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids == alone
            assert report.to_mesh == {"data": 1, "tensor": 2} and engine.config.mesh == "tensor=2"
            assert engine.get_num_unfinished_requests() == 0
            (compiles,) = [m.value for m in engine.get_metrics() if m.name == "jaxserve:compiles_after_ready"]
            assert compiles == 0

    asyncio.run(asyncio.wait_for(main(), 300))


async def last(stream: Any) -> RequestOutput:
    """The last output of a stream."""
    return [output async for output in stream][-1]


def test_outputs_of_the_last_steps_are_delivered(llm: LLM) -> None:
    """A stream whose request finishes while the steps in flight complete still gets its last output."""
    stream = llm.stream("12+30=", GREEDY.clone(max_tokens=3))
    seen = [next(stream)]
    while len(seen[-1].outputs[0].token_ids) < 2:
        seen.append(next(stream))
    report = llm.reshard("tensor=1")
    assert report.num_requeued == 0 and llm.engine.num_unfinished == 0
    seen += list(stream)
    assert seen[-1].finished and len(seen[-1].outputs[0].token_ids) == 3
