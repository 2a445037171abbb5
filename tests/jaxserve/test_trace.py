"""A real trace of conversations through the engine, with too few pages for it, on one device and in stages."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from tests.hooks import num_stages, watch_steps

NUM_REQUESTS = 500
SCALE = 8
CONTEXT = 512
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "block_size": 8,
    "compilation_cache_dir": "",
}
NUM_PAGES = 160  # full contexts of eight sequences would take 512


class Work(NamedTuple):
    """A request of the trace, its prompt drawn at random."""

    prompt: list[int]
    params: SamplingParams


@pytest.fixture(scope="module")
def trace(shared_data: Path) -> list[Work]:
    """The first requests of the Azure trace, scaled down; every other one draws its tokens at random, and every third
    one begins as the others of these do."""
    generator = np.random.default_rng(0)
    beginning = generator.integers(3, 512, 32).tolist()
    path = shared_data / "traces" / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"
    work = []
    with path.open(newline="") as file:
        for i, row in enumerate(itertools.islice(csv.DictReader(file), NUM_REQUESTS)):
            num_new = min(max(1, int(row["GeneratedTokens"]) // SCALE), CONTEXT - 1)
            length = min(max(1, int(row["ContextTokens"]) // SCALE), CONTEXT - num_new)
            params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=num_new, ignore_eos=True)
            prompt = generator.integers(3, 512, length).tolist()
            work.append(Work((beginning + prompt)[:length] if i % 3 == 0 else prompt, params))
    return work


@pytest.fixture(scope="module", params=["data=1", pytest.param("stage=2,tensor=2", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, stories_model: Path) -> Iterator[LLM]:
    with LLM(str(stories_model), **SETTINGS, mesh=request.param, num_gpu_blocks_override=NUM_PAGES) as made:
        yield made


def generate(llm: LLM, work: list[Work]) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": one.prompt} for one in work]
    return llm.generate(prompts, [one.params for one in work], use_tqdm=False)


def metrics(llm: LLM) -> dict[str, float]:
    return {metric.name.removeprefix("jaxserve:"): metric.value for metric in llm.get_metrics() if not metric.labels}


def test_a_trace_with_too_few_pages(llm: LLM, trace: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        steps = watch_steps(llm, patch)
        outputs = generate(llm, trace)
    stages = num_stages(llm)
    possible = [one.num_launched * -(-min(SETTINGS["max_num_seqs"], one.num_unfinished) // stages) for one in steps]
    found = metrics(llm)

    assert len(outputs) == NUM_REQUESTS
    for output, one in zip(outputs, trace, strict=True):
        assert output.prompt_token_ids == one.prompt
        assert len(output.outputs[0].token_ids) == one.params.max_tokens
        assert output.outputs[0].finish_reason == "length"
    assert found["num_preemptions"] >= 20
    assert found["prefix_cache_hits"] >= 50 * SETTINGS["block_size"]
    assert found["idle_stage_ticks"] <= 0.05 * found["stage_ticks"]
    assert found["decode_rows"] >= 0.8 * sum(possible)
    assert found["kv_cache_usage_perc"] == 0
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["compiles_after_ready"] == 0
    assert found["generation_tokens"] == sum(one.params.max_tokens or 0 for one in trace)
    assert found["prompt_tokens"] == sum(len(one.prompt) for one in trace)

    for i in np.random.default_rng(1).choice(NUM_REQUESTS, 20, replace=False).tolist():
        (alone,) = generate(llm, [trace[i]])
        assert alone.outputs[0].token_ids == outputs[i].outputs[0].token_ids, f"request {i}"
    assert metrics(llm)["compiles_after_ready"] == 0
