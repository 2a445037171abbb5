"""Supported architectures, one line each: from the name in ``config.json`` to the family's module.

A checkpoint that was saved without the output head has the name of another class, such as ``Qwen3Model``: it is the
same architecture, for embeddings alone. Of a multimodal class, the language model runs; see
:mod:`jaxserve.models.text_half`.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast, runtime_checkable

from jaxserve.api.errors import ConfigError, UnsupportedModelError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields, check_quantization
from jaxserve.models.refused import other_class, refusal
from jaxserve.models.text_half import PREFIXES, TEXT_HALVES, text_fields
from jaxserve.parsers import FamilyParsers

FAMILIES: Final[dict[str, str]] = {
    "AfmoeForCausalLM": "jaxserve.models.afmoe",
    "ApertusForCausalLM": "jaxserve.models.apertus",
    "ArceeForCausalLM": "jaxserve.models.arcee",
    "BaiChuanForCausalLM": "jaxserve.models.baichuan",
    "BaichuanForCausalLM": "jaxserve.models.baichuan",
    "BambaForCausalLM": "jaxserve.models.bamba",
    "Cohere2ForCausalLM": "jaxserve.models.cohere2",
    "Cohere2MoeForCausalLM": "jaxserve.models.cohere2_moe",
    "CohereForCausalLM": "jaxserve.models.cohere2",
    "CwmForCausalLM": "jaxserve.models.cwm",
    "DeepseekV2ForCausalLM": "jaxserve.models.deepseek_v2",
    "DeepseekV32ForCausalLM": "jaxserve.models.deepseek_v32",
    "DeepseekV3ForCausalLM": "jaxserve.models.deepseek_v3",
    "Dots1ForCausalLM": "jaxserve.models.dots1",
    "Ernie4_5ForCausalLM": "jaxserve.models.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "jaxserve.models.ernie4_5_moe",
    "Exaone4ForCausalLM": "jaxserve.models.exaone4",
    "ExaoneMoeForCausalLM": "jaxserve.models.exaone_moe",
    "FalconH1ForCausalLM": "jaxserve.models.falcon_h1",
    "FlexOlmoForCausalLM": "jaxserve.models.flex_olmo",
    "GPT2LMHeadModel": "jaxserve.models.gpt2",
    "GPTBigCodeForCausalLM": "jaxserve.models.gpt2",
    "GPTJForCausalLM": "jaxserve.models.gptj",
    "GPTNeoForCausalLM": "jaxserve.models.gpt_neo",
    "GPTNeoXForCausalLM": "jaxserve.models.gpt_neox",
    "Gemma2ForCausalLM": "jaxserve.models.gemma2",
    "Gemma3ForCausalLM": "jaxserve.models.gemma3",
    "Gemma4ForCausalLM": "jaxserve.models.gemma4",
    "Gemma4UnifiedForCausalLM": "jaxserve.models.gemma4",
    "GemmaForCausalLM": "jaxserve.models.gemma",
    "Glm4ForCausalLM": "jaxserve.models.glm4",
    "Glm4MoeForCausalLM": "jaxserve.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "jaxserve.models.glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "jaxserve.models.deepseek_v32",
    "GlmForCausalLM": "jaxserve.models.glm",
    "GptOssForCausalLM": "jaxserve.models.gpt_oss",
    "GraniteForCausalLM": "jaxserve.models.granite",
    "GraniteMoeForCausalLM": "jaxserve.models.granite_moe",
    "GraniteMoeHybridForCausalLM": "jaxserve.models.granite_shared",
    "GraniteMoeSharedForCausalLM": "jaxserve.models.granite_shared",
    "HYV3ForCausalLM": "jaxserve.models.hy_v3",
    "HeliumForCausalLM": "jaxserve.models.helium",
    "HunYuanDenseV1ForCausalLM": "jaxserve.models.hunyuan",
    "HunYuanMoEV1ForCausalLM": "jaxserve.models.hunyuan_moe",
    "HyperCLOVAXForCausalLM": "jaxserve.models.hyperclovax",
    "Jais2ForCausalLM": "jaxserve.models.nemotron",
    "KimiLinearForCausalLM": "jaxserve.models.kimi_linear",
    "LagunaForCausalLM": "jaxserve.models.laguna",
    "Lfm2ForCausalLM": "jaxserve.models.lfm2",
    "Lfm2MoeForCausalLM": "jaxserve.models.lfm2",
    "Llama4ForCausalLM": "jaxserve.models.llama4",
    "LlamaForCausalLM": "jaxserve.models.llama",
    "Mamba2ForCausalLM": "jaxserve.models.mamba2",
    "MellumForCausalLM": "jaxserve.models.mellum",
    "MiniMaxM2ForCausalLM": "jaxserve.models.minimax_m2",
    "Ministral3ForCausalLM": "jaxserve.models.ministral3",
    "MinistralForCausalLM": "jaxserve.models.mistral",
    "Mistral4ForCausalLM": "jaxserve.models.mistral4",
    "MistralForCausalLM": "jaxserve.models.mistral",
    "MixtralForCausalLM": "jaxserve.models.mixtral",
    "MuseGlimmerForCausalLM": "jaxserve.models.muse_glimmer",
    "NanoChatForCausalLM": "jaxserve.models.nanochat",
    "NemotronForCausalLM": "jaxserve.models.nemotron",
    "NemotronHForCausalLM": "jaxserve.models.nemotron_h",
    "OPTForCausalLM": "jaxserve.models.opt",
    "Olmo2ForCausalLM": "jaxserve.models.olmo2",
    "Olmo3ForCausalLM": "jaxserve.models.olmo3",
    "OlmoeForCausalLM": "jaxserve.models.olmoe",
    "Phi3ForCausalLM": "jaxserve.models.phi3",
    "PhiForCausalLM": "jaxserve.models.phi",
    "PhimoeForCausalLM": "jaxserve.models.phimoe",
    "Qwen2ForCausalLM": "jaxserve.models.qwen2",
    "Qwen2MoeForCausalLM": "jaxserve.models.qwen2_moe",
    "Qwen3ForCausalLM": "jaxserve.models.qwen3",
    "Qwen3MoeForCausalLM": "jaxserve.models.qwen3_moe",
    "Qwen3NextForCausalLM": "jaxserve.models.qwen3_next",
    "Qwen3_5ForCausalLM": "jaxserve.models.qwen3_next",
    "Qwen3_5MoeForCausalLM": "jaxserve.models.qwen3_next",
    "SeedOssForCausalLM": "jaxserve.models.seed_oss",
    "SmolLM3ForCausalLM": "jaxserve.models.smollm3",
    "SolarOpenForCausalLM": "jaxserve.models.solar_open",
    "StableLmForCausalLM": "jaxserve.models.stablelm",
    "Starcoder2ForCausalLM": "jaxserve.models.starcoder2",
    "VaultGemmaForCausalLM": "jaxserve.models.vaultgemma",
    "YoutuForCausalLM": "jaxserve.models.youtu",
}

PARSERS: Final[Mapping[str, FamilyParsers]] = {
    "AfmoeForCausalLM": FamilyParsers(("hermes",), ("deepseek_r1",)),
    "ApertusForCausalLM": FamilyParsers(("apertus",), ("apertus",)),
    "Cohere2ForCausalLM": FamilyParsers(("cohere_command3",), ("cohere_command3",)),
    "Cohere2MoeForCausalLM": FamilyParsers(("cohere_command4",), ("cohere_command4",)),
    "DeepseekV2ForCausalLM": FamilyParsers(("deepseek_v3",)),
    "DeepseekV32ForCausalLM": FamilyParsers(("deepseek_v32",), ("deepseek_v3",)),
    "DeepseekV3ForCausalLM": FamilyParsers(("kimi_k2", "deepseek_v3"), ("deepseek_v3",)),
    "Ernie4_5ForCausalLM": FamilyParsers(("ernie45",), ("ernie45",)),
    "Ernie4_5_MoeForCausalLM": FamilyParsers(("ernie45",), ("ernie45",)),
    "Exaone4ForCausalLM": FamilyParsers(("hermes",), ("qwen3",)),
    "ExaoneMoeForCausalLM": FamilyParsers(("hermes",), ("qwen3",)),
    "Gemma3ForCausalLM": FamilyParsers(("pythonic",)),
    "Gemma4ForCausalLM": FamilyParsers(("gemma4",), ("gemma4",)),
    "Gemma4UnifiedForCausalLM": FamilyParsers(("gemma4",), ("gemma4",)),
    "Glm4MoeForCausalLM": FamilyParsers(("glm45",), ("glm45",)),
    "Glm4MoeLiteForCausalLM": FamilyParsers(("glm47",), ("glm47",)),
    "GlmMoeDsaForCausalLM": FamilyParsers(("glm47",), ("glm47",)),
    "GptOssForCausalLM": FamilyParsers(("openai",), ("openai_gptoss",)),
    "GraniteForCausalLM": FamilyParsers(("granite",), ("granite",)),
    "GraniteMoeForCausalLM": FamilyParsers(("granite",)),
    "GraniteMoeHybridForCausalLM": FamilyParsers(("granite4",)),
    "GraniteMoeSharedForCausalLM": FamilyParsers(("granite4",)),
    "HYV3ForCausalLM": FamilyParsers(("hy_v3",), ("hy_v3",)),
    "HunYuanDenseV1ForCausalLM": FamilyParsers(("hunyuan_a13b",), ("hunyuan_a13b",)),
    "HunYuanMoEV1ForCausalLM": FamilyParsers(("hunyuan_a13b",), ("hunyuan_a13b",)),
    "KimiLinearForCausalLM": FamilyParsers(("kimi_k2",)),
    "LagunaForCausalLM": FamilyParsers(("poolside_v1",), ("poolside_v1",)),
    "Llama4ForCausalLM": FamilyParsers(("llama4_pythonic",)),
    "LlamaForCausalLM": FamilyParsers(("deepseek_v3", "hermes", "llama3_json"), ("qwen3",)),
    "MiniMaxM2ForCausalLM": FamilyParsers(("minimax_m2",), ("minimax_m2",)),
    "Ministral3ForCausalLM": FamilyParsers(("mistral",), ("mistral",)),
    "MinistralForCausalLM": FamilyParsers(("mistral",)),
    "Mistral4ForCausalLM": FamilyParsers(("mistral",), ("mistral",)),
    "MistralForCausalLM": FamilyParsers(("hermes", "mistral"), ("mistral",)),
    "MixtralForCausalLM": FamilyParsers(("hermes", "mistral")),
    "Olmo3ForCausalLM": FamilyParsers(("olmo3",), ("olmo3",)),
    "Phi3ForCausalLM": FamilyParsers(("phi4_mini_json",), ("qwen3",)),
    "Qwen2ForCausalLM": FamilyParsers(("deepseek_v3", "hermes"), ("qwen3",)),
    "Qwen2MoeForCausalLM": FamilyParsers(("hermes",)),
    "Qwen3ForCausalLM": FamilyParsers(("deepseek_v3", "qwen3"), ("qwen3",)),
    "Qwen3MoeForCausalLM": FamilyParsers(("qwen3",), ("qwen3",)),
    "SeedOssForCausalLM": FamilyParsers(("seed_oss",), ("seed_oss",)),
    "SmolLM3ForCausalLM": FamilyParsers(("hermes",), ("qwen3",)),
}
"""Formats of tool calls and reasoning, which ``auto`` chooses from; families that are not here have no known one."""


@runtime_checkable
class Family(Protocol):
    """The functions that the module of a family provides."""

    def config_from_hf(self, fields: ConfigFields, architecture: str) -> ModelConfig:
        """Return the model that ``config.json`` describes; problems are recorded in ``fields`` and raised by the
        caller."""
        ...

    def build(self, config: Any, scope: Scope) -> CausalLM:
        """Build the module of a model that ``config_from_hf`` returned."""
        ...


def supported_architectures() -> tuple[str, ...]:
    """Return the supported names of ``architectures`` in config.json, in alphabetical order."""
    return tuple(sorted((*FAMILIES, *TEXT_HALVES)))


def family_parsers(architecture: str) -> FamilyParsers:
    """Return the formats of tool calls and reasoning of an architecture; those of a multimodal one are its language
    model's."""
    half = TEXT_HALVES.get(architecture)
    return PARSERS.get(architecture if half is None else next(iter(half.families.values())), FamilyParsers())


def config_from_hf(raw: Mapping[str, Any], path: str) -> ModelConfig:
    """Return the model that a Hugging Face config describes.

    Args:
        raw: The object in ``config.json``.
        path: Its file, for messages.

    Raises:
        UnsupportedModelError: The architecture or variant is not supported, or its weights are quantized
            in a way that is not.
        ConfigError: Fields are missing or wrong; one error lists all of them.
    """
    fields = ConfigFields(raw, path)
    whole = _architecture(fields)
    check_quantization(fields)
    stated = text_fields(raw)
    fields, architecture = _of_language_model(fields, whole, ConfigFields(stated, path))
    config = family(architecture).config_from_hf(fields, architecture)
    fields.raise_problems()
    config = dataclasses.replace(
        config,
        has_default_eos="eos_token_id" not in stated,
        multimodal=whole if whole in TEXT_HALVES else None,
        may_share_head=whole in TEXT_HALVES and stated.get("tie_word_embeddings") is None,
    )
    return config if whole in fields.raw["architectures"] else without_head(config)


def _of_language_model(fields: ConfigFields, architecture: str, inner: ConfigFields) -> tuple[ConfigFields, str]:
    """Return the fields of the language model of a multimodal class, and its own class; those of another class as they
    are.

    Args:
        fields: Fields of the file.
        architecture: The class that it names.
        inner: Those of the language model.
    """
    if architecture not in TEXT_HALVES:
        return fields, architecture
    half = TEXT_HALVES[architecture]
    if "hidden_size" not in inner.raw and not isinstance(fields.raw.get("text_config"), dict):
        fields.note("text_config", "expected an object with the fields of the language model, but it is missing")
    kind = inner.text("model_type", "") or next(iter(half.families))
    kind = f"{kind}_text" if f"{kind}_text" in half.families else kind
    if kind not in half.families:
        fields.note("text_config.model_type", f"expected one of {', '.join(half.families)}, got {kind!r}")
    fields.raise_problems()
    return inner.with_missing(half.defaults_of(kind)), half.families[kind]


def without_head(config: ModelConfig) -> ModelConfig:
    """Return a model for embeddings alone, which has no weights of a head."""
    return dataclasses.replace(config, has_head=False, tie_embeddings=True)


def build_model(config: ModelConfig, scope: Scope = Scope()) -> CausalLM:  # noqa: B008 - frozen
    """Build the module of a model, with zeros for weights; ``build_model(config)(tokens)`` runs on one device.

    Args:
        config: The model.
        scope: How it is split and stored.

    Raises:
        ConfigError: The devices cannot share its weights.
    """
    model = family(config.architecture).build(config, scope)
    if config.multimodal is not None:
        model.ignored, model.prefixes = TEXT_HALVES[config.multimodal].ignored(model.ignored), PREFIXES
    return model


def family(architecture: str) -> Family:
    """Return the module of the family that an architecture belongs to.

    Raises:
        UnsupportedModelError: The architecture is unknown; the message lists the supported ones.
    """
    if architecture not in FAMILIES:
        raise UnsupportedModelError(_unsupported(architecture))
    return cast(Family, importlib.import_module(FAMILIES[architecture]))


def _architecture(fields: ConfigFields) -> str:
    """Return the first supported name in ``architectures``; that of the model with a head for one without."""
    names = fields.items("architectures")
    fields.raise_problems()
    if not names:
        raise ConfigError(
            f"{fields.path}: expected the field architectures to name the model's architecture, but it is "
            f"{'missing' if names is None else 'empty'}; supported: {', '.join(supported_architectures())}"
        )
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise ConfigError(f"{fields.path}: architectures[{index}]: expected a string, got {name!r:.80}")
        for known in (name, *_with_head(name, is_multimodal="text_config" in fields.raw)):
            if known in FAMILIES or known in TEXT_HALVES:
                return known
    raise UnsupportedModelError(
        f"{fields.path}: {_unsupported(*cast('tuple[str, ...]', names), has_code=fields.is_given('auto_map'))}"
    )


def _with_head(architecture: str, *, is_multimodal: bool) -> tuple[str, ...]:
    """Return the classes with a head that a class without one may belong to: LlamaForCausalLM for LlamaModel."""
    stem = architecture.removesuffix("Model").removesuffix("Text")
    causal = {"GPT2": "GPT2LMHeadModel"}.get(stem, f"{stem}ForCausalLM")
    whole = f"{stem}ForConditionalGeneration"
    return (whole, causal) if is_multimodal else (causal, whole)


def _unsupported(*architectures: str, has_code: bool = False) -> str:
    """Say that no class runs: why, and the nearest that does; the whole list where the reason is not known.

    Args:
        architectures: The names in config.json.
        has_code: Whether the checkpoint has code of its own for them.
    """
    known, start = supported_architectures(), f"architecture {', '.join(architectures)} is not supported; supported:"
    for name in architectures:
        refused, other = refusal(name), other_class(name, known)
        if refused is not None:
            return f"{start} {refused.nearest}, which is the nearest; {name} {refused.reason}"
        if other is not None:
            return f"{start} {other}, the same model with an output head for tokens"
    close = difflib.get_close_matches(architectures[0], known, n=1, cutoff=0.85)
    question = f"; did you mean {close[0]}?" if close else ""
    code = "; code in the checkpoint (auto_map) is never run" if has_code else ""
    return f"{start} {', '.join(known)}{code}{question}"
