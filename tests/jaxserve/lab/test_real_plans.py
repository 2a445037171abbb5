"""Real config.json files: each is planned by the engine, without weights, or refused by name with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import UnsupportedModelError
from jaxserve.device import memory
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.lab.plan.plan import plan as plan_mesh
from jaxserve.models.loading import read_model_config
from tests.published_models import PUBLISHED

PARAMETERS = {
    "baichuan-7b": 7.00e9,
    "gemma-2b-it": 2.51e9,
    "granite-3.1-1b-a400m-moe": 1.33e9,
    "llama-2-7b": 6.74e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.2-3b-one-tensor-per-shard": 3.21e9,
    "mistral-small-24b-dolphin3": 23.6e9,
    "mixtral-8x22b-wizardlm2": 140.6e9,
    "phi-3-mini": 3.82e9,
    "qwen2.5-14b-cogito": 14.8e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3.5-25b-a3b-moe": 25.0e9,
    "smollm3-3b": 3.08e9,
    "yi-1.5-6b": 6.06e9,
    "llama-2-13b-bnb-nf4": 13.02e9,
    "llama-3.1-8b-instruct-bnb-int8": 8.03e9,
    "qwen3-14b-mlx-4bit": 14.77e9,
}
"""Parameters as published, or as added up from the shapes in the model's card; tied heads count once."""
REFUSED = {
    "pythia-410m": "architecture GPTNeoXForSequenceClassification is not supported; supported: ",
}
QUICK = ("Gemma 3 4B", "Qwen2.5-VL-7B", "Ministral 3 3B", "ERNIE 4.5 0.3B", "Granite 4.0 Micro 3B")
LARGE = {"deepseek-r1": (671.0e9, 61), "kimi-k2": (1026.4e9, 61)}
"""Parameters without the layer for multi-token prediction, and layers with latents."""


@pytest.fixture(autouse=True)
def _vast_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory_bytes", lambda device: 1 << 43)


def plan(directory: Path, **settings: Any) -> EnginePlan:
    return plan_engine(EngineConfig(model=str(directory), dtype="bfloat16", max_model_len=2048, **settings))


def test_every_config_is_listed(shared_data: Path) -> None:
    folders = {path.parent.name for path in (shared_data / "configs").glob("*/config.json")}
    assert folders == {*PARAMETERS, *REFUSED, *LARGE}


@pytest.mark.parametrize("folder", PARAMETERS)
def test_supported_models_are_planned(folder: str, shared_data: Path) -> None:
    planned = plan(shared_data / "configs" / folder)
    assert planned.needs.weights / 2 == pytest.approx(PARAMETERS[folder], rel=0.01)
    assert planned.needs.state or planned.needs.page == planned.models[0].pool_bytes // planned.models[0].pool_pages


@pytest.mark.parametrize("folder", REFUSED)
def test_others_are_refused_with_the_reason(folder: str, shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[folder]):
        read_model_config(shared_data / "configs" / folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["deepseek-r1", "kimi-k2"])
def test_models_with_latents_are_planned(folder: str, shared_data: Path) -> None:
    """Split over 8 devices, each has an eighth of the experts' features and of the heads, and all latents."""
    planned = plan(shared_data / "configs" / folder, tensor_parallel_size=8)
    parameters, layers = LARGE[folder]
    assert planned.needs.weights / 2 == pytest.approx(parameters / 8, rel=0.03)
    assert planned.needs.page == layers * 576 * 2 * planned.models[0].page_size


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["deepseek-r1", "kimi-k2"])
def test_models_with_latents_are_planned_for_16_devices(folder: str, shared_data: Path) -> None:
    """On two hosts, which the machine need not have."""
    directory = str(shared_data / "configs" / folder)
    planned = plan_mesh(directory, "tensor=16", device="h200", hosts=2, max_model_len=2048, dtype="bfloat16")
    (stage,) = planned.stages
    assert stage.weights / 2 == pytest.approx(LARGE[folder][0] / 16, rel=0.06)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PUBLISHED]
)
def test_published_sizes_are_planned(name: str, tmp_path: Path) -> None:
    """Families of which no config.json is in the data."""
    published = PUBLISHED[name]
    raw = {**published.fields} if published.outer is None else {"text_config": published.fields, **published.outer}
    config = {"architectures": [published.architecture], "dtype": "bfloat16", "vision_config": {}, **raw}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path).needs.weights / 2e9 == pytest.approx(published.billions, rel=0.01)
