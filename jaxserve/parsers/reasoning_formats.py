"""Formats of reasoning. Each splits a completion into reasoning and the rest."""

import re
from collections.abc import Mapping
from typing import ClassVar

from jaxserve.parsers.harmony import HarmonyReasoning
from jaxserve.parsers.reasoning_format import ReasoningFormat

_SPECIAL_TOKENS = re.compile(r"\A(?:\s*<[|｜][^<>|｜]*[|｜]>)+")


class TagReasoning(ReasoningFormat):
    """<think>…</think>."""

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"
    is_repeated: ClassVar[bool] = False
    """Whether reasoning may begin anywhere, not only at the beginning of the completion."""

    @classmethod
    def ends_inside(cls, turn: str) -> bool | None:
        """Return whether the beginning of an assistant's turn ends inside the reasoning (True) or after it (False);
        None if the turn has no text yet."""
        start, end = cls.start_text, cls.end_text
        if cls.is_repeated and start in turn:
            return turn.rfind(start) > turn.rfind(end)
        rest = _SPECIAL_TOKENS.sub("", turn).lstrip()
        while rest.startswith(start):
            _, is_closed, rest = rest.partition(end)
            if not is_closed:
                return True
            rest = rest.lstrip()
        return False if rest or end in turn else None


class Qwen3Reasoning(TagReasoning):
    """<think>…</think> at the beginning of the completion, if at all.

    With `enable_thinking=False` the template writes an empty pair into the prompt, and the completion has none.
    DeepSeek V3.1 reasons only if its template was asked to (`thinking=True`): the prompt then opens the reasoning, and
    otherwise closes it.
    """


class DeepSeekR1Reasoning(TagReasoning):
    """Reasoning up to </think>, with or without <think> before it, unless the prompt has already closed it."""

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return True unless the prompt has closed the reasoning."""
        return starts_inside is not False


class ThinkReasoning(TagReasoning):
    """<think>…</think> anywhere, any number of times."""

    is_repeated: ClassVar[bool] = True


class SeedReasoning(TagReasoning):
    """<seed:think>…</seed:think> at the beginning of the completion, if at all: Seed-OSS."""

    start_text: ClassVar[str] = "<seed:think>"
    end_text: ClassVar[str] = "</seed:think>"


class MistralReasoning(TagReasoning):
    """[THINK]…[/THINK], two special tokens, at the beginning of the completion, if at all: Magistral, Ministral 3."""

    start_text: ClassVar[str] = "[THINK]"
    end_text: ClassVar[str] = "[/THINK]"
    has_special_markers: ClassVar[bool] = True


REASONING_FORMATS: Mapping[str, type[ReasoningFormat]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "deepseek_v3": Qwen3Reasoning,
    "ernie45": DeepSeekR1Reasoning,
    "glm45": Qwen3Reasoning,
    "hy_v3": Qwen3Reasoning,
    "minimax_m2": DeepSeekR1Reasoning,
    "mistral": MistralReasoning,
    "olmo3": DeepSeekR1Reasoning,
    "openai_gptoss": HarmonyReasoning,
    "qwen3": Qwen3Reasoning,
    "seed_oss": SeedReasoning,
    "think": ThinkReasoning,
}
