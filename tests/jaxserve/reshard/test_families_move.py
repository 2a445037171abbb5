"""Engines of families whose layers differ move to other meshes, with cached pages and running requests.

Layers that read other layers' pages, latents, windows, experts and embeddings per layer all follow; tokens are those of
an engine that stays.
"""

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.api.request import parse_prompt
from tests.jaxserve import test_families as families
from tests.jaxserve import test_models as models
from tests.jaxserve import test_text_halves as halves
from tests.jaxserve.test_lanes import GREEDY, finish

pytestmark = pytest.mark.slow

MESHES = ("tensor=2", "tensor=4", "stage=2")
EXPERT_MESHES = ("tensor=2", "expert=2", "stage=2")
ROWS = ("gemma4-e2b", "gemma4-26b", "mistral4", "llama4", "laguna", "muse-glimmer")
HALVES = ("gemma3",)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "max_model_len": 64,
    "num_gpu_blocks_override": 256,
    "compilation_cache_dir": "",
    "warm_up": False,
}


def make(name: str, directory: Path) -> bool:
    """Write a checkpoint; return whether it has experts."""
    models.torch.set_num_threads(1)
    if name in HALVES:
        halves.make(name, directory)
        return False
    row = families.ROWS[name]
    models.save(families.make_hf(row), row, directory)
    return row.num_experts > 0


@pytest.mark.parametrize("name", (*ROWS, *HALVES))
def test_tokens_are_those_of_an_engine_that_stays(name: str, tmp_path: Path) -> None:
    meshes = EXPERT_MESHES if make(name, tmp_path) else MESHES
    prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts(150)]
    params = GREEDY.clone(max_tokens=20, logprobs=0)
    with LLM(str(tmp_path), **SETTINGS) as still:
        expected = [output.outputs[0] for output in still.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        requests = [llm.engine.submit(parse_prompt(prompt, params)) for prompt in prompts]
        for mesh in meshes:
            for _ in range(6):
                llm.engine.step()
            report = llm.reshard(mesh)
            assert report.num_requeued and (report.num_pages or "stage" in mesh), "stages may have other page tables"
        finish(llm)
        again = llm.engine.submit(parse_prompt(prompts[-1], params))
        finish(llm)
        assert again.num_cached_tokens
        for request, known in zip([*requests, again], [*expected, expected[-1]], strict=True):
            found = request.output().outputs[0]
            assert found.token_ids == known.token_ids
            assert found.cumulative_logprob == pytest.approx(known.cumulative_logprob, abs=1e-3)
