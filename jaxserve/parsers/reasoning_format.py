"""What every format of reasoning declares."""

import re
from typing import ClassVar

_SPECIAL_TOKENS = re.compile(r"\A(?:\s*<[|｜][^<>|｜]*[|｜]>)+")


class ReasoningFormat:
    """A format of reasoning, between tags unless a subclass reads it otherwise (`HarmonyReasoning`)."""

    start_text: ClassVar[str]
    end_text: ClassVar[str]
    content_texts: ClassVar[tuple[str, ...]] = ()
    """Texts, one somewhere after the other, after which the content starts; empty: it starts after `end_text`."""
    is_repeated: ClassVar[bool] = False
    """Whether reasoning may begin anywhere, not only at the beginning of the completion."""
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
