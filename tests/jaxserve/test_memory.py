"""Memory: what fits is found out before a byte is loaded, and where it went is accounted for afterwards."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from jaxserve import LLM, MemoryPlanError
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import EnginePlan, load_params, plan_engine
from jaxserve.device.memory import (
    MemoryNeeds,
    device_memory_bytes,
    plan_pages,
    set_gpu_memory_fraction,
    usable_fraction,
)
from jaxserve.scheduling.page_allocator import KVWindow
from tests.jaxserve.test_lanes import CONFIG as SPARSE
from tests.random_checkpoint import DEEPSEEK, write_checkpoint

GIB = 1 << 30
MIB = 1 << 20
NEEDS = MemoryNeeds(
    weights=2 * GIB, page=2 * MIB, temporaries=GIB // 2, page_size=16, max_model_len=4096, max_num_seqs=8
)


def plan(needs: MemoryNeeds = NEEDS, **settings: Any) -> int:
    defaults = {"total": 8 * GIB, "utilization": 0.9, "platform": "gpu", "pool_bytes": None, "num_pages": None}
    return plan_pages(needs, **{**defaults, **settings})


def test_a_model_that_does_not_fit_says_why() -> None:
    with pytest.raises(
        MemoryPlanError,
        match=r"2\.00 GiB for weights, 0\.50 GiB for the largest step and 1\.00 GiB in reserve, but "
        r"may use 2\.70 GiB \(gpu_memory_utilization=0\.9 of 3\.00 GiB\).*tensor_parallel_size",
    ):
        plan(total=3 * GIB)


def test_on_gpus_room_for_trials_of_kernels_is_left_free() -> None:
    many = {**vars(NEEDS), "max_num_seqs": 64}
    without, trying = MemoryNeeds(**many), MemoryNeeds(**{**many, "trials": GIB})
    assert plan(without) - plan(trying) == GIB // NEEDS.page
    assert plan(without, platform="cpu") == plan(trying, platform="cpu")


def test_the_largest_parameter_is_that_of_one_layer(tmp_path: Path) -> None:
    """On GPUs layers are stacked in one argument, but products read one."""
    write_checkpoint(tmp_path, SPARSE, seed=0)
    (sharded,) = plan_engine(EngineConfig.from_arguments(str(tmp_path), dtype="float32")).models
    assert sharded.largest_weight_bytes == max(
        4 * math.prod(struct.shape) for struct in sharded.abstract_model.params.values()
    )


def test_too_many_pages_say_how_many_fit() -> None:
    with pytest.raises(MemoryPlanError, match=r"4000 KV pages need 7\.81 GiB .* only 3\.70 GiB") as caught:
        plan(num_pages=4000)
    pages, pool = map(int, re.findall(r"(?:override|bytes)=(\d+)", str(caught.value)))
    assert plan(num_pages=pages) == pages
    assert plan(pool_bytes=pool) == pages
    with pytest.raises(MemoryPlanError):
        plan(num_pages=pages + 1)


def test_a_request_that_does_not_fit_says_which_would() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"max_model_len=4096 tokens needs 256 KV pages .*there are 100"
    ) as caught:
        plan(num_pages=100)
    (length,) = map(int, re.findall(r"use max_model_len=(\d+)", str(caught.value)))
    assert length == 1600
    assert plan(MemoryNeeds(**{**vars(NEEDS), "max_model_len": length}), num_pages=100) == 100


def test_pages_are_never_more_than_all_sequences_can_use() -> None:
    assert plan(total=100 * GIB) == 256 * 8
    assert plan(total=100 * GIB, pool_bytes=50 * GIB) == 256 * 8
    assert plan(total=100 * GIB, num_pages=5000) == 5000


def test_on_cpus_the_pool_has_a_sane_default() -> None:
    many = MemoryNeeds(**{**vars(NEEDS), "max_num_seqs": 64})
    assert plan(many, platform="cpu", total=64 * GIB) == GIB // many.page
    long = MemoryNeeds(**{**vars(NEEDS), "max_model_len": 16 * 1000})
    assert plan(long, platform="cpu", total=64 * GIB) == 1000
    assert plan(many, platform="cpu", total=64 * GIB, pool_bytes=2 * GIB) == 2 * GIB // many.page


def test_virtual_devices_share_the_machine() -> None:
    small = MemoryNeeds(**{**vars(NEEDS), "weights": GIB // 2})
    one, four = (plan(small, platform="cpu", total=8 * GIB, num_pages=256, devices_sharing=n) for n in (1, 4))
    assert one == four
    with pytest.raises(MemoryPlanError, match="does not fit"):
        plan(small, platform="cpu", total=8 * GIB, devices_sharing=8)


@hypothesis.given(
    weights=st.integers(1, 20 * GIB),
    page=st.integers(1, 64 * MIB),
    length=st.integers(1, 100_000),
    seqs=st.integers(1, 300),
    total=st.integers(1, 40 * GIB),
    pool=st.none() | st.integers(1, 40 * GIB),
    pages=st.none() | st.integers(1, 10_000),
    platform=st.sampled_from(["cpu", "gpu"]),
    windows=st.lists(
        st.none() | st.builds(KVWindow, st.integers(1, 4096), st.just(16), st.integers(1, 99)), min_size=1
    ),
)
def test_a_plan_fits_or_what_it_suggests_does(
    weights: int,
    page: int,
    length: int,
    seqs: int,
    total: int,
    pool: int | None,
    pages: int | None,
    platform: str,
    windows: list[KVWindow | None],
) -> None:
    needs = MemoryNeeds(
        weights=weights,
        page=page,
        temporaries=MIB,
        page_size=16,
        max_model_len=length,
        max_num_seqs=seqs,
        windows=tuple(windows),
    )
    settings: dict[str, Any] = {"total": total, "platform": platform, "pool_bytes": pool, "num_pages": pages}
    try:
        found = plan(needs, **settings)
    except MemoryPlanError as error:
        suggested = re.search(r"use max_model_len=(\d+)", str(error))
        if suggested and int(suggested[1]):
            shorter = MemoryNeeds(**{**vars(needs), "max_model_len": int(suggested[1])})
            assert plan(shorter, **settings) >= shorter.request_pages
        return
    assert needs.request_pages <= found
    assert weights + found * page + needs.temporaries <= total
    assert needs.longest_request(found) == length


def test_no_length_is_suggested_where_none_fits() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan(pool_bytes=1)
    assert "max_model_len=0" not in str(caught.value)
    assert "kv_cache_memory_bytes" in str(caught.value)


# ---------------------------------------------------------------- a model directory, before its weights are read


@pytest.fixture
def without_weights(stories_model: Path, tmp_path: Path) -> Path:
    """The model's config.json alone: reading its weights would fail."""
    shutil.copy(stories_model / "config.json", tmp_path / "config.json")
    return tmp_path


def plan_stories(directory: Path, **settings: Any) -> EnginePlan:
    return plan_engine(EngineConfig.from_arguments(str(directory), block_size=8, max_num_seqs=4, **settings))


def test_logits_are_planned_for_every_sample(without_weights: Path) -> None:
    """A row with drafts has one more for each, but never more than the step has tokens."""
    config = EngineConfig(model=str(without_weights), max_num_seqs=4, max_num_batched_tokens=16)
    drafts = [{"method": "ngram", "num_speculative_tokens": count} for count in (2, 9)]
    plans = [plan_engine(dataclasses.replace(config, speculative_config=each)) for each in (None, *drafts)]
    least, some, most = (plan.needs.temporaries for plan in plans)
    logits = 4 * 4 * plans[0].config.vocab_size
    assert (some - least, most - least) == (2 * 4 * logits, 12 * logits)
    assert [plan.buckets.max_samples for plan in plans] == [1, 3, 10]


def test_the_memory_error_comes_before_the_weights(without_weights: Path) -> None:
    with pytest.raises(MemoryPlanError, match="max_model_len=512 tokens needs 64 KV pages"):
        LLM(str(without_weights), block_size=8, num_gpu_blocks_override=63)
    with pytest.raises(MemoryPlanError, match="the model does not fit"):
        LLM(str(without_weights), gpu_memory_utilization=1e-6)


def test_what_the_error_suggests_fits(without_weights: Path) -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_stories(without_weights, kv_cache_memory_bytes=300_000)
    (length,) = map(int, re.findall(r"use max_model_len=(\d+)", str(caught.value)))
    made = plan_stories(without_weights, kv_cache_memory_bytes=300_000, max_model_len=length)
    assert made.max_model_len == length
    assert made.models[0].num_pages * 8 >= length
    with pytest.raises(MemoryPlanError):
        plan_stories(without_weights, kv_cache_memory_bytes=300_000, max_model_len=length + 1)


def test_the_longest_context_that_fits(without_weights: Path) -> None:
    made = plan_stories(without_weights, kv_cache_memory_bytes=300_000, max_model_len=-1)
    page_bytes = 5 * 2 * 4 * 8 * 4 * 8  # layers, keys and values, heads, features, bytes, tokens
    assert made.needs.page == page_bytes
    assert made.max_model_len == 300_000 // page_bytes * 8
    assert plan_stories(without_weights, max_model_len=-1).max_model_len == 512


def test_needs_follow_the_layout(without_weights: Path) -> None:
    one, two = (plan_stories(without_weights, kernels="xla", tensor_parallel_size=n).needs for n in (1, 2))
    assert two.page == one.page // 2
    assert one.weights // 2 < two.weights < one.weights * 0.6
    parameters = 260_032
    assert one.weights == parameters * 4
    half = plan_stories(without_weights, kernels="xla", dtype="bfloat16").needs
    assert half.weights == parameters * 2


SPLIT: dict[str, dict[str, Any]] = {
    "dense": {"tensor_parallel_size": 2, "num_experts": 0},
    "experts over tensor": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "experts with all rows": {"expert_parallel_size": 2, "tensor_parallel_size": 2, "layout": "expert_all_reduce"},
    "experts and rows": {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    "latents": {"tensor_parallel_size": 2},
    "latents and rows": {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    "windows": {"tensor_parallel_size": 2, "num_experts": 0},
    "tokens": {"tensor_parallel_size": 2, "num_experts": 0, "layout": "context_parallel"},
    "tokens of latents": {"tensor_parallel_size": 2, "layout": "context_parallel"},
}
KINDS: dict[str, dict[str, Any]] = {
    "latents": DEEPSEEK,
    "latents and rows": DEEPSEEK,
    "tokens of latents": DEEPSEEK,
    "windows": SPARSE
    | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 16, "num_hidden_layers": 3, "max_window_layers": 1},
}


@pytest.mark.parametrize("name", SPLIT)
def test_every_device_holds_what_is_planned_for_it(name: str, tmp_path: Path) -> None:
    """Weights, pages and the state of slots; a lane's pages are its own devices' alone."""
    settings = {**SPLIT[name]}
    dense = {} if settings.pop("num_experts", 4) else {"mlp_only_layers": [0, 1]}
    write_checkpoint(tmp_path, KINDS.get(name, SPARSE) | dense, seed=0)
    config = EngineConfig(model=str(tmp_path), max_num_seqs=4, block_size=8, num_gpu_blocks_override=200, **settings)
    plan = plan_engine(config)
    (program,), needs = plan.models, plan.needs
    arrays = jax.tree.leaves((load_params(plan, program), program.empty_state()))
    planned = needs.weights + needs.slots + 200 * needs.page
    held = dict.fromkeys(program.mesh.devices.flat, 0)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(held) == program.mesh.devices.size == (2 if "expert_parallel_size" not in settings else 4)
    for size in held.values():
        assert size == pytest.approx(planned, rel=0.02)
    assert program.num_lanes == (2 if name.endswith("and rows") else 1)
    assert program.num_pages == 200
    pool, *others = program.abstract_state().pools[0]
    assert len(others) == (0 if "latents" in name else 1)
    num_owners = program.num_lanes * (2 if name.startswith("tokens") else 1)
    assert pool.shape[0] == num_owners * pool.sharding.shard_shape(pool.shape)[0]


def test_needs_follow_the_axis_of_experts(tmp_path: Path) -> None:
    """Devices share the experts' weights but not pages and slots; in a step, experts compute the rows of all lanes."""
    write_checkpoint(tmp_path, SPARSE | {"moe_intermediate_size": 200}, seed=0)
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "kernels": "xla"}
    layouts: list[dict[str, Any]] = [{}, {"expert_parallel_size": 2, "layout": "expert_all_reduce"}]
    layouts.append({"expert_parallel_size": 2})
    one, all_rows, lanes = (
        plan_engine(EngineConfig(model=str(tmp_path), **settings, **layout)).needs for layout in layouts
    )
    experts = 2 * 4 * 3 * 200 * 16 * 4  # layers, experts, matrices, features
    assert one.weights - lanes.weights == one.weights - all_rows.weights == experts // 2
    assert one.page == lanes.page == all_rows.page and one.slots == lanes.slots == all_rows.slots
    assert one.temporaries == all_rows.temporaries < lanes.temporaries < 2 * one.temporaries


def test_a_real_model_that_is_too_large(shared_data: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"the model does not fit: each device needs 131\.4\d GiB for weights"):
        plan_engine(
            EngineConfig.from_arguments(
                str(shared_data / "configs" / "llama-3.1-70b"), dtype="bfloat16", gpu_memory_utilization=0.01
            )
        )


# ---------------------------------------------------------------- the ledger


MEASURE = """
import json, sys
from pathlib import Path
from jaxserve import LLM
llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=4, max_num_batched_tokens=32, compilation_cache_dir="",
          kv_cache_memory_bytes=200_000_000, **json.loads(sys.argv[2]))
status = Path("/proc/self/status").read_text()
(resident,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")]
ledger = llm.ledger
print(json.dumps({"resident": resident, "total": ledger.total, "lines": ledger.lines, "text": str(ledger),
                  "tokens": ledger.num_pages * ledger.page_size}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"tensor_parallel_size": 2, "data_parallel_size": 2}]
)
def test_the_ledger_adds_up_to_what_the_process_holds(
    settings: dict[str, int], stories_model: Path, repository: Path
) -> None:
    """In a fresh process, which has no devices but those that the engine asks for."""
    command = [sys.executable, "-c", MEASURE, str(stories_model), json.dumps(settings)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"] == sum(size for _, size in found["lines"])
    assert found["total"] == pytest.approx(found["resident"], rel=0.1)
    lines = dict(found["lines"])
    assert {"weights", "KV pages"} < lines.keys()
    assert lines["weights"] >= 260_032 * 4
    for name, size in found["lines"]:
        assert re.search(rf"{re.escape(name)} +{size / GIB:.3f} GiB", found["text"])
    assert f"CPU KV cache size: {found['tokens']:,} tokens" in found["text"]
    assert f"Maximum concurrency for 512 tokens per request: {found['tokens'] / 512:.2f}x" in found["text"]


class FakeGpu:
    """A device as far as its memory goes."""

    platform = "gpu"
    device_kind = "NVIDIA H200"

    def __init__(self, limit: int | None):
        self.limit = limit

    def memory_stats(self) -> dict[str, int]:
        return {} if self.limit is None else {"bytes_limit": self.limit}


@pytest.mark.parametrize("set_before", ["", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_engine_asks_for_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch, set_before: str) -> None:
    """JAX says what it may hand out; all of the memory follows from the fraction it was given."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5" if name == set_before else "")
    assert device_memory_bytes(FakeGpu(75 * GIB)) == (150 if set_before else 100) * GIB
    assert usable_fraction(FakeGpu(1), 0.92) == (0.5 if set_before else 0.75)
    set_gpu_memory_fraction(0.92)
    assert usable_fraction(FakeGpu(1), 0.95) == (0.5 if set_before else 0.92)
    assert usable_fraction(FakeGpu(1), 0.3) == 0.3
    fraction = 0.5 if set_before else 0.92
    assert device_memory_bytes(FakeGpu(int(100 * GIB * fraction))) == pytest.approx(100 * GIB, abs=8)


def test_a_gpu_that_does_not_tell_its_memory() -> None:
    with pytest.raises(MemoryPlanError, match="NVIDIA H200 does not report its memory; set kv_cache_memory_bytes"):
        device_memory_bytes(FakeGpu(None))
