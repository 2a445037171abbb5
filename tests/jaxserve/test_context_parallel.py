"""Devices that share the tokens of KV pages: the results of one device, their memory, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.layout_choice import page_size_of
from jaxserve.layers.parallel import Parallel
from pallas_kernels import UnsupportedKernelError, native_library
from sharding import LayoutError, ShardingLayout, get_layout
from tests.jaxserve.test_draft_requests import REQUESTS as DRAFTED
from tests.jaxserve.test_draft_requests import Run, check_same
from tests.jaxserve.test_lanes import CONFIG as SPARSE
from tests.jaxserve.test_request_mix import REQUESTS, SETTINGS, outcome, scores
from tests.random_checkpoint import write_checkpoint

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "layout": "context_parallel", "block_size": 16}
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)


def plan(model: str = "demo", **settings: Any) -> EnginePlan:
    return plan_engine(EngineConfig(model=model, max_num_seqs=2, max_num_batched_tokens=32, **TWO | settings))


def ask(llm: LLM, numbers: list[int]) -> list[Any]:
    """Some of the requests at once, with nothing in the prefix cache."""
    llm.reset_prefix_cache()
    prompts, params = [REQUESTS[i][0] for i in numbers], [SamplingParams(**REQUESTS[i][1]) for i in numbers]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=needs_native),
        pytest.param({"kernels": "xla", "deterministic": True, "tensor_parallel_size": 4}, marks=pytest.mark.slow),
    ],
    ids=["native", "xla"],
)
def test_requests_have_the_same_bits_alone_and_beside_others(settings: dict[str, Any]) -> None:
    """Prompt logprobs, penalties, grammars and several samples among them; and the tokens are those of one device."""
    numbers = [*range(len(REQUESTS))] if settings else [0, 2, 6, 13]
    with LLM("demo", dtype="float32", **SETTINGS | TWO | settings) as llm:
        assert llm.plan.models[0].row_tile is not None
        alone = [ask(llm, [number])[0] for number in numbers]
        together = ask(llm, numbers)
        assert all(metric.value == 0 for metric in llm.get_metrics() if "compiles_after" in metric.name)
    with LLM("demo", dtype="float32", **SETTINGS) as llm:
        expected = ask(llm, numbers)
    for one, other, whole in zip(alone, together, expected, strict=True):
        assert outcome(one) == outcome(other) == outcome(whole)
        assert scores(one) == scores(other)
        assert scores(one) == pytest.approx(scores(whole), abs=1e-4)


@pytest.mark.parametrize("kind", ["mixed", pytest.param("right", marks=pytest.mark.slow)])
def test_drafts_change_no_answer(kind: str) -> None:
    run = Run(**TWO)
    requests = DRAFTED if kind == "right" else DRAFTED[:3]
    try:
        expected = run.without_drafts(requests)
        check_same(run.answers(kind, requests), expected)
        assert run.counter("compiles_after_ready") == 0
    finally:
        run.engine.close()


def test_pages_take_less_memory_than_with_repeated_heads(tmp_path: Path) -> None:
    """Of 2 key/value heads, 4 devices have all tokens of one, or a quarter of both."""
    write_checkpoint(tmp_path, SPARSE, seed=0)
    model, four = str(tmp_path), {"tensor_parallel_size": 4}
    repeated, shared = (plan(model, **four, layout=name).needs for name in ("tensor_parallel", "context_parallel"))
    assert 2 * shared.page == repeated.page
    assert shared.table_pages == repeated.table_pages and shared.request_pages == repeated.request_pages
    assert shared.temporaries > repeated.temporaries, "queries of all heads, and what the devices exchange"


def test_the_page_size_is_that_of_all_devices() -> None:
    program = plan().models[0]
    assert (program.page_size, program.own_page_size) == (16, 8)
    assert plan(tensor_parallel_size=1).models[0].own_page_size == 16
    assert plan(block_size=None).models[0].page_size == 64


@pytest.mark.parametrize(
    ("parts", "size", "default", "message"),
    [
        (3, 64, 72, "64 is not a multiple of the 3 devices .* 'context_parallel'; omit it to get pages of 72 tokens"),
        (16, 8, 128, "8 is not a multiple of the 16 devices .*; use one of 16, 32, 64, 128$"),
    ],
)
def test_pages_that_devices_cannot_share_are_refused(parts: int, size: int, default: int, message: str) -> None:
    parallel = Parallel.from_layout(get_layout("context_parallel"), parts)
    assert page_size_of(EngineConfig(model="demo"), parallel, "context_parallel") == default
    with pytest.raises(ConfigError, match=f"block_size={message}"):
        page_size_of(EngineConfig(model="demo", block_size=size), parallel, "context_parallel")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"q_heads": "tensor", "kv_heads": "tensor"},
            "splits tokens over tensor; then q_heads must be over tensor too and kv_heads over none, got tensor and t",
        ),
        ({}, "splits tokens over tensor; then q_heads must be over tensor too and kv_heads over none, got None and"),
        ({"q_heads": "expert"}, "splits tokens over tensor; .* got expert and None"),
        (
            {"q_heads": "tensor", "batch": "tensor", "pages": "tensor", "experts": "tensor"},
            "splits batch and tokens, q_heads over tensor; an axis that splits rows can split only experts besides",
        ),
    ],
)
def test_layouts_that_share_tokens_in_an_impossible_way(rules: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError, match=f"layout 'bad'.* {message}"):
        ShardingLayout("bad", {"tokens": "tensor", **rules}, "gather" if "batch" in rules else "all_reduce")


def test_heads_and_tokens_are_over_the_axis_of_features() -> None:
    layout = ShardingLayout("own", {"q_heads": "tensor", "tokens": "tensor"})
    with pytest.raises(LayoutError, match="'own' has q_heads over tensor, .* tokens over tensor, ffn over None; q_h"):
        plan(layout=layout)


@needs_native
def test_the_log_says_which_kernel_attends_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """Native kernels read pages with a multiple of 8 tokens."""
    with caplog.at_level("INFO"):
        assert plan(kernels=None).models[0].kernel.name == "native"
        assert plan(kernels=None, block_size=8).models[0].kernel.name == "xla"
    assert "not native: page_size must be a multiple of 8, not 4" in caplog.text


def test_a_kernel_without_partial_attention_is_refused_by_name() -> None:
    message = (
        "no implementation of .*: it has no partial attention, which 2 devices that share the tokens of pages need"
    )
    with pytest.raises(UnsupportedKernelError, match=message):
        plan(attention_backend="pallas-interpret", block_size=64)
