"""Default sampling parameters: the model's file, another one, and what overrides them."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import EnginePlan
from jaxserve.engine.model_defaults import default_sampling_params, eos_token_ids, generation_defaults
from jaxserve.models.registry import FAMILIES, config_from_hf
from jaxserve.text.tokenizer import Tokenizer
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint_with_tokenizer
from tests.recurrent_fields import with_recurrent_fields

GPT2: dict[str, Any] = {"n_embd": 4096, "n_head": 4, "n_layer": 2, "n_positions": 64}


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


EOS_LLAMA = {**LLAMA, "vocab_size": 512}
"""Without ``eos_token_id`` its class has 2."""
ENDS = {
    "generation_config, then no other": ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, None, (5, 6)),
    "the config where that has none": ({"temperature": 0.5}, {"eos_token_id": 7}, None, (7,)),
    "the config where that has null": ({"eos_token_id": None}, {"eos_token_id": [7, 8]}, None, (7, 8)),
    "one id": ({"eos_token_id": 5}, {}, None, (5,)),
    "the config alone": (None, {"eos_token_id": 7}, None, (7,)),
    "the class where no file says one": (None, {}, None, (2,)),
    "not the class beside the tokenizer": (None, {}, 9, (9,)),
    "not the class beside generation_config": ({"eos_token_id": 5}, {}, 9, (5, 9)),
    "null is no token": (None, {"eos_token_id": None}, None, ()),
    "the same twice": ({"eos_token_id": [9, 5]}, {}, 9, (9, 5)),
    "zero is a token": ({"eos_token_id": 0}, {}, None, (0,)),
    "beyond the vocabulary": ({"eos_token_id": [5, 512]}, {}, 600, (5,)),
}


def ends(directory: Path, file: dict[str, Any] | None, fields: dict[str, Any], own: int | None) -> tuple[int, ...]:
    """The end tokens of a model whose tokenizer has ``own``."""
    if file is not None:
        (directory / "generation_config.json").write_text(json.dumps(file))
    raw = {name: value for name, value in EOS_LLAMA.items() if name != "eos_token_id"} | fields
    plan = Mock(spec=EnginePlan)
    plan.config, plan.directory = config_from_hf(raw, "config.json"), directory
    tokenizer = None if own is None else Mock(spec=Tokenizer, eos_token_id=own)
    return eos_token_ids(EngineConfig(model="m"), plan, tokenizer)


@pytest.mark.parametrize("name", ENDS)
def test_end_tokens_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    file, fields, own, expected = ENDS[name]
    assert ends(tmp_path, file, fields, own) == expected


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    write_checkpoint_with_tokenizer(tmp_path, LLAMA, 0)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"the tokenizer has \d+ tokens, but the model has only 51 \(vocab_size in con"
    ):
        LLM(str(tmp_path))


def test_end_tokens_beyond_the_vocabulary_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends(tmp_path, {"eos_token_id": [5, 512]}, {}, None)
    assert "end-of-sequence tokens [512] are outside the vocabulary of 512 tokens" in caplog.text


@pytest.mark.parametrize("value", ["</s>", [2, "3"], True, -1, 2.0])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"generation_config.json cannot be used:\n  eos_token_id: expected a token id"
    ):
        ends(tmp_path, {"eos_token_id": value}, {}, None)


def test_another_generation_config_has_its_own_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    plan = Mock(spec=EnginePlan)
    plan.config, plan.directory = config_from_hf(EOS_LLAMA, "config.json"), Path("/nowhere")
    assert eos_token_ids(EngineConfig(model="m", generation_config=str(tmp_path)), plan, None) == (11,)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_family_says_whether_its_end_token_is_a_default(architecture: str) -> None:
    raw = {**GPT2, **DEEPSEEK, "architectures": [architecture], "hidden_size": 4096, "num_attention_heads": 4}
    raw["num_local_experts"] = raw["num_experts"] = 4
    raw = with_recurrent_fields(raw)
    assert not config_from_hf({**raw, "eos_token_id": None}, "config.json").has_default_eos
    del raw["eos_token_id"]
    assert config_from_hf(raw, "config.json").has_default_eos
