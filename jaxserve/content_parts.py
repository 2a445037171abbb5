"""Contents of messages as lists of parts, in the forms of OpenAI's APIs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

TEXT_PARTS = MappingProxyType(
    {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
)
"""Types of parts that are text -> the key that has it."""


def part_text(part: Any) -> str | None:
    """The text of a part, which may be a bare string and have no type; None where it is no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    given = cast("Mapping[str, Any]", part)
    kind = given.get("type", "text")
    found = given.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return found if isinstance(found, str) else None
