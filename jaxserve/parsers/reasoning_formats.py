"""Formats of reasoning. Each splits a completion into reasoning and the rest."""

from collections.abc import Mapping
from typing import ClassVar

from jaxserve.parsers.harmony import HarmonyReasoning
from jaxserve.parsers.reasoning_format import ReasoningFormat
from jaxserve.parsers.tag_reasoning import TagReasoning


class Qwen3Reasoning(TagReasoning):
    """<think>…</think> at the beginning of the completion, if at all.

    With `enable_thinking=False` the template writes an empty pair into the prompt, and the completion has none.
    DeepSeek V3.1 reasons only if its template was asked to (`thinking=True`): the prompt then opens the reasoning, and
    otherwise closes it.
    """


class DeepSeekR1Reasoning(TagReasoning):
    """Reasoning up to </think>, with or without <think> before it, unless the prompt has already closed it."""

    is_open_by_default: ClassVar[bool] = True


class ErnieReasoning(TagReasoning):
    """DeepSeek R1's form; the content may be between <response> and </response>: ERNIE 4.5 Thinking."""

    is_open_by_default: ClassVar[bool] = True
    content_tags: ClassVar[Mapping[str, str]] = {"<response>": "</response>"}


class ThinkReasoning(TagReasoning):
    """<think>…</think> anywhere, any number of times."""

    is_repeated: ClassVar[bool] = True


class HunyuanReasoning(TagReasoning):
    """<think>…</think><answer>…</answer>: Hunyuan."""

    content_tags: ClassVar[Mapping[str, str]] = {"<answer>": "</answer>"}


class GraniteReasoning(TagReasoning):
    """Sentences before the reasoning and the content: Granite 3.2."""

    start_text: ClassVar[str] = "Here is my thought process:"
    end_text: ClassVar[str] = "Here is my response:"


class SeedReasoning(TagReasoning):
    """<seed:think>…</seed:think> at the beginning of the completion, if at all: Seed-OSS."""

    start_text: ClassVar[str] = "<seed:think>"
    end_text: ClassVar[str] = "</seed:think>"


class MistralReasoning(TagReasoning):
    """[THINK]…[/THINK], two special tokens, at the beginning of the completion, if at all: Magistral, Ministral 3."""

    start_text: ClassVar[str] = "[THINK]"
    end_text: ClassVar[str] = "[/THINK]"
    has_special_markers: ClassVar[bool] = True


class ApertusReasoning(TagReasoning):
    """<|inner_prefix|>…<|inner_suffix|> anywhere, any number of times: Apertus. All markers are special tokens."""

    start_text: ClassVar[str] = "<|inner_prefix|>"
    end_text: ClassVar[str] = "<|inner_suffix|>"
    call_texts: ClassVar[tuple[str, ...]] = ("<|tools_prefix|>",)
    has_special_markers: ClassVar[bool] = True
    is_repeated: ClassVar[bool] = True


class CohereReasoning(TagReasoning):
    """<|START_THINKING|>…<|END_THINKING|>, then the content between <|START_RESPONSE|> and <|END_RESPONSE|>: Cohere.

    Command R7B and A write these special tokens; later models have TEXT in place of RESPONSE.
    """

    start_text: ClassVar[str] = "<|START_THINKING|>"
    end_text: ClassVar[str] = "<|END_THINKING|>"
    content_tags: ClassVar[Mapping[str, str]] = {
        "<|START_RESPONSE|>": "<|END_RESPONSE|>",
        "<|START_TEXT|>": "<|END_TEXT|>",
    }
    has_special_markers: ClassVar[bool] = True


class Gemma4Reasoning(TagReasoning):
    """<|channel>thought, a line break, …<channel|>: Gemma 4. The tags and the marker of a call are special tokens."""

    start_text: ClassVar[str] = "<|channel>"
    end_text: ClassVar[str] = "<channel|>"
    label: ClassVar[str] = "thought\n"
    call_texts: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    has_special_markers: ClassVar[bool] = True

    @classmethod
    def ends_inside(cls, turn: str) -> bool | None:
        """Return where a turn ends, as `TagReasoning`; after a tool's response in it the model may reason again."""
        return super().ends_inside(turn.rpartition("<tool_response|>")[2])


REASONING_FORMATS: Mapping[str, type[ReasoningFormat]] = {
    "apertus": ApertusReasoning,
    "cohere_command3": CohereReasoning,
    "cohere_command4": CohereReasoning,
    "deepseek_r1": DeepSeekR1Reasoning,
    "deepseek_v3": Qwen3Reasoning,
    "ernie45": ErnieReasoning,
    "gemma4": Gemma4Reasoning,
    "glm45": Qwen3Reasoning,
    "glm47": Qwen3Reasoning,
    "granite": GraniteReasoning,
    "hunyuan_a13b": HunyuanReasoning,
    "hy_v3": Qwen3Reasoning,
    "kimi_k2": Qwen3Reasoning,
    "minimax_m2": DeepSeekR1Reasoning,
    "mistral": MistralReasoning,
    "olmo3": DeepSeekR1Reasoning,
    "openai_gptoss": HarmonyReasoning,
    "poolside_v1": Qwen3Reasoning,
    "qwen3": Qwen3Reasoning,
    "seed_oss": SeedReasoning,
    "think": ThinkReasoning,
}
