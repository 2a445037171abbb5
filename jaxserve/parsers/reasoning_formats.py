"""Formats of reasoning. Each splits a completion into reasoning and the rest."""

from collections.abc import Mapping
from typing import ClassVar

from jaxserve.parsers.harmony import HarmonyReasoning
from jaxserve.parsers.reasoning_format import ReasoningFormat


class Qwen3Reasoning(ReasoningFormat):
    """<think>…</think> at the beginning of the completion, if at all.

    With `enable_thinking=False` the template writes an empty pair into the prompt, and the completion has none.
    DeepSeek V3.1 reasons only if its template was asked to (`thinking=True`): the prompt then opens the reasoning, and
    otherwise closes it.
    """

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"


class DeepSeekR1Reasoning(Qwen3Reasoning):
    """Reasoning up to </think>, with or without <think> before it, unless the prompt has already closed it."""

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return True unless the prompt has closed the reasoning."""
        return starts_inside is not False


class ThinkReasoning(Qwen3Reasoning):
    """<think>…</think> anywhere, any number of times."""

    is_repeated: ClassVar[bool] = True


REASONING_FORMATS: Mapping[str, type[ReasoningFormat]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "deepseek_v3": Qwen3Reasoning,
    "openai_gptoss": HarmonyReasoning,
    "qwen3": Qwen3Reasoning,
    "think": ThinkReasoning,
}
