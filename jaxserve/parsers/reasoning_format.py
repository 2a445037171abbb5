"""What every format of reasoning declares."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from jaxserve.parsers.source import Reading, Source

Emit = Callable[[str], None]


class ReasoningFormat(ABC):
    """A format of reasoning."""

    start_text: ClassVar[str]
    end_text: ClassVar[str]
    content_texts: ClassVar[tuple[str, ...]] = ()
    """Texts, one somewhere after the other, after which the content starts; empty: it starts after `end_text`."""
    call_texts: ClassVar[tuple[str, ...]] = ()
    """Texts that start a tool call before the content; forbidden where a grammar forces the call into the content."""
    has_special_markers: ClassVar[bool] = False
    """Whether the markers are special tokens; completions must then be generated with `skip_special_tokens=False`."""

    @classmethod
    def begins_inside(cls, starts_inside: bool | None) -> bool | None:
        """Return whether a completion begins before the content; None if it does only if it begins with `start_text`.

        Args:
          starts_inside: As in `run`.
        """
        return starts_inside

    @classmethod
    def content_start(cls) -> tuple[str, ...]:
        """Return the texts, one somewhere after the other, after which the content starts."""
        return cls.content_texts or (cls.end_text,)

    @abstractmethod
    def run(self, source: Source, starts_inside: bool | None, reasoning: Emit, content: Emit) -> Reading[None]:
        """Read to the end of the text.

        Args:
          source: The text.
          starts_inside: Whether the prompt has already opened the reasoning; None if it has no markers.
          reasoning: Receives the reasoning, without its tags.
          content: Receives the rest.
        """
