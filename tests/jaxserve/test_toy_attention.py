"""A kind of attention is one file, and the families that use it: from a checkpoint to tokens, on any devices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, ConfigError, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import plan_engine
from jaxserve.models import registry
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.loading import load_model
from tests import toy_attention
from tests.random_checkpoint import LLAMA, write_checkpoint

KV_HEADS, HEAD_DIM, LAYERS, PAGE_SIZE = 2, 8, 3, 16
CONFIG = LLAMA | {"architectures": [toy_attention.ARCHITECTURE], "num_hidden_layers": LAYERS}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": PAGE_SIZE,
    "compilation_cache_dir": "",
}
PROMPT = [3, 1, 50, 7, 9, 2, 2, 11, 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)


@pytest.fixture(autouse=True)
def _registry_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_attention.ARCHITECTURE, toy_attention.__name__)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, CONFIG, seed=3)
    return tmp_path


@pytest.fixture
def equal_model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model of a family there is (SmolLM3) that computes the same: with the one head twice, as keys and as values."""
    directory = tmp_path_factory.mktemp("equal")
    rotates = [int(layer % 2 == 0) for layer in range(LAYERS)]
    config = CONFIG | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": rotates, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(1, LAYERS, 2):
        keys, values = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in "kv")
        assert values not in tensors
        tensors[keys] = tensors[values] = np.concatenate([tensors[keys]] * KV_HEADS)
    save_file(tensors, directory / "model.safetensors")
    return load_model(directory)


def assert_greedy(model: CausalLM, llm: LLM, prompts: list[list[int]], num_cached: int = 0) -> None:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == num_cached
        tokens = list(output.outputs[0].token_ids)
        logits = np.asarray(model(np.array([prompt + tokens], np.int32))[0])
        assert tokens == logits[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_planned_loaded_and_run(checkpoint: Path, equal_model: CausalLM, size: int) -> None:
    """Pages of several shapes: a part of one is copied where a prompt begins as another one did."""
    settings: dict[str, Any] = SETTINGS | {"tensor_parallel_size": size}
    plan = plan_engine(EngineConfig(model=str(checkpoint), **settings))
    heads = 2 * KV_HEADS // size + 1  # two layers with these, one with one head on each device
    assert plan.needs.page == 2 * heads * HEAD_DIM * 4 * PAGE_SIZE
    with LLM(str(checkpoint), **settings) as llm:
        assert_greedy(equal_model, llm, [PROMPT, [5]])
        assert_greedy(equal_model, llm, [PROMPT[:7] + [8, 8, 8]], num_cached=7)


def test_the_module_on_its_own(checkpoint: Path, equal_model: CausalLM) -> None:
    tokens = np.array([PROMPT], np.int32)
    np.testing.assert_allclose(load_model(checkpoint)(tokens), equal_model(tokens), rtol=2e-4, atol=2e-4)


def test_it_says_how_it_can_be_split(checkpoint: Path) -> None:
    parts = "4 query heads, 2 key/value heads, intermediate_size 24 and 1 key/value heads"
    expected = f"{parts} of ToyAttentionForCausalLM; valid sizes: 1, 2, 4"
    with pytest.raises(ConfigError, match=expected):
        plan_engine(EngineConfig(model=str(checkpoint), **SETTINGS, tensor_parallel_size=3))
