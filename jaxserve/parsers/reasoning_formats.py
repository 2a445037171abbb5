"""Formats of reasoning. Each splits a completion into reasoning and the rest."""

from collections.abc import Mapping
from typing import ClassVar

from jaxserve.parsers.harmony import HarmonyReasoning
from jaxserve.parsers.reasoning_format import Emit, ReasoningFormat
from jaxserve.parsers.source import Reading, Source


class Qwen3Reasoning(ReasoningFormat):
    """<think>…</think> at the beginning of the completion, if at all.

    With `enable_thinking=False` the template writes an empty pair into the prompt, and the completion has none.
    DeepSeek V3.1 reasons only if its template was asked to (`thinking=True`): the prompt then opens the reasoning, and
    otherwise closes it.
    """

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"

    def run(self, source: Source, starts_inside: bool | None, reasoning: Emit, content: Emit) -> Reading[None]:
        """Read to the end of the text."""
        is_started = yield from source.match([self.start_text])
        if is_started or starts_inside:
            yield from source.read_until(self.end_text, reasoning)
        yield from _pass_rest(source, content)


class DeepSeekR1Reasoning(ReasoningFormat):
    """Reasoning up to </think>, with or without <think> before it, unless the prompt has already closed it."""

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return True unless the prompt has closed the reasoning."""
        return starts_inside is not False

    def run(self, source: Source, starts_inside: bool | None, reasoning: Emit, content: Emit) -> Reading[None]:
        """Read to the end of the text."""
        yield from Qwen3Reasoning().run(source, self.begins_inside(starts_inside), reasoning, content)


class ThinkReasoning(ReasoningFormat):
    """<think>…</think> anywhere, any number of times."""

    start_text: ClassVar[str] = "<think>"
    end_text: ClassVar[str] = "</think>"

    def run(self, source: Source, starts_inside: bool | None, reasoning: Emit, content: Emit) -> Reading[None]:
        """Read to the end of the text."""
        is_inside = bool((yield from source.match([self.start_text])) or starts_inside)
        is_going = True
        while is_going:
            marker, emit = (self.end_text, reasoning) if is_inside else (self.start_text, content)
            is_going = yield from source.read_until(marker, emit)
            is_inside = not is_inside


REASONING_FORMATS: Mapping[str, type[ReasoningFormat]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "deepseek_v3": Qwen3Reasoning,
    "openai_gptoss": HarmonyReasoning,
    "qwen3": Qwen3Reasoning,
    "think": ThinkReasoning,
}


def _pass_rest(source: Source, emit: Emit) -> Reading[None]:
    while (yield from source.peek()):
        rest = source.rest()
        emit(rest)
        source.advance(len(rest))
