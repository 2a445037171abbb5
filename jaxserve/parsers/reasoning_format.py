"""What every format of reasoning declares."""

from abc import ABC, abstractmethod
from typing import ClassVar


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
          starts_inside: Whether the prompt has already opened the reasoning; None if it has no markers.
        """
        return starts_inside

    @classmethod
    def content_start(cls) -> tuple[str, ...]:
        """Return the texts, one somewhere after the other, after which the content starts."""
        return cls.content_texts or (cls.end_text,)

    @classmethod
    @abstractmethod
    def ends_inside(cls, turn: str) -> bool | None:
        """Return whether the beginning of an assistant's turn ends inside the reasoning (True) or after it (False);
        None if the turn has no text yet."""
