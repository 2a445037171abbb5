"""Models of GGUF files: their configuration, and the tokens that they generate."""

import dataclasses
import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import open_checkpoint
from checkpoints.quantized.gguf_architectures import ARCHITECTURES
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.tensor_info import whole_index
from jaxserve import LLM, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, UnsupportedModelError
from jaxserve.cli import main
from jaxserve.engine.model_defaults import find_tokenizer
from jaxserve.lab.plan.plan import read_model
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.models.loading import read_model_config
from jaxserve.text.gguf_tokenizer import load_model_tokenizer
from tests.checkpoints.quantized.test_gguf_blocks import decode as decoded
from tests.gguf_files import plain, write_gguf
from tests.gguf_models import llama_name, metadata_of, random_store, store_q8_0, to_gguf
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "compilation_cache_dir": "",
    "warm_up": False,
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
BASE: dict[str, Any] = {**LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 20000.0, "bos_token_id": None}
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GGUF_EXPERTS: dict[str, Any] = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 12}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GGUF_GRANITE: dict[str, Any] = {
    "attention.scale": 0.25,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
}
HALF_DIM = BASE["head_dim"] // 2
FACTORS = [1.0 + index for index in range(HALF_DIM)]
LAYER_NORMS: dict[str, Any] = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
LATENTS: dict[str, Any] = {**DEEPSEEK, "rms_norm_eps": 1e-5, "rope_theta": 20000.0, "bos_token_id": None}
GGUF_LATENTS: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 12,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 8,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 8,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GGUF_YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "baichuan": ({"architectures": ["BaiChuanForCausalLM"], "num_key_value_heads": 4, "head_dim": 4}, {}, "baichuan"),
    "deepseek v3": (
        {**LATENTS, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "num_nextn_predict_layers": 0},
        {
            **GGUF_LATENTS,
            **GGUF_YARN,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        "deepseek2",
    ),
    "deepseek v2, lite": (
        {
            **LATENTS,
            "architectures": ["DeepseekV2ForCausalLM"],
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 16.0,
        },
        {**GGUF_LATENTS, "attention.q_lora_rank": None, "expert_weights_scale": 16.0},
        "deepseek2",
    ),
    "gemma": ({"architectures": ["GemmaForCausalLM"]}, {}, "gemma"),
    "gemma2": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "query_pre_attn_scalar": BASE["head_dim"],
            "sliding_window": 16,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        {"attention.sliding_window": 16, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
        "gemma2",
    ),
    "gemma3": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "query_pre_attn_scalar": BASE["head_dim"],
            "sliding_window": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        "gemma3",
    ),
    "gpt-oss": (
        {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_scaling": {**YARN, "truncate": False},
        },
        {**GGUF_YARN, "attention.sliding_window": 16, **GGUF_EXPERTS, "expert_feed_forward_length": 24},
        "gpt-oss",
    ),
    "gpt2": ({"architectures": ["GPT2LMHeadModel"], "n_inner": 24}, LAYER_NORMS, "gpt2"),
    "gptneox": (
        {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "num_key_value_heads": 4, "head_dim": 4},
        {**LAYER_NORMS, "rope.dimension_count": 2, "use_parallel_residual": True},
        "gptneox",
    ),
    "granite": ({"architectures": ["GraniteForCausalLM"], **GRANITE}, GGUF_GRANITE, "granite"),
    "granitemoe": (
        {"architectures": ["GraniteMoeForCausalLM"], **GRANITE, "num_local_experts": 3, "num_experts_per_tok": 2},
        {**GGUF_GRANITE, "expert_count": 3, "expert_used_count": 2},
        "granitemoe",
    ),
    "granitemoe with a shared expert": (
        {
            "architectures": ["GraniteMoeSharedForCausalLM"],
            **GRANITE,
            **{"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        },
        {**GGUF_GRANITE, "expert_count": 3, "expert_used_count": 2, "expert_shared_feed_forward_length": 40},
        "granitemoe",
    ),
    "llama": ({"architectures": ["LlamaForCausalLM"]}, {}, "llama"),
    "llama with biases": ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, {}, "llama"),
    "mixtral": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2},
        {"expert_count": 3, "expert_used_count": 2},
        "llama",
    ),
    "olmo2": ({"architectures": ["Olmo2ForCausalLM"]}, {}, "olmo2"),
    "phi3": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "sliding_window": 16,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": FACTORS,
                "long_factor": [2 * each for each in FACTORS],
                "attention_factor": 1.25,
            },
        },
        {
            "attention.sliding_window": 16,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.25,
        },
        "phi3",
    ),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"]}, {}, "qwen2"),
    "qwen2 with yarn": (
        {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
        GGUF_YARN,
        "qwen2",
    ),
    "qwen2moe": (
        {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "shared_expert_intermediate_size": 20},
        {**GGUF_EXPERTS, "expert_shared_feed_forward_length": 20},
        "qwen2moe",
    ),
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"]}, {}, "qwen3"),
    "qwen3moe": (
        {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "norm_topk_prob": True},
        GGUF_EXPERTS,
        "qwen3moe",
    ),
    "smollm3": ({"architectures": ["SmolLM3ForCausalLM"]}, {}, "smollm3"),
}


def comparable(config: ModelConfig) -> ModelConfig:
    """Return a configuration without what only one of the two forms says."""
    return dataclasses.replace(config, has_default_eos=False)


def rope_of(path: Path) -> RopeConfig:
    """Return the rotary embedding of a model."""
    rope = read_model_config(path).rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_values_and_configuration_of_each_family(family: str, is_tied: bool, tmp_path: Path) -> None:
    """Names come from the package ``gguf``, configurations from what transformers would read."""
    gguf = pytest.importorskip("gguf", reason="the package gguf, the reference, is not installed")
    changes, fields, architecture = FAMILIES[family]
    config = {**BASE, **changes, "tie_word_embeddings": is_tied}
    write_checkpoint(tmp_path, config, seed=1)
    originals = load_file(tmp_path / "model.safetensors")
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])

    def name_of(module: str) -> str:
        found = "output" if module == "lm_head" else names.get_name(module)  # some are always tied
        assert found is not None, module
        return found

    tensors, values = to_gguf(architecture, config, originals, name_of=name_of)
    if family == "phi3":
        tensors["rope_factors_short.weight"] = plain(np.array(FACTORS, np.float32))
        tensors["rope_factors_long.weight"] = plain(2 * np.array(FACTORS, np.float32))
    folder = tmp_path / "gguf"
    folder.mkdir()
    path = write_gguf(folder / "m.gguf", metadata_of(architecture, config, **fields), tensors)
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[kind]}
    layer = re.compile(r"blk\.\d+")
    assert {layer.sub("blk.{bid}", name.rpartition(".")[0]) for name in tensors} <= known | {"output"}
    assert comparable(read_model_config(path)) == comparable(read_model_config(tmp_path))
    with open_checkpoint(path) as reader:
        assert set(reader.tensors) == set(originals)
        for name, array in originals.items():
            expected = array if "norm" not in name else values[name]
            np.testing.assert_array_equal(reader.read(name, whole_index(array.shape)), expected)


def test_every_architecture_has_a_case() -> None:
    assert {architecture for _, _, architecture in FAMILIES.values()} == set(ARCHITECTURES)


def test_llama_3_1_has_factors_of_frequencies(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, BASE, seed=1)
    tensors, _ = to_gguf("llama", BASE, load_file(tmp_path / "model.safetensors"))
    tensors["rope_freqs.weight"] = plain(np.array(FACTORS, np.float32))
    folder = tmp_path / "gguf"
    folder.mkdir()
    rope = rope_of(write_gguf(folder / "m.gguf", metadata_of("llama", BASE), tensors))
    assert (rope.kind, rope.short_factor, rope.attention_factor) == ("longrope", tuple(FACTORS), 1.0)
    assert rope.original_max_positions == rope.max_positions == BASE["max_position_embeddings"]


def test_a_configuration_beside_it_takes_precedence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_checkpoint(source, BASE, seed=1)
    tensors, _ = to_gguf("llama", BASE, load_file(source / "model.safetensors"))
    path = write_gguf(tmp_path / "m.gguf", metadata_of("llama", BASE), tensors)
    assert rope_of(path).theta == 20000.0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert rope_of(path).theta == 20000.0
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_theta": 500.0}))
    with caplog.at_level(logging.INFO):
        assert rope_of(path).theta == 500.0
    assert f"the model is as {tmp_path / 'config.json'} describes it" in caplog.text


def test_plans_and_checks_of_the_method(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", metadata_of("llama", BASE), {"token_embd.weight": plain(np.zeros((51, 16), np.float32))}
    )
    assert read_model(EngineConfig(model=str(tmp_path))) == read_model_config(path, quantization="gguf")
    assert find_tokenizer(EngineConfig(model=str(path)), path) is None
    with pytest.raises(ConfigError, match="quantization='awq': the weights in .* are quantized with gguf"):
        read_model_config(path, quantization="awq")


def test_another_tokenizer_takes_precedence(
    stories_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((stories_model / "config.json").read_text())
    path = write_gguf(tmp_path / "m.gguf", stories_metadata(stories_model, config), {})
    own = find_tokenizer(EngineConfig(model=str(path)), path)
    assert own is not None and "default" in own.chat_templates and not caplog.text
    with caplog.at_level(logging.INFO):
        other = find_tokenizer(EngineConfig(model=str(path), tokenizer=str(stories_model)), path)
    assert other is not None and "default" not in other.chat_templates
    assert f"the tokenizer is that of {stories_model}, not that of the file" in caplog.text


BAD = {
    "architecture": ({"general.architecture": "mamba2"}, "'mamba2' is not supported; supported: baichuan, .*; if"),
    "missing": ({"llama.block_count": None}, "'llama.block_count': expected an integer, but it is missing"),
    "scaling": ({"llama.rope.scaling.type": "spiral"}, "'spiral' is not supported; supported: none, linear, yarn"),
    "layers": ({"llama.feed_forward_length": np.array([3, 4], np.uint32)}, "expected the same integer for all layers"),
    "window of Olmo 3": (
        {"llama.attention.sliding_window": 4096},
        "sliding_window': 4096 is not supported; expected 0",
    ),
    "value": ({"llama.context_length": 0}, "max_position_embeddings: expected an integer from 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_named(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    fields = {name: value for name, value in {**metadata_of("llama", BASE), **changes}.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", fields, {"token_embd.weight": plain(np.zeros((4, 16), np.float32))})
    with pytest.raises(UnsupportedModelError if case == "architecture" else ConfigError, match=message):
        read_model_config(path)


def stories_metadata(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of the stories model, with its sentencepiece vocabulary."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    size = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(size)
    ]
    return {
        **metadata_of("llama", config),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": np.array([processor.get_score(i) for i in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


def generate(model: Path, prompts: list[Any], **settings: Any) -> list[list[int]]:
    """Return greedy tokens."""
    with LLM(str(model), **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_trained_model_in_three_files_tells_the_same_story(stories_model: Path, tmp_path: Path) -> None:
    config = json.loads((stories_model / "config.json").read_text())
    tensors, _ = to_gguf("llama", config, load_file(stories_model / "model.safetensors"))
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "m.gguf", stories_metadata(stories_model, config), tensors, parts=3)
    case = json.loads((stories_model / "expected.json").read_text())["cases"][0]
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.generate([""], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        assert output.prompt_token_ids == case["prompt_ids"]
        assert list(output.outputs[0].token_ids) == case["greedy_ids"][:40]
        chat = llm.chat(
            [{"role": "user", "content": "Once"}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
        assert chat[0].prompt_token_ids == llm.get_tokenizer().encode("Once")


PROMPTS = [{"prompt_token_ids": [3, 17, 40, 8, 25]}, {"prompt_token_ids": [9, 9, 31]}]


def kinds(**names: str) -> dict[str, tuple[str, int, int, int]]:
    """Return types of blocks by the end of a module's name; that of ``others`` for the rest."""
    found = {end: (name, NUMBERS[name], *TYPES[NUMBERS[name]][1:3]) for end, name in names.items()}
    return {**{end: kind for end, kind in found.items() if end != "others"}, "": found["others"]}


WIDE = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 8}
MIXES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, tuple[str, int, int, int]]]] = {
    "llama Q4_K_M": (
        "llama",
        {"architectures": ["LlamaForCausalLM"]},
        {},
        kinds(v_proj="Q6_K", down_proj="Q6_K", embed_tokens="Q4_K", lm_head="Q6_K", others="Q4_K"),
    ),
    "llama, tied, small blocks": (
        "llama",
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
        {},
        kinds(v_proj="Q5_0", down_proj="Q8_0", q_proj="Q5_1", k_proj="IQ4_NL", others="Q4_1"),
    ),
    "qwen2 IQ": (
        "qwen2",
        {"architectures": ["Qwen2ForCausalLM"]},
        {},
        kinds(v_proj="IQ4_XS", down_proj="IQ3_S", o_proj="IQ2_S", gate_proj="IQ3_XXS", up_proj="Q3_K", others="Q2_K"),
    ),
    "mixtral": (
        "llama",
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2},
        {"expert_count": 3, "expert_used_count": 2},
        kinds(w1="Q4_K", w2="Q5_K", w3="Q6_K", others="Q4_0"),
    ),
    "gpt-oss MXFP4": (
        "gpt-oss",
        FAMILIES["gpt-oss"][0],
        {**FAMILIES["gpt-oss"][1], "expert_feed_forward_length": WIDE["intermediate_size"]},
        kinds(ffn_gate_exps="MXFP4", ffn_up_exps="MXFP4", ffn_down_exps="MXFP4", others="Q8_0"),
    ),
    "deepseek2": (
        "deepseek2",
        {
            **{**FAMILIES["deepseek v3"][0], **WIDE},
            **{"moe_intermediate_size": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "head_dim": 8},
        },
        {
            **FAMILIES["deepseek v3"][1],
            **{"expert_feed_forward_length": 256, "attention.kv_lora_rank": 256, "attention.key_length_mla": 40},
        },
        kinds(attn_k_b="Q5_0", attn_v_b="Q4_K", gate_proj="Q3_K", others="Q4_K"),
    ),
}
CUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tensor=2": {"tensor_parallel_size": 2},  # 384 inputs of down_proj: in the middle of a block of 256
    "two stages": {"pipeline_parallel_size": 2},
}
MODULE_NAMES = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
IN_GATE = {
    ("gpt-oss MXFP4", "tensor=2"),
    ("llama Q4_K_M", "tensor=2"),
    ("llama, tied, small blocks", "one device"),
    ("qwen2 IQ", "two stages"),
    ("mixtral", "tensor=2"),
}
CASES = [
    pytest.param(mix, cut, marks=() if (mix, cut) in IN_GATE else pytest.mark.slow) for mix in MIXES for cut in CUTS
]


@pytest.mark.parametrize(("mix", "cut"), CASES)
def test_tokens_are_those_of_the_decoded_weights(mix: str, cut: str, tmp_path: Path) -> None:
    architecture, changes, fields, types = MIXES[mix]
    config = {**BASE, **WIDE, **changes}
    write_checkpoint(tmp_path, config, seed=2)
    originals = load_file(tmp_path / "model.safetensors")
    store = random_store(types, decoded)
    tensors, values = to_gguf(architecture, config, originals, store, partial(module_name, architecture))
    save_file(values, tmp_path / "model.safetensors")
    folder = tmp_path / "gguf"
    folder.mkdir()
    path = write_gguf(folder / "m.gguf", metadata_of(architecture, config, **fields), tensors)
    expected = generate(tmp_path, PROMPTS, **CUTS[cut])
    assert len({tuple(tokens) for tokens in expected}) == 2, "the weights should tell the prompts apart"
    assert generate(path, PROMPTS, **CUTS[cut]) == expected


def module_name(architecture: str, module: str) -> str:
    """Return the name of a module in the file, also of a model with experts or latents."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
    if layer is None or layer[2] not in MODULE_NAMES:
        name = llama_name(module)
        return name.replace("ffn_norm", "post_attention_norm") if architecture == "gpt-oss" else name
    return f"blk.{layer[1]}.{MODULE_NAMES[layer[2]]}"


def test_q8_0_of_a_trained_model(stories_model: Path, tmp_path: Path) -> None:
    config = json.loads((stories_model / "config.json").read_text())
    tensors, values = to_gguf("llama", config, load_file(stories_model / "model.safetensors"), store_q8_0)
    folder = tmp_path / "gguf"
    folder.mkdir()
    path = write_gguf(folder / "m.gguf", stories_metadata(stories_model, config), tensors)
    shutil.copytree(stories_model, tmp_path / "float")
    (tmp_path / "float" / "model.safetensors").chmod(0o644)
    save_file(values, tmp_path / "float" / "model.safetensors")
    prompts = ["Once upon a time", "The dog"]
    assert generate(path, prompts, tensor_parallel_size=2) == generate(
        tmp_path / "float", prompts, tensor_parallel_size=2
    )


def test_conversion_to_a_directory(stories_model: Path, tmp_path: Path) -> None:
    config = json.loads((stories_model / "config.json").read_text())
    tensors, values = to_gguf("llama", config, load_file(stories_model / "model.safetensors"), store_q8_0)
    path = write_gguf(tmp_path / "m.gguf", stories_metadata(stories_model, config), tensors)
    target = tmp_path / "floats"
    main(["convert", str(path), str(target), "--format", "safetensors", "--dtype", "float32"])
    for name, array in load_file(target / "model.safetensors").items():
        np.testing.assert_array_equal(array, values[name])
    one, other = read_model_config(target), read_model_config(path)
    assert (one.dtype, other.dtype) == ("float32", "bfloat16") and dataclasses.replace(one, dtype=other.dtype) == other
    tokenizer, original = load_model_tokenizer(target), load_model_tokenizer(path)
    for text in ("Once upon a time", "<s>Once </s> there"):
        assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.chat_templates == original.chat_templates and tokenizer.special_tokens == original.special_tokens
