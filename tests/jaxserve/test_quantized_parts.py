"""The keys of ``quantization_config`` that say which float weights are quantized while they are loaded, and how."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import check_quantization
from jaxserve.device.build import load_params
from jaxserve.device.weight_choice import find_forms
from jaxserve.layers.weight_forms import WeightForms
from jaxserve.models.loading import read_model_config
from tests.jaxserve.reshard.test_reshard import make_plan
from tests.jaxserve.test_quantized_checkpoints import DENSE, EXPERTS, QWEN, write
from tests.jaxserve.test_stored_weights import COMMON, check_same, generated
from tests.quantized_cases import CASES
from tests.random_checkpoint import write_checkpoint

LAYER = "model.layers.0"


def forms_of(directory: Path, **settings: Any) -> WeightForms:
    return find_forms(EngineConfig(model=str(directory), **settings), read_model_config(directory), directory)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_quantized_where_its_key_says_so(tied: bool, tmp_path: Path) -> None:
    """Logits are those of a head that was rounded before; an embedding that is the head is rounded with it."""
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    for folder in (plain, rounded):
        folder.mkdir()
        write_checkpoint(folder, {**(QWEN if tied else DENSE), "num_hidden_layers": 1}, seed=5)
    weights = load_file(rounded / "model.safetensors")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    scales = np.abs(weights[name]).max(axis=1, keepdims=True) / 127
    weights[name] = np.rint(weights[name] / scales).clip(-127, 127) * scales
    save_file(weights, rounded / "model.safetensors")
    outputs = []
    for folder, config in ((rounded, {}), (plain, {"head": "int8_per_channel_weight_only"})):
        with LLM(str(folder), warm_up=False, quantization_config=config, tensor_parallel_size=2, **COMMON) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


def test_parts_targets_and_names_that_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**EXPERTS, "num_hidden_layers": 2}, seed=5)
    both = forms_of(tmp_path, quantization="int8").methods
    assert set(both.values()) == {"int8_w8a8"} and not any("head" in name or "gate.weight" in name for name in both)
    experts = {name for name in both if ".experts." in name}
    config = {"linear": None, "moe": "int4_group", "head": "int8"}
    found = forms_of(tmp_path, quantization="int8", quantization_config=config).methods
    assert found == dict.fromkeys(experts, "int4_group") | {"lm_head.weight": "int8_w8a8"}
    config = {"linear": "fp8", "moe": None, "ignore": ["re:model.layers.1.", f"{LAYER}.self_attn.o_proj"]}
    found = forms_of(tmp_path, quantization_config=config).methods
    projections = {f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"}
    assert found == dict.fromkeys(projections, "fp8_per_tensor")
    targets = {"re:.*o_proj": "fp8_per_block", "model.embed_tokens": "int8_per_channel_weight_only"}
    found = forms_of(tmp_path, quantization_config={"targets": targets}).methods
    assert found == {f"model.layers.{layer}.self_attn.o_proj.weight": "fp8_per_block" for layer in range(2)} | {
        "model.embed_tokens.weight": "int8_per_channel_weight_only"
    }


def test_different_ways_in_one_model_run(tmp_path: Path) -> None:
    """Its plan counts the smaller weights, and answers are the same on two devices."""
    write_checkpoint(tmp_path, {**DENSE, "num_hidden_layers": 2}, seed=5)
    config = {"targets": {"re:model.layers.1.": "int4_group"}, "ignore": ["re:.*layers.0.mlp"], "head": "fp8"}
    settings = {"quantization": "int8_per_channel_weight_only", "quantization_config": config}
    sizes = [make_plan(tmp_path, **each).needs.weights for each in ({}, {"quantization": "int4_group"}, settings)]
    assert sizes[1] < sizes[2] < sizes[0]
    outputs = []
    for devices in (1, 2):
        with LLM(str(tmp_path), warm_up=False, tensor_parallel_size=devices, **COMMON, **settings) as llm:
            outputs.append(generated(llm))
    check_same(outputs[1], outputs[0])


def test_random_weights_are_quantized_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**DENSE, "num_hidden_layers": 1}, seed=5)
    plans = [make_plan(tmp_path, load_format="dummy", quantization=method) for method in (None, "int8")]
    assert plans[1].needs.weights < plans[0].needs.weights
    arrays = load_params(plans[1], plans[1].models[0])
    assert sum(array.nbytes for array in arrays) == plans[1].needs.weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heads": "int8"}, "unknown key 'heads'; did you mean 'head'"),
        ({"head": "int7"}, r"quantization_config.head: expected one of fp8, int8, .*, or null for floats, got 'int7'"),
        ({"linear": 8}, "quantization_config.linear: expected one of .* got 8"),
        ({"targets": ["x"]}, "quantization_config.targets: expected an object of names of modules"),
        ({"targets": {"x": "y"}}, r"quantization_config.targets\['x'\]: expected one of"),
        ({"ignore": "x"}, "quantization_config.ignore: expected a list of modules"),
        ({"ignore": ["re:("]}, r"quantization_config.ignore: 're:\(' is not a regular expression"),
        ({"ignore": [""]}, "quantization_config.ignore: expected names of modules"),
    ],
)
def test_values_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_quantization(config)


def test_settings_that_contradict_the_checkpoint(tmp_path: Path) -> None:
    plain, quantized = write(tmp_path, DENSE, CASES["awq"])
    with pytest.raises(ConfigError, match="are quantized already; leave out head, ignore"):
        forms_of(quantized, quantization_config={"head": "int8", "ignore": ["x"]})
    with pytest.raises(ConfigError, match="quantization_config.ignore: nothing is quantized; name a method too"):
        forms_of(plain, quantization_config={"ignore": ["lm_head"]})
    with pytest.raises(ConfigError, match="quantization_config.targets: 'q_proj' is no matrix that can be quantized"):
        forms_of(plain, quantization_config={"targets": {"q_proj": "int8"}})
    with pytest.raises(ConfigError, match="q_proj and .*k_proj are computed by one matmul, .* int8_w8a8 .* floats"):
        forms_of(plain, quantization="int8", quantization_config={"ignore": [f"{LAYER}.self_attn.k_proj"]})
    with pytest.raises(ConfigError, match="leave one of both out"):
        forms_of(plain, quantization_config={"head": "int8", "weights": "decoded"})
