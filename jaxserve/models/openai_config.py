"""Reads the ``config.json`` beside OpenAI's own files of GPT-OSS as Hugging Face's: the same model in other words."""

from collections.abc import Mapping
from typing import Any, Final

_END_TOKENS: Final = (200002, 199999, 200012)
"""Of generation_config.json in the same repositories: <|return|>, <|endoftext|> and <|call|>."""
_SAME: Final = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window", "rope_theta"),
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "num_experts": 128,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}


def fields_of_openai(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that Hugging Face's ``config.json`` has for a model of OpenAI's.

    Fields that neither file has are those of GPT-OSS's class, such as windows in every other layer.
    """
    own = {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    context, factor = own["initial_context_length"], own["rope_scaling_factor"]
    is_countable = isinstance(context, int) and isinstance(factor, int | float)
    size = config.get("vocab_size")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{name: config[name] for name in _SAME if name in config},
        "num_local_experts": own["num_experts"],
        "num_experts_per_tok": own["experts_per_token"],
        "max_position_embeddings": int(context * factor) if is_countable else context,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": own["rope_ntk_beta"],
            "beta_slow": own["rope_ntk_alpha"],
            "original_max_position_embeddings": context,
            "truncate": False,
        },
        "eos_token_id": [token for token in _END_TOKENS if isinstance(size, int) and token < size],
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
