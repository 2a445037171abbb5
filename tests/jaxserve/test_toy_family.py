"""A family is one file and one line of the registry: from a checkpoint to a plan and to tokens, on any devices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError
from jaxserve import LLM, ConfigError, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import load_params, plan_engine
from jaxserve.models import registry
from jaxserve.models.loading import load_model
from tests import toy_family
from tests.random_checkpoint import LLAMA

WIDTH, FFN, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 24, 51, 4, 2, 8, 2
CONFIG = LLAMA | {"architectures": [toy_family.ARCHITECTURE]}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compilation_cache_dir": "",
}
PROMPTS = [[3, 1, 50, 7, 9, 2, 2, 11, 30], [5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)


@pytest.fixture(autouse=True)
def _registry_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.__name__)


def random_tensors() -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}norm_1": (WIDTH,),
            f"{prefix}norm_2": (WIDTH,),
            f"{prefix}attention.qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
            f"{prefix}attention.o_proj": (WIDTH, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj": (FFN, WIDTH),
            f"{prefix}mlp.up_proj": (FFN, WIDTH),
            f"{prefix}mlp.down_proj": (WIDTH, FFN),
        }
    generator = np.random.default_rng(3)
    return {f"{name}.weight": generator.normal(0.0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(), tmp_path / "model.safetensors")
    return tmp_path


def exact_logits(token_ids: list[int]) -> np.ndarray:
    """The whole model in float64, written down from the family's description."""
    weights = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in random_tensors().items()}
    length = len(token_ids)
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = np.exp(1j * angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[name]

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = weights["model.embed_tokens"][token_ids]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        qkv = (norm(x, f"{prefix}norm_1") @ weights[f"{prefix}attention.qkv"].T).reshape(length, -1, HEAD_DIM)
        query, key, value = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        key, value = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (rotated(key), value))
        scores = np.einsum("qnh,knh->nqk", rotated(query), key) / np.sqrt(HEAD_DIM)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("nqk,knh->qnh", shares / shares.sum(-1, keepdims=True), value).reshape(length, -1)
        mlp = norm(x, f"{prefix}norm_2")
        gate, up = (mlp @ weights[f"{prefix}mlp.{name}_proj"].T for name in ("gate", "up"))
        branch = (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}mlp.down_proj"].T
        x = x + attended @ weights[f"{prefix}attention.o_proj"].T + branch
    return norm(x, "model.norm") @ weights["lm_head"].T


def test_the_module_on_its_own(checkpoint: Path) -> None:
    tokens = PROMPTS[0]
    logits = load_model(checkpoint)(np.array([tokens], np.int32))[0]
    np.testing.assert_allclose(logits, exact_logits(tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_planned_loaded_and_run(checkpoint: Path, size: int) -> None:
    settings: dict[str, Any] = SETTINGS | {"tensor_parallel_size": size}
    plan = plan_engine(EngineConfig(model=str(checkpoint), **settings))
    params = load_params(plan, plan.models[0])
    first = plan.models[0].mesh.devices.flat[0]
    held = sum(shard.data.nbytes for array in params for shard in array.addressable_shards if shard.device == first)
    assert plan.needs.weights == held
    with LLM(str(checkpoint), **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == exact_logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(1).tolist()


def test_its_layers_say_how_it_can_be_split(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="4 query heads, 2 key/value heads and intermediate_size 24 of ToyForCausalLM; valid sizes: 1, 2, 4",
    ):
        plan_engine(EngineConfig(model=str(checkpoint), **SETTINGS, tensor_parallel_size=3))


def test_its_layers_say_what_a_checkpoint_must_hold(checkpoint: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.attention.qkv_proj.weight"] = tensors.pop("model.layers.0.attention.qkv.weight")
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)missing: .*attention.qkv.weight.*unexpected: .*attention.qkv_proj"):
        load_model(checkpoint)
