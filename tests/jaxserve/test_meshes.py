"""Six families on every mesh of 1, 2, 4 and 8 devices, with every layout: transformers' greedy tokens."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from tests.hooks import LAYOUTS, get_layout, num_devices
from tests.jaxserve.test_models import LEAST_MARGIN, ROWS, Checkpoint, greedy, make_hf, prompts, save

NUM_LAYERS = 4
SIZES = {"num_hidden_layers": NUM_LAYERS, "intermediate_size": 64, "num_experts": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": {"num_local_experts": 8},
    "deepseek-v3": {"moe_intermediate_size": 24},
    "gpt-oss": {"num_local_experts": 8, "intermediate_size": 32},
}
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "deepseek-v3", "gpt-oss")
SPARSE = FAMILIES[3:]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 72,
    "compile_sizes": {"decode": [4], "mixed": [32]},
    "compilation_cache_dir": "",
}
AXES = ("data", "stage", "tensor", "expert")
MESHES: list[dict[str, int]] = [
    dict(zip(AXES, sizes, strict=True))
    for total in (1, 2, 4, 8)
    for sizes in itertools.product((1, 2, 4, 8), repeat=4)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] == total and sizes[1] <= NUM_LAYERS
]
FAST = {
    ("llama", "data=2,stage=2,tensor=2", "tensor_parallel"),
    ("qwen3", "stage=2,tensor=4", "sequence_parallel"),
    ("gemma3", "stage=4,tensor=2", "split_logits"),
    ("mixtral", "stage=2,tensor=2,expert=2", "expert_gather"),
    ("deepseek-v3", "stage=2,tensor=2,expert=2", "expert_all_to_all"),
    ("gpt-oss", "data=2,stage=2,tensor=2", "expert_parallel"),
}


def layouts(mesh: dict[str, int], has_experts: bool) -> list[str]:
    """The registry's layouts that use the axes of a mesh."""
    if mesh["tensor"] == mesh["expert"] == 1:
        return ["tensor_parallel"]
    if mesh["expert"] > 1:
        return [name for name in LAYOUTS if has_experts and get_layout(name).mesh_axis("experts") == "expert"]
    axes = [None, "tensor"] if has_experts else [None]
    return [name for name in LAYOUTS if name != "replicated" and get_layout(name).mesh_axis("experts") in axes]


def combinations() -> list[Any]:
    """Every family on every mesh with every layout; most of them slow."""
    found = []
    for family in FAMILIES:
        for mesh in MESHES:
            name = ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "data=1"
            for layout in layouts(mesh, family in SPARSE):
                marks = [] if (family, name, layout) in FAST else [pytest.mark.slow]
                found.append(pytest.param(family, name, layout, marks=marks, id=f"{family}-{name}-{layout}"))
    assert {tuple(each.values) for each in found} >= FAST
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Makes a family's checkpoint, once, with sizes that eight devices can split."""

    @functools.cache
    def make(family: str) -> Checkpoint:
        given = ROWS[family]
        for seed in range(20):
            row = dataclasses.replace(given, raw=given.raw | SIZES | CHANGES.get(family, {}), seed=seed)
            model = make_hf(row)
            asked = prompts(model.config.vocab_size)
            try:
                expected = [greedy(row, model, prompt) for prompt in asked]
            except AssertionError:  # two tokens are closer than LEAST_MARGIN
                continue
            directory: Path = tmp_path_factory.mktemp(family)
            save(model, row, directory)
            return Checkpoint(directory, model, asked, expected)
        raise AssertionError(f"no seed keeps {LEAST_MARGIN} between tokens")

    return make


@pytest.mark.parametrize(("family", "mesh", "layout"), combinations())
def test_greedy_tokens_equal_those_of_transformers(
    family: str, mesh: str, layout: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Three prompts twice, the second time from the cache, while the others of the batch compute theirs."""
    made = checkpoint(family)
    with LLM(str(made.directory), **SETTINGS, mesh=mesh, layout=layout, block_size=16) as llm:
        assert num_devices(llm) == math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
        params = SamplingParams(temperature=0.0, max_tokens=len(made.expected[0]))
        outputs = llm.generate(made.prompts, params, use_tqdm=False)
        again = llm.generate(made.prompts[::-1], params, use_tqdm=False)
        values = {metric.name: metric.value for metric in llm.get_metrics() if not metric.labels}
    assert [output.outputs[0].token_ids for output in outputs] == made.expected
    assert [output.outputs[0].token_ids for output in again] == made.expected[::-1]
    assert values["jaxserve:prefix_cache_hits"] > 0
    assert values["jaxserve:compiles_after_ready"] == 0
