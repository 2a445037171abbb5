"""``auto`` chooses the parsers by the model's class and its chat template."""

from pathlib import Path

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.engine.model_defaults import chosen_parsers
from jaxserve.models.registry import FAMILIES, PARSERS, family_parsers
from jaxserve.parsers import AUTO, FamilyParsers, ParserNames, chosen_reasoning, parser_names

BOTH = ParserNames(AUTO, AUTO)


@pytest.mark.parametrize(
    ("architecture", "template", "reasoning", "tools"),
    [
        ("Qwen3ForCausalLM", "<tool_call>{{ x }}</tool_call><think>", "qwen3", "qwen3"),
        ("Qwen3ForCausalLM", "<tool_call>", None, "qwen3"),
        ("Qwen3ForCausalLM", "<｜tool▁calls▁begin｜></think>", "qwen3", "deepseek_v3"),
        ("LlamaForCausalLM", "{{ x }}", None, "llama3_json"),
        ("LlamaForCausalLM", "<tool_call>", None, "hermes"),
        ("LlamaForCausalLM", "", None, "llama3_json"),
        ("DeepseekV3ForCausalLM", "<think><|tool_call_begin|>", "deepseek_v3", "kimi_k2"),
        ("DeepseekV3ForCausalLM", "<｜tool▁calls▁begin｜>", None, "deepseek_v3"),
        ("MistralForCausalLM", "[THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("GptOssForCausalLM", "", "openai_gptoss", "openai"),
        ("Gemma4ForConditionalGeneration", "<channel|><|tool_call>", "gemma4", "gemma4"),
    ],
)
def test_auto_takes_the_class_s_format(
    architecture: str, template: str, reasoning: str | None, tools: str | None
) -> None:
    chosen = parser_names(BOTH, family_parsers(architecture), architecture, template)
    assert chosen == ParserNames(reasoning, tools)


def test_names_are_used_as_they_are() -> None:
    llama4, family = family_parsers("Llama4ForConditionalGeneration"), family_parsers("Qwen3ForCausalLM")
    assert parser_names(ParserNames(None, AUTO), llama4, "", "") == ParserNames(None, "llama4_pythonic")
    assert parser_names(ParserNames(), family, "", "<think>") == ParserNames()
    assert parser_names(ParserNames(AUTO, "hermes"), family, "", "<think>") == ParserNames("qwen3", "hermes")
    assert parser_names(ParserNames("olmo3", AUTO), family, "", "<think>") == ParserNames("olmo3", "qwen3")


def test_a_family_without_a_format_is_an_error() -> None:
    expected = (
        "tool_call_parser='auto': the format of GPT2LMHeadModel is not known; name one of apertus, .*, seed_oss, "
    )
    with pytest.raises(ConfigError, match=f"{expected}or leave tool_call_parser out"):
        chosen_parsers(EngineConfig(model="demo", tool_call_parser="auto"), "GPT2LMHeadModel", None)
    expected = (
        "reasoning_parser='auto': the format of Gemma3ForCausalLM is not known; name one of apertus, cohere_command3, "
    )
    with pytest.raises(ConfigError, match=expected):
        chosen_parsers(EngineConfig(model="demo", reasoning_parser="auto"), "Gemma3ForCausalLM", None)


def test_a_chat_template_of_the_settings_decides(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}<tool_call>")
    config = EngineConfig(model="demo", tool_call_parser="auto", chat_template=str(tmp_path / "own.jinja"))
    assert chosen_parsers(config, "LlamaForCausalLM", None) == ParserNames(None, "hermes")


def test_the_registry_names_families_and_formats_that_exist() -> None:
    assert set(PARSERS) <= set(FAMILIES)
    for tools, reasoning in PARSERS.values():
        for name in tools:
            for thought in reasoning or (None,):
                assert chosen_reasoning(thought, name) in (thought, "cohere_command3", "openai_gptoss")
    assert family_parsers("Olmo2ForCausalLM") == FamilyParsers()
