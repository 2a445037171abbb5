"""Sizes of published models as their ``config.json`` has them, and their parameters: numbers alone.

Fields that have their class's default, as published files omit them, are left out here too. Parameters are those of the
model's card, of the language model alone where the card says them; those with a remark are otherwise known.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Published(NamedTuple):
    """A published model.

    Attributes:
        architecture: Name in ``architectures``.
        fields: Fields of the language model.
        billions: Its parameters.
        outer: Fields beside ``text_config``; None: the model has no such object.
    """

    architecture: str
    fields: Mapping[str, Any]
    billions: float
    outer: Mapping[str, Any] | None = None


def sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    """The fields that most models have."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        **fields,
    }


def _experts(count: int, chosen: int, ffn: int, count_field: str = "num_experts") -> dict[str, Any]:
    return {count_field: count, "num_experts_per_tok": chosen, "moe_intermediate_size": ffn}


_H128: Final = {"head_dim": 128}
_TIED: Final = {"tie_word_embeddings": True}
_GEMMA3: Final = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GLM45: Final = {"attention_bias": True, "rope_theta": 1e6, "num_nextn_predict_layers": 1, "n_shared_experts": 1}
_MROPE: Final = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MINISTRAL: Final = {"model_type": "ministral3", "rope_parameters": _YARN, **_H128}
_LLAMA4: Final = {"model_type": "llama4_text", "num_experts_per_tok": 1, "intermediate_size_mlp": 16384, **_H128}
_SCOUT: Final = {"num_local_experts": 16, "interleave_moe_layer_step": 1}
_MAVERICK: Final = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
_COHERE2: Final = {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_norm_eps": 1e-5, "logit_scale": 0.25}
_PHI_ROPE: Final = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "short_mscale": 1.243163121016122,
    "long_mscale": 1.243163121016122,
    "original_max_position_embeddings": 4096,
}
_GRANITE4: Final = {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope", **_TIED}
_ATTENTION: Final = {"layer_types": ["attention"] * 40}
_HYBRID: Final = "GraniteMoeHybridForCausalLM"

PUBLISHED: Final[Mapping[str, Published]] = {
    "Gemma 3 4B": Published(
        "Gemma3ForConditionalGeneration",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, **_GEMMA3},
        3.884,
        {},
    ),
    "Gemma 3 12B": Published(
        "Gemma3ForConditionalGeneration",
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, **_GEMMA3},
        11.77,
        {},
    ),
    "Gemma 3 27B": Published(
        "Gemma3ForConditionalGeneration",
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, **_GEMMA3},
        27.01,
        {},
    ),
    # Keys and values of full layers have 4 heads: so many make up the parameters of the card.
    "Gemma 4 31B": Published(
        "Gemma4ForConditionalGeneration",
        sizes(262144, 5376, 21504, 60, 32, 16, model_type="gemma4_text", sliding_window=1024, head_dim=256)
        | {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
        30.7,
        {},
    ),
    "Qwen2.5-VL-7B": Published(
        "Qwen2_5_VLForConditionalGeneration", sizes(152064, 3584, 18944, 28, 28, 4, **_MROPE), 7.61
    ),
    "Qwen3-VL-8B": Published(
        "Qwen3VLForConditionalGeneration",
        sizes(151936, 4096, 12288, 36, 32, 8, model_type="qwen3_vl_text", rope_theta=5e6, **_H128),
        8.19,
        {"tie_word_embeddings": False},
    ),
    "Qwen3-VL-30B-A3B": Published(
        "Qwen3VLMoeForConditionalGeneration",
        sizes(151936, 2048, 6144, 48, 32, 4, model_type="qwen3_vl_moe_text", rope_theta=5e6, **_H128)
        | _experts(128, 8, 768),
        30.5,
        {"tie_word_embeddings": False},
    ),
    "Mistral Small 3.2 24B": Published(
        "Mistral3ForConditionalGeneration",
        sizes(131072, 5120, 32768, 40, 32, 8, model_type="mistral", sliding_window=None, rope_theta=1e9, **_H128),
        23.6,
        {"tie_word_embeddings": False},
    ),
    "Ministral 3 3B": Published(
        "Mistral3ForConditionalGeneration", sizes(131072, 3072, 9216, 26, 32, 8, **_MINISTRAL, **_TIED), 3.43, {}
    ),
    "Ministral 3 14B": Published(
        "Mistral3ForConditionalGeneration",
        sizes(131072, 5120, 16384, 40, 32, 8, **_MINISTRAL),
        13.5,
        {"tie_word_embeddings": False},
    ),
    "Mistral Small 4 119B": Published("Mistral4ForCausalLM", {}, 119.0),
    "GLM-4-9B-0414": Published("Glm4ForCausalLM", {"attention_bias": True}, 9.4),
    "GLM-4-32B-0414": Published("Glm4ForCausalLM", sizes(151552, 6144, 23040, 61, 48, 2, **_H128), 32.6),
    "GLM-4.5-Air 106B": Published(
        "Glm4MoeForCausalLM",
        sizes(151552, 4096, 10944, 46, 96, 8, **_H128, **_GLM45) | _experts(128, 8, 1408, "n_routed_experts"),
        106.8,
    ),
    "GLM-4.6 355B": Published(
        "Glm4MoeForCausalLM",
        sizes(151552, 5120, 12288, 92, 96, 8, **_H128, **_GLM45, use_qk_norm=True, first_k_dense_replace=3)
        | _experts(160, 8, 1536, "n_routed_experts"),
        355.0,
    ),
    "GLM-4.7-Flash 30B": Published("Glm4MoeLiteForCausalLM", {}, 29.9),
    "Solar Open 100B": Published("SolarOpenForCausalLM", {}, 102.6),
    "MiniMax M2 229B": Published(
        "MiniMaxM2ForCausalLM", {"rotary_dim": 64, "attn_type_list": [1] * 62, "scoring_func": "sigmoid"}, 228.7
    ),
    "Hy3 295B": Published("HYV3ForCausalLM", {}, 295.0),
    "dots.llm1 142B": Published(
        "Dots1ForCausalLM",
        sizes(152064, 4096, 10944, 62, 32, 32, first_k_dense_replace=1, n_shared_experts=2, scoring_func="noaux_tc")
        | _experts(128, 6, 1408, "n_routed_experts"),
        142.0,
    ),
    "OLMo-3 7B": Published("Olmo3ForCausalLM", sizes(100278, 4096, 11008, 32, 32, 32), 7.3),
    "OLMo-3 32B": Published("Olmo3ForCausalLM", sizes(100278, 5120, 27648, 64, 40, 8), 32.2),
    # The card's 109 has the encoder, of which the language model is added up.
    "Llama 4 Scout 109B": Published(
        "Llama4ForConditionalGeneration", sizes(202048, 5120, 8192, 48, 40, 8, **_LLAMA4, **_SCOUT), 107.8, {}
    ),
    "Llama 4 Maverick 400B": Published(
        "Llama4ForConditionalGeneration", sizes(202048, 5120, 8192, 48, 40, 8, **_LLAMA4, **_MAVERICK), 400.6, {}
    ),
    "EXAONE 4 1.2B": Published(
        "Exaone4ForCausalLM", sizes(102400, 2048, 4096, 30, 32, 8, head_dim=64, sliding_window=None, **_TIED), 1.28
    ),
    "EXAONE 4 32B": Published(
        "Exaone4ForCausalLM", sizes(102400, 5120, 27392, 64, 40, 8, **_H128, sliding_window_pattern="LLLG"), 32.0
    ),
    "Seed-OSS 36B": Published("SeedOssForCausalLM", sizes(155136, 5120, 27648, 64, 80, 8, **_H128), 36.15),
    "ERNIE 4.5 0.3B": Published("Ernie4_5ForCausalLM", {}, 0.36),
    # The card rounds to 21: added up.
    "ERNIE 4.5 21B-A3B": Published("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 27}, 21.8),
    "Hunyuan A13B 80B": Published(
        "HunYuanMoEV1ForCausalLM",
        sizes(128167, 4096, 3072, 32, 32, 8, num_experts=64, moe_topk=[8] * 32, attention_head_dim=128, **_TIED),
        80.4,
    ),
    # The card's 7 are without the embedding: added up.
    "Command R7B": Published("Cohere2ForCausalLM", sizes(256000, 4096, 14336, 32, 32, 8, **_COHERE2), 8.03),
    "Command A 111B": Published("Cohere2ForCausalLM", sizes(256000, 12288, 36864, 64, 96, 8, **_COHERE2), 111.0),
    "StarCoder2 3B": Published("Starcoder2ForCausalLM", {}, 3.03),
    "StarCoder2 7B": Published("Starcoder2ForCausalLM", sizes(49152, 4608, 18432, 32, 36, 4), 7.17),
    "Phi-3.5-MoE 42B": Published(
        "PhimoeForCausalLM",
        sizes(32064, 4096, 6400, 32, 32, 8, attention_bias=True, lm_head_bias=True, rope_scaling=_PHI_ROPE),
        41.9,
    ),
    "Apertus 8B": Published("ApertusForCausalLM", sizes(131072, 4096, 21504, 32, 32, 8), 8.05),
    "Apertus 70B": Published("ApertusForCausalLM", sizes(131072, 8192, 43008, 80, 64, 8), 70.6),
    "Granite 4.0 1B": Published(
        _HYBRID,
        sizes(100352, 2048, 4096, 40, 16, 4, shared_intermediate_size=4096, **_GRANITE4, **_ATTENTION),
        1.63,
    ),
    "Granite 4.0 Micro 3B": Published(
        _HYBRID,
        sizes(100352, 2560, 8192, 40, 40, 8, shared_intermediate_size=8192, **_GRANITE4, **_ATTENTION),
        3.40,
    ),
    "nanochat d20": Published("NanoChatForCausalLM", sizes(65536, 1280, 5120, 20, 10, 10), 0.561),
}
