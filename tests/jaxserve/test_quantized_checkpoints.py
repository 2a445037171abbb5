"""Models from quantized checkpoints equal those from float checkpoints of the same values, on every cut."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, Index, convert, open_checkpoint
from checkpoints.file_reader import FileReader
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.tensor_info import whole_index
from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.models.loading import check_weights, load_weights, read_model_config
from tests.quantized_cases import CASES, Case
from tests.quantized_files import quantize, section, write_mxfp4
from tests.random_checkpoint import LLAMA, write_checkpoint
from tests.tiny_programs import make_program

DENSE: dict[str, Any] = {
    **LLAMA,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
QWEN = {**DENSE, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
FUSED = {**DENSE, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "num_hidden_layers": 1,
}
GPT_OSS = {
    **DENSE,
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT_OSS |= {"max_position_embeddings": 1024, "eos_token_id": [], "rope_theta": 150000.0}
GPT_OSS["rope_scaling"] = {
    **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "truncate": False},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}
OPENAI = {
    **{name: GPT_OSS[name] for name in ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size")},
    **{name: GPT_OSS[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window")},
    **{"num_experts": 4, "experts_per_token": 2, "swiglu_limit": 7.0, "initial_context_length": 64},
    **{"rope_theta": 150000, "rope_scaling_factor": 16.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32},
}
"""The same in OpenAI's own ``config.json``."""
ORIGINAL_MODULES = {
    "input_layernorm": "attn.norm.scale",
    "post_attention_layernorm": "mlp.norm.scale",
    "self_attn": "attn.{}",
    "self_attn.q_proj": "attn.qkv.{}",
    "self_attn.o_proj": "attn.out.{}",
    "mlp.router": "mlp.gate.{}",
}
ORIGINAL_EXPERTS = {
    f"{name}_proj_{kind}": f"mlp.{own}_{'' if kind == 'bias' else 'weight.'}{kind}"
    for name, own in (("gate_up", "mlp1"), ("down", "mlp2"))
    for kind in ("blocks", "scales", "bias")
}
MODELS = {"llama": DENSE, "qwen2, tied": QWEN, "phi-3": FUSED, "qwen3-moe": EXPERTS}
COMMON = ("gptq act-order", "fp8 blocks, ragged", "nf4 double")
"""Formats that are loaded with every model in the gate; the others with one."""


def is_linear(name: str) -> bool:
    """Whether tools quantize the tensor of this name: a projection, but not a router."""
    return "_proj" in name and name.endswith(".weight")


Tensors = dict[str, np.ndarray]


def write(
    folder: Path, model: dict[str, Any], case: Case, change: Callable[[Tensors], object] | None = None
) -> tuple[Path, Path]:
    """Write a quantized checkpoint of random values and the float one that it stands for; return their directories.

    ``change`` may change the stored tensors before they are written.
    """
    plain, quantized = folder / "plain", folder / "quantized"
    for directory in (plain, quantized):
        directory.mkdir()
    write_checkpoint(plain, model, seed=5)
    stored, floats = quantize(load_file(plain / "model.safetensors"), case.write, is_linear)
    save_file(floats, plain / "model.safetensors")
    if change is not None:
        change(stored)
    save_file(stored, quantized / "model.safetensors")
    (quantized / "config.json").write_text(json.dumps({**model, "quantization_config": case.section}))
    return plain, quantized


def loaded(directory: Path, tensor: int) -> Tensors:
    """The arrays of a model on this many devices."""
    model = make_program(read_model_config(directory), tensor=tensor).abstract_model
    check_weights(directory, model)
    return {name: np.asarray(array) for name, array in zip(model.params, load_weights(directory, model), strict=True)}


def check_equal(folder: Path, model: dict[str, Any], case: Case, tensor: int) -> None:
    plain, quantized = write(folder, model, case)
    expected, found = loaded(plain, tensor), loaded(quantized, tensor)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_each_format_loads_the_weights_that_it_stands_for(case: str, tmp_path: Path) -> None:
    """On two devices the rows of down_proj are cut inside a group."""
    check_equal(tmp_path, {**DENSE, "num_hidden_layers": 1}, CASES[case], 2)


@pytest.mark.parametrize("case", COMMON)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama"])
def test_each_kind_of_model_loads_quantized_weights(model: str, case: str, tmp_path: Path) -> None:
    check_equal(tmp_path, MODELS[model], CASES[case], 2)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_each_format_with_each_kind_of_model(model: str, case: str, tensor: int, tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 4} if tensor == 4 else {}
    check_equal(tmp_path, MODELS[model] | sizes, CASES[case], tensor)


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_an_engine_generates_what_the_float_model_does(settings: dict[str, int], tmp_path: Path) -> None:
    plain, quantized = write(tmp_path, DENSE, CASES["gptq act-order"])
    prompts, params = [[1, 2, 3], [9, 8, 7, 6, 5]], SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    common: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
    outputs = []
    for directory in (plain, quantized):
        with LLM(str(directory), warm_up=False, **common, **settings) as llm:
            outputs.append([output.outputs[0] for output in llm.generate(prompts, params)])
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("value", [0, 1])
def test_biases_of_zeros_that_the_model_has_not(value: int, tmp_path: Path) -> None:
    """AutoGPTQ gives every layer a bias; a model without biases may have one only if it adds nothing."""

    def add_bias(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.down_proj.bias"] = np.full(64, value, np.float16)

    _, quantized = write(tmp_path, DENSE, CASES["gptq 4 bits"], add_bias)
    if not value:
        model = make_program(read_model_config(quantized)).abstract_model
        check_weights(quantized, model)
        load_weights(quantized, model)
        return
    with pytest.raises(CheckpointError, match="1 unexpected\n  unexpected: model.layers.1.mlp.down_proj.bias"):
        loaded(quantized, 1)


@pytest.mark.parametrize(
    ("stored", "wanted", "message"),
    [
        ("awq", "awq", None),
        ("awq", "awq_marlin", None),
        ("awq", "None", None),
        ("awq", "gptq", "quantization='gptq': the weights in .* are quantized with awq"),
        (None, "fp8", None),
        (None, "awq", "quantization='awq': the weights in .* are not quantized; expected a way to quantize them while"),
    ],
)
def test_the_setting_names_what_the_checkpoint_has(
    stored: str | None, wanted: str, message: str | None, tmp_path: Path
) -> None:
    plain, quantized = write(tmp_path, DENSE, CASES["awq"])
    directory = plain if stored is None else quantized
    if message is None:
        assert read_model_config(directory, None, wanted) == read_model_config(directory)
        return
    with pytest.raises(ConfigError, match=message):
        read_model_config(directory, None, wanted)


def test_what_is_decoded_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, quantized = write(tmp_path, DENSE, CASES["fp8 blocks, ragged"])
    with caplog.at_level(logging.INFO):
        loaded(quantized, 1)
    assert "14 weights quantized with FP8 (0.00 GiB) are decoded when they are loaded; activations" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_conversion_writes_the_floats(format: str, dtype: str, tmp_path: Path) -> None:
    plain, quantized = write(tmp_path, DENSE, CASES["awq"])
    convert(quantized, tmp_path / "converted", format, dtype)
    convert(plain, tmp_path / "expected", format, dtype)
    with open_checkpoint(tmp_path / "converted") as found, open_checkpoint(tmp_path / "expected") as expected:
        assert found.tensors == expected.tensors
        for name, info in expected.tensors.items():
            box = whole_index(info.shape)
            np.testing.assert_array_equal(found.read(name, box), expected.read(name, box))


MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MODULE}.scales"), r"down_proj.scales' is missing, which weights in the format GPTQ need"),
        (lambda t: t.pop(f"{MODULE}.qzeros"), r"down_proj.qzeros' is missing, which weights in the format GPTQ need"),
        (
            lambda t: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"][:-1]}),
            r"down_proj.scales' \(GPTQ\) has shape \[5, 64\], expected \[6, 64\]: 96 inputs in groups of 16",
        ),
        (
            lambda t: t.update({f"{MODULE}.g_idx": t[f"{MODULE}.g_idx"] + 1}),
            r"down_proj.g_idx' \(GPTQ\) has groups from 1 to 6, expected 0 to 5",
        ),
        (
            lambda t: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"].astype(np.int16)}),
            r"down_proj.scales' \(GPTQ\) is stored as int16, expected float16 or float32",
        ),
        (
            lambda t: t.update({f"{MODULE}.scales": np.full_like(t[f"{MODULE}.scales"], np.nan)}),
            r"down_proj.weight' has scales that are not finite",
        ),
    ],
)
def test_damaged_checkpoints(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    _, directory = write(tmp_path, DENSE, CASES["gptq act-order"], change)
    with pytest.raises(CheckpointError, match=message):
        loaded(directory, 1)


def without(*ends: str) -> Callable[[Tensors], object]:
    """Take tensors of one module away."""
    return lambda tensors: [tensors.pop(f"{MODULE}.{end}") for end in ends]


def filled(end: str, value: float) -> Callable[[Tensors], object]:
    """Fill a tensor of one module with a value."""

    def fill(tensors: Tensors) -> None:
        array = tensors[f"{MODULE}.{end}"]
        tensors[f"{MODULE}.{end}"] = np.full_like(array, value)

    return fill


def cut(end: str) -> Callable[[Tensors], object]:
    """Take the last row of a tensor of one module away."""

    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{end}"] = tensors[f"{MODULE}.{end}"][:-1]

    return change


ORDERED = Case(
    CASES["compressed-tensors 4 bits"].write,
    section(
        "compressed-tensors",
        config_groups={"group_0": {"weights": {"num_bits": 4, "group_size": 32, "actorder": "group"}}},
    ),
)
DAMAGED: dict[str, tuple[Case, Callable[[Tensors], object], str]] = {
    "order of GPTQ": (CASES["gptq act-order"], without("g_idx"), "g_idx' is missing, which .* GPTQ need"),
    "order of compressed-tensors": (ORDERED, without(), "weight_g_idx' is missing, which .* compressed-tensors need"),
    "group of AWQ": (
        CASES["awq"],
        cut("scales"),
        r"scales' \(AWQ\) has shape \[5, 64\], expected \[6, 64\]: 96 inputs in",
    ),
    "zeros of AWQ": (CASES["awq"], without("qzeros"), "qzeros' is missing, which weights in the format AWQ need"),
    "zeros of compressed-tensors": (
        CASES["compressed-tensors 4 bits with zeros"],
        without("weight_zero_point"),
        "weight_zero_point' is missing, which weights in the format compressed-tensors need",
    ),
    "global scale": (
        CASES["compressed-tensors nvfp4"],
        without("weight_global_scale"),
        "weight_global_scale' is missing, which weights in the format compressed-tensors need",
    ),
    "global scale of ModelOpt": (
        CASES["modelopt nvfp4"],
        without("weight_scale_2"),
        "weight_scale_2' is missing, which weights in the format ModelOpt need",
    ),
    "global scale of 0": (CASES["compressed-tensors nvfp4"], filled("weight_global_scale", 0), "is 0.0, expected a"),
    "nested scales": (
        CASES["nf4 double"],
        without("weight.nested_absmax"),
        "weight.nested_absmax' is missing, which weights in the format bitsandbytes need",
    ),
    "table": (CASES["nf4"], filled("weight.quant_map", np.nan), r"quant_map' \(bitsandbytes\) has values that are not"),
    "infinite scales": (CASES["awq"], filled("scales", np.inf), "down_proj.weight' has scales that are not finite"),
    "infinite biases": (CASES["mlx 4 bits"], filled("biases", np.inf), "down_proj.weight' has scales that are not"),
    "NaN exponents": (CASES["compressed-tensors mxfp4"], filled("weight_scale", 255), "scale' has scales that are not"),
    "infinite numbers": (CASES["fp8 e5m2"], filled("weight", np.inf), r"weight' \(FP8\) contains NaN or infinity"),
    "blocks": (
        CASES["fp8 blocks, ragged"],
        cut("weight_scale_inv"),
        r"weight_scale_inv' \(FP8\) has shape \[3, 6\]: groups of 16 × 16 of \[64, 96\] need \[4, 6\]",
    ),
    "rows": (
        CASES["mlx 4 bits"],
        cut("scales"),
        r"scales' \(MLX\) has shape \[63, 3\], expected \[64, 3\]: 96 columns in",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_missing_or_not_a_number(damage: str, tmp_path: Path) -> None:
    case, change, message = DAMAGED[damage]
    stored = {name: array for name, array in written_module(case).items()}
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": case.section}))
    with pytest.raises(CheckpointError, match=message), open_checkpoint(tmp_path) as reader:
        reader.read(f"{MODULE}.weight", whole_index(reader.tensors[f"{MODULE}.weight"].shape))


def written_module(case: Case) -> Tensors:
    """Return the tensors of one quantized module."""
    stored, _ = quantize({f"{MODULE}.weight": np.zeros((64, 96), np.float32)}, case.write, is_linear)
    return {"model.embed_tokens.weight": np.ones((4, 4), np.float32), **stored}


def test_the_order_of_groups_is_read_once_and_checked_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = write(tmp_path, DENSE, CASES["gptq act-order"])
    names: list[str] = []
    original = FileReader.read

    def read(self: FileReader, name: str, index: Index) -> np.ndarray:
        names.append(name)
        return original(self, name, index)

    monkeypatch.setattr(FileReader, "read", read)
    with open_checkpoint(directory) as reader:
        assert isinstance(reader, QuantizedReader) and not names
        reader.check()
        assert len(names) == 14 and all(name.endswith("g_idx") for name in names)
        reader.read(f"{MODULE}.weight", whole_index((64, 96)))
        assert not any(name.endswith("g_idx") for name in names[14:])


def test_nan_in_float8(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.weight"][3, 4] = np.nan

    _, directory = write(tmp_path, DENSE, CASES["fp8 blocks, ragged"], change)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' \(FP8\) contains NaN"):
        loaded(directory, 1)


def write_gpt_oss(folder: Path) -> tuple[Path, Path, Tensors]:
    """Write a model with experts in MXFP4 and the float one that it stands for; return their directories and the
    stored tensors."""
    model = GPT_OSS
    plain, quantized = folder / "plain", folder / "quantized"
    for directory in (plain, quantized):
        directory.mkdir()
    write_checkpoint(plain, model, seed=5)
    tensors = load_file(plain / "model.safetensors")
    rng = np.random.default_rng(0)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors[name].shape
        parts = [write_mxfp4(rng, (num_outputs, num_inputs)) for _ in range(num_experts)]
        tensors[name] = np.stack([np.ascontiguousarray(part.weight.T) for part in parts])
        del stored[name]
        blocks = np.stack([part.stored["weight_packed"] for part in parts])
        stored[f"{name}_blocks"] = blocks.reshape(num_experts, num_outputs, -1, 16)
        stored[f"{name}_scales"] = np.stack([part.stored["weight_scale"] for part in parts])
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    (quantized / "config.json").write_text(json.dumps({**model, "quantization_config": {"quant_method": "mxfp4"}}))
    return plain, quantized, stored


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Blocks of the transposed matrices of all experts, gate and up interleaved by row."""
    plain, quantized, stored = write_gpt_oss(tmp_path)
    original = tmp_path / "original"
    original.mkdir()
    save_file(original_names(stored), original / "model.safetensors")
    (original / "config.json").write_text(json.dumps(OPENAI))
    assert read_model_config(original) == dataclasses.replace(
        read_model_config(quantized), dtype="bfloat16", has_default_eos=False
    )
    for tensor in (1, 2):
        expected = loaded(plain, tensor)
        for directory in (quantized, original):
            found = loaded(directory, tensor)
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array.astype(found[name].dtype), err_msg=name)


def original_names(tensors: Tensors) -> Tensors:
    """Return a GPT-OSS checkpoint in OpenAI's names, with queries, keys and values in one matrix."""
    outside = {"embed_tokens": "embedding.weight", "norm": "norm.scale", "lm_head": "unembedding.weight"}
    found: Tensors = {}
    for name, array in tensors.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            found[outside[name.removeprefix("model.").removesuffix(".weight")]] = array
        elif not re.search(r"\.[kv]_proj\.", name):
            module, _, kind = layer[2].rpartition(".")
            parts = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"] if "q_proj" in name else [array]
            end = ORIGINAL_MODULES[module].format(kind) if module in ORIGINAL_MODULES else ORIGINAL_EXPERTS[kind]
            found[f"block.{layer[1]}.{end}"] = np.concatenate(parts)
    return found


def test_experts_that_mlx_stores_in_one_tensor(tmp_path: Path) -> None:
    def stack(tensors: Tensors) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            for suffix in ("weight", "scales", "biases"):
                names = [f"model.layers.0.mlp.experts.{index}.{part}.{suffix}" for index in range(4)]
                tensors[f"model.layers.0.mlp.switch_mlp.{part}.{suffix}"] = np.stack([tensors.pop(n) for n in names])

    plain, quantized = write(tmp_path, EXPERTS, CASES["mlx 4 bits"], stack)
    expected, found = loaded(plain, 2), loaded(quantized, 2)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
