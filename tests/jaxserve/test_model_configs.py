"""config.json to ModelConfig: defaults as in transformers, all forms of each field, one error for all that is wrong."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import transformers

from checkpoints.quantized.registry import REFUSED
from jaxserve.api.errors import ConfigError, UnsupportedModelError
from jaxserve.layers.decoder import RMSNormLayer
from jaxserve.layers.expert_activations import ClampedSwiGLU
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import outline
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.deepseek_v2 import DeepseekConfig
from jaxserve.models.gpt2 import GPT2Config
from jaxserve.models.gpt_oss import GptOssConfig
from jaxserve.models.hf_config import read_config_json
from jaxserve.models.hf_decoder import ACTIVATIONS
from jaxserve.models.laguna import LagunaConfig
from jaxserve.models.olmo2 import PostNormLayer
from jaxserve.models.registry import Family, config_from_hf, family, supported_architectures
from tests.random_checkpoint import DEEPSEEK, LLAMA
from tests.recurrent_fields import with_recurrent_fields

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
}
CONFIG_CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "MistralForCausalLM": transformers.MistralConfig,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "SmolLM3ForCausalLM": transformers.SmolLM3Config,
    "Olmo2ForCausalLM": transformers.Olmo2Config,
    "GraniteForCausalLM": transformers.GraniteConfig,
}
QUANTIZED = ("deepseek-r1", "kimi-k2", "llama-2-13b-bnb-nf4", "llama-3.1-8b-instruct-bnb-int8", "qwen3-14b-mlx-4bit")
OTHER_ARCHITECTURES = {
    "pythia-410m": "GPTNeoXForSequenceClassification",
}


def read(architecture: str = "LlamaForCausalLM", **raw: Any) -> DecoderConfig:
    return cast(DecoderConfig, config_from_hf({"architectures": [architecture], **SIZES, **raw}, "some/config.json"))


def hf_windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's window in transformers: by layer type where the class has them, else one for all."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if each == "sliding_attention" else None for each in types)


def decoder_layers(config: DecoderConfig) -> list[RMSNormLayer]:
    return cast(list[RMSNormLayer], list(outline(config, Scope()).layers))


def assert_equals_hf(config: DecoderConfig, expected: Any) -> None:
    """Compares every field that both sides have."""
    eos = expected.eos_token_id
    assert config.vocab_size == expected.vocab_size
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == (getattr(expected, "head_dim", None) or expected.hidden_size // config.num_heads)
    assert config.ffn_size == expected.intermediate_size
    assert config.norm_eps == expected.rms_norm_eps
    assert config.tie_embeddings == expected.tie_word_embeddings
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.bos_token_id == expected.bos_token_id
    assert config.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert config.sliding_windows == hf_windows(expected)
    has_bias = getattr(expected, "attention_bias", False)
    assert config.out_bias == has_bias
    assert config.qkv_bias == (has_bias or config.architecture == "Qwen2ForCausalLM")
    assert config.mlp_bias == getattr(expected, "mlp_bias", False)
    module = outline(config, Scope())
    assert module.embedding_multiplier == getattr(expected, "embedding_multiplier", 1.0)
    assert module.logits_divisor == getattr(expected, "logits_scaling", 1.0)
    for layer in decoder_layers(config):
        assert layer.residual_multiplier == getattr(expected, "residual_multiplier", 1.0)
        assert layer.attention.scale == getattr(expected, "attention_multiplier", config.head_dim**-0.5)
    rotating = getattr(expected, "no_rope_layers", None) or [1] * config.num_layers
    assert config.rope_layers == tuple(bool(each) for each in rotating)


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_missing_optional_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    config = read(architecture)
    assert_equals_hf(config, CONFIG_CLASSES[architecture](**SIZES))
    assert (config.max_positions, config.num_layers, config.dtype, config.activation) == (128, 6, "float32", "silu")


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_a_config_that_transformers_saved_reads_back(architecture: str, tmp_path: Path) -> None:
    extra: dict[str, Any] = {"num_key_value_heads": 4, "rms_norm_eps": 3e-4, "rope_theta": 54321.0, "head_dim": 24}
    expected = CONFIG_CLASSES[architecture](
        **SIZES, **extra, architectures=[architecture], eos_token_id=[5, 9], bos_token_id=3, dtype="bfloat16"
    )
    expected.save_pretrained(tmp_path)
    config = cast(DecoderConfig, config_from_hf(read_config_json(tmp_path / "config.json"), str(tmp_path)))
    assert_equals_hf(config, expected)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (24, 4, 3e-4)
    assert (config.rope.theta, config.rope.rotary_dim, config.dtype) == (54321.0, 24, "bfloat16")


@pytest.mark.parametrize(
    ("architecture", "raw"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
        ),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 7}),
        ("Phi3ForCausalLM", {"sliding_window": 2047}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1, 1, 0, 1, 1]}),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 3}),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12}),
        ("SmolLM3ForCausalLM", {"use_sliding_window": False, "sliding_window": 12}),
        (
            "SmolLM3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["sliding_attention"] * 6},
        ),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("SmolLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("Olmo2ForCausalLM", {"attention_bias": True}),
        (
            "GraniteForCausalLM",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "attention_multiplier": 0.0078125,
                "embedding_multiplier": 12,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
            },
        ),
        ("LlamaForCausalLM", {"eos_token_id": None, "bos_token_id": None}),
        ("LlamaForCausalLM", {"eos_token_id": [1, 2, 3], "num_key_value_heads": None, "head_dim": None}),
    ],
    ids=str,
)
def test_fields_of_the_families_as_in_transformers(architecture: str, raw: dict[str, Any]) -> None:
    assert_equals_hf(read(architecture, **raw), CONFIG_CLASSES[architecture](**SIZES, **raw))


def test_what_only_some_families_have() -> None:
    layers = {name: decoder_layers(read(name)) for name in CONFIG_CLASSES}
    norms = {name: {getattr(layer.attention, "qk_norm", None) for layer in found} for name, found in layers.items()}
    assert norms.pop("Qwen3ForCausalLM") == {"head"}
    assert norms.pop("Olmo2ForCausalLM") == {"width"}
    assert all(norm == {"none"} for norm in norms.values())
    assert [name for name, found in layers.items() if isinstance(found[0], PostNormLayer)] == ["Olmo2ForCausalLM"]


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 1e4,
            "rope_scaling": None,
            "rope_parameters": {"type": "linear", "factor": 2, "rope_theta": 5e5},
        },
    ],
    ids=str,
)
def test_every_form_of_the_rotary_fields(raw: dict[str, Any]) -> None:
    rope = read(**raw).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 128),
        ({"type": "linear", "factor": 2.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 0.5}, 128),
        ({"type": "linear", "factor": 1e30}, 2**31 - 1),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 1.5}, 192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            128,
        ),
    ],
    ids=str,
)
def test_scalings_that_stretch_the_context(scaling: dict[str, Any] | None, longest: int) -> None:
    config = read(head_dim=8, rope_scaling=scaling)
    assert (config.max_positions, config.rope.max_positions) == (longest, 128)


@pytest.mark.parametrize("kind", ["su", "longrope", "yarn"])
def test_phi3_longrope_under_its_three_names(kind: str) -> None:
    factors = {"short_factor": [1.0] * 12, "long_factor": [2] * 12}
    config = read(
        "Phi3ForCausalLM",
        head_dim=32,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_scaling={"type": kind, **factors},
    )
    rope = config.rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_positions, rope.factor) == ("longrope", 24, 32, 4.0)
    assert (rope.short_factor, rope.long_factor) == ((1.0,) * 12, (2.0,) * 12)


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "float32"),
    ],
    ids=str,
)
def test_dtype_under_both_names(raw: dict[str, Any], dtype: str) -> None:
    assert read(**raw).dtype == dtype


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    assert read(hidden_act=name).activation == ACTIVATIONS[name]


@pytest.mark.parametrize("family", ["Exaone4", "ExaoneMoe"])
def test_all_layers_of_exaone_rotate_if_none_has_a_window(family: str) -> None:
    raw = {**LLAMA, "architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 4}
    for window, rotates in ((None, (True,) * 4), (8, (True, True, True, False))):
        config = config_from_hf({**raw, "sliding_window": window}, "config.json")
        assert isinstance(config, DecoderConfig) and config.rope_layers == rotates


def test_the_share_that_rotates_in_laguna_is_that_of_each_type_of_layers() -> None:
    ropes = {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {"rope_theta": 100.0}}
    types = ["full_attention", "sliding_attention"] * 3
    raw = {"rope_parameters": ropes, "partial_rotary_factor": 0.25, "layer_types": types, "num_hidden_layers": 6}
    config = config_from_hf({"architectures": ["LagunaForCausalLM"], **raw}, "config.json")
    assert isinstance(config, LagunaConfig)
    assert (config.rope.rotary_dim, config.local_rope.rotary_dim) == (64, 128)


def test_the_context_of_command_r_is_not_its_number_of_positions() -> None:
    raw = {**LLAMA, "architectures": ["CohereForCausalLM"], "max_position_embeddings": 64, "model_max_length": 512}
    assert config_from_hf(raw, "config.json").max_positions == 512


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Mistral4", "Youtu"])
def test_the_rotated_part_of_a_head_with_latents_is_the_one_named_so(family: str) -> None:
    raw = {**DEEPSEEK, "architectures": [f"{family}ForCausalLM"], "head_dim": 128}
    config = config_from_hf(raw, "config.json")
    assert isinstance(config, DeepseekConfig)
    assert config.head_dim == config.rope.rotary_dim == DEEPSEEK["qk_rope_head_dim"]


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden_act: expected one of silu, .* got 'quick_gelu'"):
        read(hidden_act="quick_gelu")


def test_all_problems_come_in_one_error() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": "many",
        "hidden_size": 64.5,
        "num_hidden_layers": True,
        "num_attention_heads": 0,
        "rms_norm_eps": float("nan"),
        "tie_word_embeddings": "no",
        "eos_token_id": [1, "two"],
        "rope_scaling": {"rope_type": "llama3", "factor": -1},
        "torch_dtype": "float8_e4m3fn",
    }
    with pytest.raises(ConfigError) as caught:
        config_from_hf(raw, "a/config.json")
    text = str(caught.value)
    assert text.startswith("a/config.json cannot be used:\n")
    for line in (
        "vocab_size: expected an integer from 1 to 2147483647, got 'many'",
        "hidden_size: expected an integer from 1 to 2147483647, got 64.5",
        "num_hidden_layers: expected an integer from 1 to 10000, got True",
        "num_attention_heads: expected an integer from 1 to 2147483647, got 0",
        "intermediate_size: expected an integer from 1 to 2147483647, but it is missing",
        "max_position_embeddings: expected an integer from 1 to 2147483647, but it is missing",
        "rms_norm_eps: expected a number above 0, got nan",
        "tie_word_embeddings: expected true or false, got 'no'",
        "eos_token_id: expected a token id, a list of token ids, or null, got [1, 'two']",
        "rope_scaling.factor: expected a number above 0, got -1",
        "rope_scaling.low_freq_factor: expected a number above 0, but it is missing",
        "torch_dtype: expected one of float32, float16, bfloat16, got 'float8_e4m3fn'",
    ):
        assert f"\n  {line}" in text


@pytest.mark.parametrize(
    ("architecture", "raw", "message"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of the 32 query"),
        (
            "LlamaForCausalLM",
            {"num_attention_heads": 7},
            "head_dim: is missing, and hidden_size 64 is not divisible by 7",
        ),
        (
            "LlamaForCausalLM",
            {"head_dim": 7},
            "head_dim: expected an even number of rotated features, at least 2, got 7",
        ),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1: this architecture"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected at most 1, got 1.5"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling: expected an object, got 'linear'"),
        ("LlamaForCausalLM", {"rope_theta": 1}, "rope_theta: expected a number above 1, got 1.0"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "xpos"}},
            "rope_scaling.type: expected one of default, linear,",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: .* but it is missing"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: .* but it is missing"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor: expected more than low_freq_factor 4.0, got 4.0",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": 3}},
            "long_factor: expected a list of 1 numbers above 0, got 3",
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention: expected one rotary embedding for all layers",
        ),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types: expected 6 entries, one per layer, got 1",
        ),
        ("Qwen2ForCausalLM", {"layer_types": ["mamba"] * 6}, "expected full_attention or sliding_attention, got mamba"),
        ("Qwen2ForCausalLM", {"layer_types": 3}, "layer_types: expected a list, got 3"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "layer_types: has sliding_attention, but"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "expected full_attention in every layer"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 6}, "expected sliding_attention in every layer"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window: expected an integer from 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 6 entries, one per layer, got 2"),
        ("LlamaForCausalLM", {"hidden_act": 3}, "hidden_act: expected a string, got 3"),
        ("LlamaForCausalLM", {"hidden_size": 10**400}, r"hidden_size: .* got 1000+\.\.\."),
        ("LlamaForCausalLM", {"rope_theta": 10**400}, r"rope_theta: expected a number above 0, got 1000+\.\.\."),
        ("LlamaForCausalLM", {"rms_norm_eps": float("inf")}, "rms_norm_eps: expected a number above 0, got inf"),
        ("LlamaForCausalLM", {"bos_token_id": -1}, "bos_token_id: expected an integer from 0"),
        ("LagunaForCausalLM", {"gating": "row"}, "gating: expected true, per-head or per-element, got 'row'"),
        (
            "LagunaForCausalLM",
            {"num_attention_heads_per_layer": [4, 3]},
            r"heads_per_layer: expected 6 multiples of the \d key/value heads, one per layer, got \[4, 3\]",
        ),
        (
            "LagunaForCausalLM",
            {"moe_apply_router_weight_on_input": True},
            "moe_apply_router_weight_on_input: expected false",
        ),
        (
            "MuseGlimmerForCausalLM",
            {"layer_rope_theta": [0, 5.0]},
            r"layer_rope_theta: expected 0 or rope_theta 10000.0 for each of 6 layers, got \[0, 5.0\]",
        ),
        (
            "Cohere2MoeForCausalLM",
            {"expert_selection_fn": "tanh"},
            "expert_selection_fn: expected softmax or sigmoid, got 'tanh'",
        ),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv: expected null: .* got 8.0"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm: expected false"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm: expected false"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before: expected true: norms precede each"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim: expected hidden_size 64, got 32"),
        ("ArceeForCausalLM", {"hidden_act": "tanh"}, "hidden_act: expected one of silu, .*, relu, relu2, got 'tanh'"),
        ("GPT2LMHeadModel", {"n_head": 5}, "n_head: expected a divisor of n_embd 64, got 5"),
        ("GPT2LMHeadModel", {"n_positions": 0}, "n_positions: expected an integer from 1"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention: expected false"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(architecture: str, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(architecture, **raw)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"n_inner": 100, "layer_norm_epsilon": 1e-3, "activation_function": "relu", "tie_word_embeddings": False},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 77, "bos_token_id": None, "eos_token_id": [1, 2]},
    ],
    ids=str,
)
def test_fields_of_gpt2_as_in_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    expected = transformers.GPT2Config(**{**SIZES, **raw}, architectures=["GPT2LMHeadModel"], dtype="bfloat16")
    expected.save_pretrained(tmp_path)
    config = cast(GPT2Config, config_from_hf(read_config_json(tmp_path / "config.json"), "config.json"))
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.max_positions, config.vocab_size)
    assert sizes == (expected.n_embd, expected.n_layer, expected.n_head, expected.n_positions, 96)
    assert config.ffn_size == (expected.n_inner or 4 * expected.n_embd)
    assert (config.norm_eps, config.tie_embeddings) == (expected.layer_norm_epsilon, expected.tie_word_embeddings)
    assert config.activation == ACTIVATIONS[expected.activation_function]
    eos = expected.eos_token_id
    assert (config.bos_token_id, config.eos_token_ids) == (
        expected.bos_token_id,
        tuple(eos if isinstance(eos, list) else [eos]),
    )
    assert (config.rope, config.dtype) == (None, "bfloat16")
    scales = [layer.attention.scale for layer in outline(config, Scope()).layers]
    head_scale = (config.hidden_size // config.num_heads) ** -0.5 if expected.scale_attn_weights else 1.0
    divisors = [index + 1 if expected.scale_attn_by_inverse_layer_idx else 1 for index in range(config.num_layers)]
    assert scales == [head_scale / divisor for divisor in divisors]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {
            "sliding_window": 16,
            "swiglu_limit": 3.0,
            "swiglu_alpha": 2.0,
            "num_local_experts": 8,
            "attention_bias": False,
        },
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "num_experts_per_tok": 2, "head_dim": 32},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
        {"num_key_value_heads": 4, "bos_token_id": 5, "eos_token_id": [1, 2], "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_fields_of_gpt_oss_as_in_transformers(raw: dict[str, Any]) -> None:
    config = cast(GptOssConfig, read("GptOssForCausalLM", **raw))
    expected = transformers.GptOssConfig(**SIZES, **raw)
    assert config.sliding_windows == hf_windows(expected)
    assert (config.num_kv_heads, config.head_dim) == (expected.num_key_value_heads, expected.head_dim)
    assert (config.norm_eps, config.tie_embeddings) == (expected.rms_norm_eps, expected.tie_word_embeddings)
    assert (config.qkv_bias, config.out_bias) == (expected.attention_bias,) * 2
    assert (config.bos_token_id, list(config.eos_token_ids)) == (expected.bos_token_id, expected.eos_token_id or [])
    assert config.routing.num_experts == expected.num_local_experts
    assert config.routing.experts_per_token == expected.num_experts_per_tok and config.routing.is_normalized
    assert (config.expert_ffn_size, config.sparse_layers) == (expected.intermediate_size, (True,) * 6)
    assert config.gating == ClampedSwiGLU(alpha=expected.swiglu_alpha, limit=expected.swiglu_limit)
    rope = expected.rope_parameters
    assert rope is not None and config.rope is not None
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("yarn", rope["factor"], rope["rope_theta"])
    assert config.rope.original_max_positions == rope["original_max_position_embeddings"]
    assert config.rope.truncate == rope.get("truncate", True)


def test_the_config_of_gpt_oss_20b() -> None:
    """In the form of its config.json, which transformers 4 saved."""
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    config = read(
        "GptOssForCausalLM",
        max_position_embeddings=131072,
        rope_theta=150000,
        rope_scaling={**yarn, "rope_type": "yarn", "truncate": False},
        num_local_experts=32,
        experts_per_token=4,
    )
    assert (config.max_positions, config.rope.truncate, config.rope.theta) == (131072, False, 150000.0)


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="GPT9ForCausalLM is not supported; supported: AfmoeForCausalLM, "):
        config_from_hf({"architectures": ["GPT9ForCausalLM"]}, "config.json")
    with pytest.raises(UnsupportedModelError, match="architecture GPT9ForCausalLM is not supported"):
        family("GPT9ForCausalLM")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "architectures to name the model's architecture, but it is missing; supported: "),
        ({"architectures": []}, "but it is empty"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list, got 'LlamaForCausalLM'"),
    ],
    ids=str,
)
def test_no_architecture(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw, "config.json")


def test_every_line_of_the_registry_imports() -> None:
    assert set(CONFIG_CLASSES) < set(supported_architectures())
    for architecture in supported_architectures():
        raw = {"architectures": [architecture], **SIZES, "hidden_size": 4096}
        config = config_from_hf(with_recurrent_fields(raw), "config.json")
        assert architecture in (config.architecture, config.multimodal)
        assert isinstance(family(config.architecture), Family)
        assert len(outline(config, Scope()).layers) == config.num_layers


@pytest.mark.parametrize("folder", QUANTIZED)
def test_a_quantized_checkpoint_has_the_model_of_a_plain_one(folder: str, shared_data: Path) -> None:
    raw = read_config_json(shared_data / "configs" / folder / "config.json")
    plain = {name: value for name, value in raw.items() if name not in ("quantization_config", "quantization")}
    assert config_from_hf(raw, "config.json") == config_from_hf(plain, "config.json")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e3m4"}},
            "fmt='e3m4' is not supported; supported: e4m3",
        ),
        (
            {"compression_config": {"quant_method": "exl2"}},
            "weights quantized with EXL2 are not supported; supported: awq",
        ),
        (
            {"quantization_config": {"quant_method": "mine"}},
            "weights quantized with 'mine' are not supported; supported",
        ),
        ({"quantization_config": {"some": 1, "other": 2}}, "expected quant_method .*, got the fields other, some"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 5}},
            "bits=5 is not supported; supported: 2, 3, 4, 8",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "AWQ version 'gemv' is not"),
        ({"quantization": "int4"}, "quantization: expected an object, got 'int4'"),
    ],
    ids=str,
)
def test_other_quantization_sections(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**section)


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_are_refused_name_what_loads_and_the_export(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not supported; supported: awq, .*; export the model as GPTQ, AWQ"):
        read(quantization_config={"quant_method": method})


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "llm-awq", "marlin"])
def test_versions_of_awq_that_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{version}' is not supported; supported: gemm .export it with"):
        read(quantization_config={"quant_method": "awq", "bits": 4, "version": version})


@pytest.mark.parametrize(
    "section", [None, {}, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}], ids=str
)
def test_neutral_quantization_sections_pass(section: dict[str, Any] | None) -> None:
    assert read(quantization_config=section) == read()


@pytest.mark.parametrize("folder", OTHER_ARCHITECTURES)
def test_real_configs_of_other_architectures_are_refused(folder: str, shared_data: Path) -> None:
    path = shared_data / "configs" / folder / "config.json"
    with pytest.raises(UnsupportedModelError, match=f"{OTHER_ARCHITECTURES[folder]} is not supported; supported: "):
        config_from_hf(read_config_json(path), str(path))


def test_baichuan_7b_is_a_llama_with_other_names(shared_data: Path) -> None:
    raw = read_config_json(shared_data / "configs" / "baichuan-7b" / "config.json")
    config = cast(DecoderConfig, config_from_hf(raw, "config.json"))
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.rope.theta) == (32, 128, 1e-6, 10000.0)
    assert (config.qkv_bias, config.tie_embeddings, config.eos_token_ids) == (False, False, (2,))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"hidden_size": 5120, "num_attention_heads": 40}, r"hidden_size 5120 has ALiBi positions \(Baichuan-13B\)"),
        (
            {"hidden_size": 4096, "vocab_size": 125696},
            r"Baichuan 2, whose output head normalizes its rows \(NormHead\)",
        ),
        ({"hidden_size": 4096, "z_loss_weight": 0}, "Baichuan 2"),
    ],
    ids=str,
)
def test_other_baichuans_are_refused_with_the_reason(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read("BaichuanForCausalLM", **raw)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; expected a model directory"),
        (b"{", "expected JSON text in UTF-8"),
        (b"\xff\xfe{}", "expected JSON text in UTF-8"),
        (b"[" * 100_000, "expected JSON text in UTF-8"),
        (b"[1]", "expected a JSON object, got list"),
    ],
    ids=["absent", "cut", "not-utf8", "deep", "list"],
)
def test_unreadable_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config_json(path)


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: "):
        read_config_json(tmp_path)


def test_reading_does_not_change_the_raw_object() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SIZES, "rope_scaling": {"type": "linear", "factor": 2.0}}
    before = json.dumps(raw)
    config_from_hf(raw, "config.json")
    assert json.dumps(raw) == before
