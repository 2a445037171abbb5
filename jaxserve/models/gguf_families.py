"""What the architectures of GGUF files have in Hugging Face's ``config.json`` besides the fields of all."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from jaxserve.models.gguf_fields import GgufFields

_SIGMOID: Final = 2
"""The number of llama.cpp for a router that scores with a sigmoid."""
_LARGE_BAICHUAN: Final = 5120
"""Hidden size of Baichuan-13B."""
_LARGE_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion parameters, whose scores have another scale."""
_GRANITE: Final = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")


class GgufFamily(NamedTuple):
    """An architecture with fields of its own.

    Attributes:
        fields: Returns these fields, from the file's and those of all architectures.
        reads: Names of metadata that change the numbers and that it reads; others must have neutral values.
    """

    fields: Callable[[GgufFields, Mapping[str, Any]], dict[str, Any]]
    reads: tuple[str, ...] = ()


def _baichuan(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of the 13B model, which is not supported, or nothing."""
    is_large = fields["hidden_size"] == _LARGE_BAICHUAN
    return {"architectures": ["BaichuanForCausalLM"]} if is_large else {}


def _deepseek(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DeepSeek V2 or V3; V3 and Kimi-K2 choose experts with a sigmoid.

    Files from before October 2025 do not tell the groups of experts: all experts compete then, as in llama.cpp.
    """
    is_third = gguf.integer("expert_gating_func", 1) == _SIGMOID
    groups, rotated = gguf.integer("expert_group_count", 1), gguf.integer("rope.dimension_count")
    key_dim, value_dim = (
        gguf.integer(f"attention.{each}_length_mla", gguf.integer(f"attention.{each}_length"))
        for each in ("key", "value")
    )
    scaling = dict(fields.get("rope_scaling", {}))
    if gguf.is_given("rope.scaling.yarn_log_multiplier"):
        mscale = round(10 * gguf.number("rope.scaling.yarn_log_multiplier"), 6)  # the file has a tenth
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_third else "deepseek_v2",
        "num_key_value_heads": fields["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": value_dim,
        "q_lora_rank": gguf.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": gguf.integer("attention.kv_lora_rank"),
        "n_routed_experts": gguf.integer("expert_count"),
        "num_experts_per_tok": gguf.integer("expert_used_count"),
        "n_shared_experts": gguf.integer("expert_shared_count", 0),
        "moe_intermediate_size": gguf.integer("expert_feed_forward_length"),
        "first_k_dense_replace": gguf.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": gguf.integer("expert_group_used_count", groups),
        "num_nextn_predict_layers": 0,
        **({} if is_third or groups == 1 else {"topk_method": "group_limited_greedy"}),
        **({"rope_scaling": scaling} if scaling else {}),
    }


def _gemma2(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(fields),
        "sliding_window": gguf.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": gguf.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
    }


def _gemma3(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(fields),
        "sliding_window": gguf.integer("attention.sliding_window", 1024),
        "rope_local_base_freq": gguf.number("rope.freq_base_swa", 10000.0),
        "rope_theta": gguf.number("rope.freq_base", 1000000.0),
    }


def _gemma_scale(fields: Mapping[str, Any]) -> int:
    """Return the number whose inverse root scales the scores: a head's size, in the largest models D / N."""
    if fields["num_hidden_layers"] == _LARGE_GEMMA[fields["model_type"].removesuffix("_text")]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]


def _gpt_oss(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of GPT-OSS; its rotary embedding does not round what YaRN interpolates, which no field says."""
    scaling = fields.get("rope_scaling")
    return {
        "intermediate_size": gguf.integer("expert_feed_forward_length"),
        "sliding_window": gguf.integer("attention.sliding_window"),
        **_experts(gguf),
        **({} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}),
    }


def _gpt2(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_inner": fields["intermediate_size"]}


def _gpt_neox(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": gguf.has_tensor("blk.0.attn_qkv.bias"),
        "partial_rotary_factor": gguf.integer("rope.dimension_count") / fields["head_dim"],
        "use_parallel_residual": gguf.flag("use_parallel_residual", True),
    }


def _granite(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "attention_multiplier": ("attention.scale", fields["head_dim"] ** -0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: gguf.number(stored, default) for name, (stored, default) in names.items()}


def _granite_moe(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    shared = {"shared_intermediate_size": gguf.integer("expert_shared_feed_forward_length", 0)}
    return {**_granite(gguf, fields), **_experts(gguf), **shared}


def _llama(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Mixtral; nothing for a model without experts."""
    return _experts(gguf) if gguf.integer("expert_count", 0) else {}


def _experts(gguf: GgufFields) -> dict[str, Any]:
    return {
        "num_local_experts": gguf.integer("expert_count"),
        "num_experts_per_tok": gguf.integer("expert_used_count"),
    }


def _phi3(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    rotated = gguf.integer("rope.dimension_count", fields["head_dim"])
    window = gguf.integer("attention.sliding_window", 0)
    return {"partial_rotary_factor": rotated / fields["head_dim"], "sliding_window": window or None}


def _qwen_moe(gguf: GgufFields, fields: Mapping[str, Any]) -> dict[str, Any]:
    is_third = fields["model_type"] == "qwen3_moe"
    more = {} if is_third else {"shared_expert_intermediate_size": gguf.integer("expert_shared_feed_forward_length")}
    return {
        "num_experts": gguf.integer("expert_count"),
        "num_experts_per_tok": gguf.integer("expert_used_count"),
        "moe_intermediate_size": gguf.integer("expert_feed_forward_length"),
        "norm_topk_prob": gguf.flag("expert_weights_norm", is_third),
        "qkv_bias": fields["attention_bias"],
        **more,
    }


GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "baichuan": GgufFamily(_baichuan),
    "deepseek2": GgufFamily(
        _deepseek,
        (
            *("expert_gating_func", "expert_group_count", "expert_shared_count", "expert_weights_scale"),
            *("leading_dense_block_count", "rope.scaling.yarn_log_multiplier"),
        ),
    ),
    "gemma2": GgufFamily(_gemma2, ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": GgufFamily(_gemma3, ("attention.sliding_window",)),
    "gpt-oss": GgufFamily(_gpt_oss, ("attention.sliding_window",)),
    "gpt2": GgufFamily(_gpt2),
    "gptneox": GgufFamily(_gpt_neox, ("use_parallel_residual",)),
    "granite": GgufFamily(_granite, _GRANITE),
    "granitemoe": GgufFamily(_granite_moe, (*_GRANITE, "expert_shared_feed_forward_length")),
    "llama": GgufFamily(_llama),
    "phi3": GgufFamily(_phi3, ("attention.sliding_window",)),
    "qwen2moe": GgufFamily(_qwen_moe, ("expert_shared_count", "expert_shared_feed_forward_length")),
    "qwen3moe": GgufFamily(_qwen_moe),
}
"""By ``general.architecture``."""
