"""Fields of config.json that contradict each other or name unknown kinds: one error lists all, for every family."""

from typing import Any

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.models.registry import FAMILIES, config_from_hf
from tests.random_checkpoint import DEEPSEEK

ATTENTION = ["full_attention"] * 2
FIELDS: dict[str, Any] = {
    **DEEPSEEK,
    "num_local_experts": 4,
    "num_experts": 4,
    "layer_types": ATTENTION,
    "hidden_size": 4096,
    "sliding_window": None,
}
OWN_FIELDS = {
    *("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM", "OPTForCausalLM"),
    *("BambaForCausalLM", "FalconH1ForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"),
}
"""Families that have no ``layer_types``."""
ROTARY = sorted(FAMILIES.keys() - OWN_FIELDS)


def problems(architecture: str, **fields: Any) -> list[str]:
    """The lines of the error; none if there is no error."""
    try:
        config_from_hf({**FIELDS, "architectures": [architecture], **fields}, "config.json")
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize("architecture", ROTARY)
def test_layers_and_rotary_embeddings_of_every_family(architecture: str) -> None:
    assert problems(architecture) == []
    scaling = {"type": "xpos"}
    found = problems(architecture, layer_types=["full_attention", "hyena", {}], rope_scaling=scaling)
    assert [line for line in found if line.startswith("layer_types: expected") and line.endswith("got hyena, {}")]
    assert "layer_types: expected 2 entries, one per layer, got 3" in found
    assert [line for line in found if line.startswith("rope_scaling.type: expected one of default, ")]
    assert len(found) == len({*found}) == 3


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers: expected 2 entries, one per layer, got 3"),
        ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers: expected 0 or 1, got 2"),
        ("Llama4", {"no_rope_layers": [1] * 3}, "no_rope_layers: expected 2 entries, one per layer, got 3"),
        ("Llama4", {"moe_layers": [1, 2]}, "moe_layers: expected indices of layers, 0 to 1, got 2"),
        ("Qwen3Moe", {"mlp_only_layers": [7, "a"]}, "mlp_only_layers: expected indices of layers, 0 to 1, got 7, a"),
        ("HYV3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 2 entries, one per layer, got 1"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense", []]}, "mlp_layer_types: expected dense or sparse, got []"),
        ("MiniMaxM2", {"attn_type_list": [1, 0]}, "attn_type_list: expected 1, got 0"),
        ("HunYuanMoEV1", {"moe_topk": [2]}, "moe_topk: expected 2 entries, one per layer, got 1"),
        ("HunYuanMoEV1", {"moe_topk": [2, 1]}, "moe_topk: expected the same number for every layer, got 2, 1"),
        ("Gemma4", {"per_layer_config": {"2": {}}}, "per_layer_config.2: expected the index of a layer, 0 to 1"),
        (
            "Gemma4",
            {"per_layer_config": {"0": {"sliding_window": 4}}},
            "per_layer_config.0.sliding_window: expected only head_dim and num_key_value_heads to differ by layer",
        ),
        (
            "Gemma4",
            {"num_kv_shared_layers": 2},
            "num_kv_shared_layers: with 2, layers share keys and values that no layer has",
        ),
        ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        ("Mellum", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 2 entries, one per layer, got 1"),
        ("Afmoe", {"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        ("Mixtral", {"scoring_func": "sigmoid"}, "scoring_func: expected softmax, got 'sigmoid'"),
        ("Glm4Moe", {"topk_method": "greedy"}, "topk_method: expected noaux_tc, got 'greedy'"),
        ("KimiLinear", {"moe_router_activation_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        (
            "KimiLinear",
            {"mla_use_nope": False},
            "mla_use_nope: expected true: attention with a rotary embedding is not supported here",
        ),
        (
            "KimiLinear",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: expected none, as attention has no rotary embedding, got linear",
        ),
        (
            "DeepseekV32",
            {"layer_types": ["mamba"] * 2},
            "layer_types: expected indexed_attention or full_attention, got mamba",
        ),
        (
            "GPTNeo",
            {"attention_types": [[["global"], 10**12]]},
            "attention_types: expected global or local for each of 2 layers, in lists with a number of repetitions, "
            "got [[['global'], 1000000000000]]",
        ),
    ],
)
def test_lists_and_routers_of_some_families(architecture: str, fields: dict[str, Any], expected: str) -> None:
    assert problems(f"{architecture}ForCausalLM", **fields) == [expected]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kda_layers": [1, 2], "full_attn_layers": [2]}, ".full_attn_layers: has layers that are listed already: 2"),
        ({"kda_layers": [2, 2], "full_attn_layers": [1]}, ".kda_layers: has layers that are listed already: 2"),
        (
            {"kda_layers": [], "full_attn_layers": [2]},
            ".kda_layers: neither this nor full_attn_layers has the layers 1",
        ),
        (
            {"kda_layers": [0, 3, True], "full_attn_layers": [1, 2]},
            ".kda_layers: expected numbers of layers, 1 to 2, got 0, 3, True",
        ),
        ({"full_attn_layers": [1, 2]}, ".kda_layers: expected numbers of layers, 1 to 2, but it is missing"),
        ({"num_heads": 4}, ".num_heads: expected 8, as linear_num_heads says, got 4"),
        ({"short_conv_kernel_size": 1}, ".short_conv_kernel_size: expected an integer from 2 to 2147483647, got 1"),
    ],
)
def test_lists_and_sizes_of_kimi_linear(fields: dict[str, Any], expected: str) -> None:
    found = problems("KimiLinearForCausalLM", layer_types=None, linear_num_heads=8, linear_attn_config=fields)
    assert found == [f"linear_attn_config{expected}"]


def test_kimi_linear_has_what_its_config_says_twice() -> None:
    lists = {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16}
    assert problems("KimiLinearForCausalLM", layer_types=None, linear_attn_config=lists) == []
    expected = "layer_types: differs from the lists in linear_attn_config, which count from 1, in 1"
    assert problems("KimiLinearForCausalLM", linear_attn_config=lists) == [expected]


def test_words_that_published_files_have() -> None:
    assert problems("Dots1ForCausalLM", scoring_func="noaux_tc") == []
    assert problems("Glm4MoeLiteForCausalLM", scoring_func="sigmoid", topk_method="noaux_tc") == []
    assert problems("MiniMaxM2ForCausalLM", scoring_func="sigmoid", attn_type_list=[1, 1], use_routing_bias=True) == []


def test_layers_of_mamba_are_the_default_of_granite_hybrid() -> None:
    assert problems("GraniteMoeHybridForCausalLM", layer_types=None) == problems(
        "GraniteMoeHybridForCausalLM", layer_types=["mamba", "mamba"]
    )
