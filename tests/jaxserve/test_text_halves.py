"""The language models of multimodal checkpoints, against transformers: names, fields, and what is left out."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError
from jaxserve import LLM, ConfigError, SamplingParams, load_model
from jaxserve.lab.random_weights import write_random_checkpoint
from jaxserve.models.loading import read_model_config
from jaxserve.models.registry import config_from_hf

torch = pytest.importorskip("torch")

TEXT: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
MROPE = {"rope_parameters": {"type": "mrope", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}}
INTERLEAVED = {"type": "default", "mrope_interleaved": True}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}
SIGLIP = {name: value for name, value in PIXTRAL.items() if name not in ("model_type", "head_dim")}
INTERNVL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GLM_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    }
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 150,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone4.5": (
        "Exaone4_5_",
        {
            "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 5, "sliding_window_pattern": 2},
            "vision_config": QWEN_VISION | {"num_key_value_heads": 2, "out_hidden_size": 32},
        },
    ),
    "gemma3": (
        "Gemma3",
        {"text_config": TEXT | {"sliding_window": 5}, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4",
        {"text_config": TEXT | GEMMA4, "vision_config": None, "audio_config": None},
    ),
    "glm4v": (
        "Glm4v",
        {
            "text_config": TEXT | {"head_dim": 8} | GLM_ROPE,
            "vision_config": QWEN_VISION | {"out_hidden_size": 32},
        },
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        {
            "text_config": TEXT
            | GLM_ROPE
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "vision_config": QWEN_VISION | {"out_hidden_size": 32},
        },
    ),
    "internvl": (
        "InternVL",
        {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": INTERNVL, "tie_word_embeddings": False},
    ),
    "llava-next": ("LlavaNext", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP}),
    "qwen2-vl": (
        "Qwen2VL",
        {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": 32}},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"text_config": TEXT | MROPE, "vision_config": QWEN_VISION | {"out_hidden_size": 32}},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": TEXT | {"rope_parameters": MROPE["rope_parameters"] | INTERLEAVED},
            "vision_config": QWEN_VISION | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "text_config": TEXT | EXPERTS,
            "vision_config": QWEN_VISION | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        },
    ),
    "mistral3": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "vision_config": PIXTRAL},
    ),
    "mistral3-untied": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL, "tie_word_embeddings": False},
    ),
}
SLOW = ("exaone4.5", "glm4v", "glm4v-moe", "internvl")
"""Cases that differ from others in names alone."""
TOKENS = np.random.default_rng(3).integers(0, TEXT["vocab_size"], (1, 24))


def make(name: str, directory: Path) -> np.ndarray:
    """Save a random checkpoint as transformers does, and return its logits of TOKENS."""
    family, fields = CASES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(directory)
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS)).logits.numpy()


def rename(directory: Path, new_name: Callable[[str], str]) -> None:
    path = directory / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


def change_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def assert_logits(directory: Path, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(load_model(directory, "float32")(TOKENS)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_the_text_half_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    assert_logits(tmp_path, make(name, tmp_path))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", ""),
        ("language_model.model.", "language_model."),
        ("model.language_model.model.", ""),
        ("model.", ""),
    ],
)
def test_all_names_that_transformers_has_written(prefix: str, head: str, tmp_path: Path) -> None:
    expected = make("mistral3-untied", tmp_path)
    saved = "language_model.model."
    rename(
        tmp_path,
        lambda name: (
            prefix + name.removeprefix(saved)
            if name.startswith(saved)
            else f"{head}lm_head.weight"
            if name.endswith("lm_head.weight")
            else f"model.{name}"
        ),
    )
    assert_logits(tmp_path, expected)


def test_the_other_orientation_of_fused_experts(tmp_path: Path) -> None:
    """As the hub has them: [E, D, 2F] and [E, F, D]; transformers saves [E, 2F, D] and [E, D, F]."""
    expected = make("qwen3-vl-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    turned = {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    assert sum(".experts." in name for name in tensors) == 2
    save_file(turned, path)
    assert_logits(tmp_path, expected)
    down = "model.language_model.layers.0.mlp.experts.down_proj"
    save_file({**turned, down: turned[down][:, :-1].copy()}, path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj' has shape \[4, 32, 48\] and .*down_proj' \[4, 23, 32\]"):
        load_model(tmp_path, "float32")


def test_fields_beside_an_encoder_without_a_text_config(tmp_path: Path) -> None:
    """As Qwen2-VL was published."""
    expected = make("qwen2-vl", tmp_path)

    def flatten(raw: dict[str, Any]) -> None:
        inner = raw.pop("text_config")
        rope = inner.pop("rope_parameters")
        raw |= {**inner, "model_type": "qwen2_vl", "rope_theta": rope["rope_theta"]}
        raw["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}

    change_config(tmp_path, flatten)
    assert_logits(tmp_path, expected)


def test_fields_of_both_levels() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240},
        "vision_config": {"hidden_size": 1152},
    }
    config: Any = config_from_hf(raw, "config.json")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.eos_token_ids, config.dtype, config.tie_embeddings) == ((1, 106), "bfloat16", True)
    assert (config.architecture, config.multimodal) == ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    assert (config.sliding_windows[4], config.sliding_windows[5], config.local_rope.theta) == (4096, None, 10000.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config: expected an object with the fields of the language model, but it is m"),
        ({"text_config": 3}, "text_config: expected an object with the fields of the language model"),
        (
            {"text_config": {"model_type": "mamba"}},
            "text_config.model_type: expected one of mistral, ministral3, mistral4, got 'mamba'",
        ),
        ({"text_config": {"model_type": "mistral", "hidden_size": 0}}, "hidden_size: expected an integer from 1 to"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({"architectures": ["Mistral3ForConditionalGeneration"], **change}, "config.json")


def test_a_tensor_that_is_neither_text_nor_known_is_named(tmp_path: Path) -> None:
    make("mistral3", tmp_path)
    tower = "vision_tower.transformer.layers.0."
    renamed = "language_model.model.vision."
    rename(tmp_path, lambda name: name.replace(tower, renamed))
    with pytest.raises(CheckpointError, match=r"unexpected: language_model\.model\.vision\.attention"):
        load_model(tmp_path, "float32")


def test_an_engine_runs_the_text_half_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("qwen3-vl-moe", tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 48, "compilation_cache_dir": ""}
    params = SamplingParams(temperature=0.0, max_tokens=8)
    caplog.set_level(logging.INFO, logger="jaxserve")
    with LLM(str(tmp_path), tensor_parallel_size=2, **settings) as llm:
        (output,) = llm.generate(TOKENS[0].tolist(), params, use_tqdm=False)
    text = [*TOKENS[0].tolist(), *output.outputs[0].token_ids]
    logits = np.asarray(load_model(tmp_path, "float32")(np.array([text])))[0]
    assert text[TOKENS.size :] == logits[TOKENS.size - 1 : -1].argmax(1).tolist()
    assert "tensors of the checkpoint (0.00 GiB) are not the language model's and are not loaded: model.visual" in (
        caplog.text
    )


def test_overrides_and_random_weights_reach_the_text_half(tmp_path: Path) -> None:
    make("mistral3", tmp_path / "made")
    for overrides in ({"num_hidden_layers": 1}, {"text_config": {"num_hidden_layers": 1}}):
        assert read_model_config(tmp_path / "made", overrides).num_layers == 1
    write_random_checkpoint(tmp_path / "made", tmp_path / "random", {"num_hidden_layers": 1})
    assert np.isfinite(np.asarray(load_model(tmp_path / "random")(TOKENS))).all()
