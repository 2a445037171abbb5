"""The text half of multimodal checkpoints: its fields of ``config.json``, and the names of its tensors.

The class of such a checkpoint ends in ``ForConditionalGeneration``. It has a language model of a known family, whose
fields are in ``text_config``, and encoders of images or audio, whose tensors are not loaded.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from jaxserve.models.hf_decoder import class_sizes

_OF_WHOLE: Final = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
    "quantization",
    "bos_token_id",
    "eos_token_id",
)
"""Fields beside ``text_config`` that are the language model's too."""

PREFIXES: Final = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.model.", ""),
    ("language_model.", ""),
)
"""What stands for ``model.`` in the names of the language model's tensors, besides ``model.`` itself, and what stands
before the head's name. The second form is that of transformers before 4.52 and of most published files; the third was
written by some versions after 5.10; the last is that of checkpoints that were saved without the head."""


class TextHalf(NamedTuple):
    """The language model of a multimodal class.

    Attributes:
        families: Class of the language model by the ``model_type`` of ``text_config``; the first where that is missing.
        others: Modules and tensors that are not the language model's, and are ignored.
        defaults: Values of the fields that ``text_config`` may leave out, as in the class of transformers.
    """

    families: Mapping[str, str]
    others: tuple[str, ...]
    defaults: Mapping[str, Any]

    def defaults_of(self, kind: str) -> dict[str, Any]:
        """Return the defaults for a ``model_type`` of ``text_config``."""
        return {**_CLASSES.get(kind, {}), **self.defaults}

    def ignored(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return regular expressions of the full names of tensors to ignore.

        Args:
            patterns: Those that the language model ignores, in its own names.
        """
        own = (
            r"(model\.)?(language_model\.)?(model\.)?" + pattern.removeprefix(r"model\.").removeprefix(r"(model\.)?")
            for pattern in patterns
        )
        return (*own, *(rf"(model\.)?{re.escape(module)}(\..*)?" for module in self.others))


_CLASSES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": class_sizes(32000, 4096, 11008, 32, 32, 2048),
    "mistral": class_sizes(32000, 4096, 14336, 32, 32, 131072),
    "qwen2": class_sizes(151936, 4096, 22016, 32, 32, 32768),
    "qwen3": class_sizes(151936, 4096, 22016, 32, 32, 32768),
    "qwen3_moe": class_sizes(151936, 2048, 6144, 24, 32, 32768),
}
"""Values of the fields that classes of language models have by default, where their own checkpoints state them."""
_GEMMA4_OTHERS: Final = ("vision_tower", "embed_vision", "audio_tower", "embed_audio", "vision_embedder")
_VISION: Final = ("vision_tower", "multi_modal_projector")
_LLAMA: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_QWEN: Final = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_GLM4V: Final = {
    **class_sizes(151552, 4096, 13696, 40, 32, 32768),
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}
_GLM4V_MOE: Final = {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
_QWEN2_VL: Final = {
    **class_sizes(152064, 8192, 29568, 80, 64, 32768),
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_VL: Final = {
    **class_sizes(151936, 4096, 22016, 32, 32, 128000),
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rope_theta": 500000.0,
}
_QWEN3_VL_MOE: Final = {
    **class_sizes(151936, 2048, 5632, 24, 16, 128000),
    "num_key_value_heads": 16,
    "rope_theta": 500000.0,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": True,
}
TEXT_HALVES: Final[Mapping[str, TextHalf]] = {
    "Exaone4_5_ForConditionalGeneration": TextHalf(
        dict.fromkeys(("exaone4", "exaone4_5_text"), "Exaone4ForCausalLM"), ("visual",), {}
    ),
    "Gemma3ForConditionalGeneration": TextHalf(
        {"gemma3_text": "Gemma3ForCausalLM"},
        _VISION,
        {**class_sizes(262208, 2304, 9216, 26, 8, 131072), "tie_word_embeddings": True},
    ),
    "Gemma4ForConditionalGeneration": TextHalf(
        {"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA4_OTHERS, {"tie_word_embeddings": True}
    ),
    "Gemma4UnifiedForConditionalGeneration": TextHalf(
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _GEMMA4_OTHERS, {"tie_word_embeddings": True}
    ),
    "Glm46VForConditionalGeneration": TextHalf({"glm4v_text": "Glm4ForCausalLM"}, ("visual",), _GLM4V),
    "Glm4vForConditionalGeneration": TextHalf({"glm4v_text": "Glm4ForCausalLM"}, ("visual",), _GLM4V),
    "Glm4vMoeForConditionalGeneration": TextHalf({"glm4v_moe_text": "Glm4MoeForCausalLM"}, ("visual",), _GLM4V_MOE),
    "InternVLForConditionalGeneration": TextHalf(_QWEN | _LLAMA, _VISION, {}),
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        TextHalf(
            {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
            ("vision_tower", "mm_projector"),
            {},
        ),
    ),
    "Llama4ForConditionalGeneration": TextHalf(
        {"llama4_text": "Llama4ForCausalLM"}, ("vision_model", "multi_modal_projector"), {}
    ),
    "LlavaForConditionalGeneration": TextHalf(_LLAMA | _QWEN, _VISION, {}),
    "LlavaNextForConditionalGeneration": TextHalf(_LLAMA | _QWEN, (*_VISION, "image_newline"), {}),
    "LlavaOnevisionForConditionalGeneration": TextHalf(_QWEN | _LLAMA, (*_VISION, "image_newline"), {}),
    "Mistral3ForConditionalGeneration": TextHalf(
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        _VISION,
        class_sizes(32000, 4096, 14336, 32, 32, 131072),
    ),
    "MuseGlimmerForConditionalGeneration": TextHalf(
        {"muse_glimmer_text": "MuseGlimmerForCausalLM"}, ("vision_tower", "vision_adapter", "vision_projection"), {}
    ),
    "Qwen3_5ForConditionalGeneration": TextHalf({"qwen3_5_text": "Qwen3_5ForCausalLM"}, ("visual",), {}),
    "Qwen3_5MoeForConditionalGeneration": TextHalf({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, ("visual",), {}),
    "Qwen2VLForConditionalGeneration": TextHalf({"qwen2_vl_text": "Qwen2ForCausalLM"}, ("visual",), _QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": TextHalf({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, ("visual",), _QWEN2_VL),
    "Qwen3VLForConditionalGeneration": TextHalf({"qwen3_vl_text": "Qwen3ForCausalLM"}, ("visual",), _QWEN3_VL),
    "Qwen3VLMoeForConditionalGeneration": TextHalf(
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, ("visual",), _QWEN3_VL_MOE
    ),
}
"""By the name in ``architectures``."""


def text_fields(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of the language model of a multimodal ``config.json``, as its own file would have them.

    Files of Qwen2-VL and 2.5-VL have them beside those of the encoder, without a ``text_config``: they and the fields
    of a language model are returned as they are.

    Args:
        raw: The fields of the file.
        overrides: Values that replace those of the language model; may have a ``text_config`` with some of them.
    """
    inner, replaced = raw.get("text_config"), dict(overrides or {})
    nested = replaced.pop("text_config", None) or {}
    if not isinstance(inner, Mapping):
        return {**raw, **nested, **replaced}
    shared = {name: raw[name] for name in _OF_WHOLE if raw.get(name) is not None}
    ties = [each["tie_word_embeddings"] for each in (raw, inner) if each.get("tie_word_embeddings") is not None]
    if ties:
        shared["tie_word_embeddings"] = True if True in ties else ties[0]
    return {**inner, **shared, **nested, **replaced}
