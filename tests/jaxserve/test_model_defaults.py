"""Default sampling parameters: the model's file, another one, and what overrides them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.model_defaults import default_sampling_params, generation_defaults


@pytest.mark.parametrize(
    ("file", "override", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.9}),
        ({"temperature": 0.6}, {"top_k": 5, "min_p": 0.1}, {"temperature": 0.6, "top_k": 5, "min_p": 0.1}),
        ({"temperature": 0.6}, {"temperature": None}, {}),
        ({"temperature": 0.6}, {"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False}, {"do_sample": True}, {}),
        ({"do_sample": False}, {"repetition_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.5}),
        ({"max_new_tokens": 3}, {"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"top_p": 7}, {"top_p": 0.5}, {"top_p": 0.5}),
        ({"temperature": 0.6}, {}, {"temperature": 0.6}),
    ],
)
def test_what_overrides_wins(
    tmp_path: Path, file: dict[str, Any], override: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    config = EngineConfig(model="m", override_generation_config=override)
    assert default_sampling_params(config, tmp_path) == SamplingParams(**expected)
    other = EngineConfig(model="m", generation_config=str(tmp_path), override_generation_config=override)
    assert default_sampling_params(other, Path("/nowhere")) == SamplingParams(**expected)


def test_it_goes_with_the_defaults_of_vllm_too(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 3}')
    config = EngineConfig(model="m", generation_config="vllm", override_generation_config={"top_p": 0.5})
    assert default_sampling_params(config, tmp_path) == SamplingParams(top_p=0.5)
    assert generation_defaults(config, tmp_path) == {"top_p": 0.5}
