"""Parameters that are objects: vLLM's names, defaults and checks (`vllm/sampling_params.py`)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import (
    Values,
    changed_fields,
    checks_fields,
    flag,
    integer,
    json_copy,
    mapping,
    parse_json,
    sequence,
    text,
    wrong_field,
)

MAX_JSON_NESTING = 64
"""Deepest nesting of objects and arrays in a JSON schema."""
MAX_PATTERN_SIZE = 1024
"""Longest pattern that ``repetition_detection`` looks for: each token is compared with as many before it."""
MAX_TAG_NESTING = 80
"""Deepest nesting in a structural tag, which wraps schemas."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _json_schema(name: str, value: object) -> str | dict[str, Any]:
    if isinstance(value, str):
        if not isinstance(parse_json(name, _filled(name, value), MAX_JSON_NESTING), dict | bool):
            raise wrong_field(name, value, "must be a JSON schema, which is an object")
        return value
    return json_copy(name, mapping(name, value), MAX_JSON_NESTING)


def _filled(name: str, value: object) -> str:
    if not text(name, value).strip():
        raise wrong_field(name, value, "cannot be an empty string")
    return text(name, value)


def _regex(name: str, value: object) -> str:
    if "\0" in text(name, value):
        raise wrong_field(name, value, "cannot contain a NUL character")
    return text(name, value)


def _choice(name: str, value: object) -> tuple[str, ...]:
    items = sequence(name, value)
    if not items:
        raise wrong_field(name, value, "cannot be an empty list")
    return tuple(text(f"an item of {name}", item) for item in items)


def _json_object(name: str, value: object) -> bool:
    if not flag(name, value):
        raise wrong_field(name, value, "must be True if given; for unconstrained text omit structured_outputs")
    return True


def _structural_tag(name: str, value: object) -> str:
    parse_json(name, _filled(name, value), MAX_TAG_NESTING)
    return text(name, value)


_STRUCTURE_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _filled,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
    "whitespace_pattern": _regex,
    "disable_any_whitespace": flag,
    "disable_additional_properties": flag,
}


def _checked_structure(values: Values) -> Values:
    given = [name for name in KINDS if values[name] is not None]
    if len(given) != 1:
        message = f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
        raise RequestError(message, parameter="structured_outputs", value={name: values[name] for name in given})
    return {
        name: check(f"structured_outputs.{name}", values[name]) if values[name] is not None or check is flag else None
        for name, check in _STRUCTURE_CHECKS.items()
    }


@checks_fields(_checked_structure)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StructuredOutputsParams:
    """Constraint on a completion; exactly one of the first six fields is set. Immutable.

    Schemas, patterns and grammars are compiled when the request is submitted.

    Raises:
      RequestError: None or several kinds, a value of the wrong type, empty or nested too deeply, or an unknown name.
    """

    json: str | Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """A JSON schema, as a string or a dict; at most 64 levels deep."""
    regex: str | None = None
    """A regular expression that matches the whole completion."""
    choice: Sequence[str] | None = None
    """Strings, one of which is the completion; stored as a tuple."""
    grammar: str | None = None
    """A context-free grammar in Lark or EBNF notation."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """Tags, as a JSON string, inside which the text follows a schema: ``{"type": "structural_tag", "format": {…}}``, or
    ``structures`` and ``triggers``; at most 80 levels deep."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between tokens of JSON; None: at most 32 spaces, tabs and newlines."""
    disable_any_whitespace: bool = False
    """Write JSON without optional white space."""
    disable_additional_properties: bool = False
    """Forbid additional properties in objects whose schema does not mention them."""

    @property
    def kind(self) -> str:
        """Name of the one field that is set, such as `regex`."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def __repr__(self) -> str:
        return changed_fields(self)


def _checked_repetition(values: Values) -> Values:
    checked = {name: integer(f"repetition_detection.{name}", value, 0) for name, value in values.items()}
    if checked["max_pattern_size"] > MAX_PATTERN_SIZE:
        message = (
            f"repetition_detection.max_pattern_size must be at most {MAX_PATTERN_SIZE}, "
            f"got {checked['max_pattern_size']}"
        )
        raise RequestError(message, parameter="repetition_detection", value=checked["max_pattern_size"])
    if checked["min_pattern_size"] > checked["max_pattern_size"]:
        message = (
            "repetition_detection.min_pattern_size must be at most "
            f"max_pattern_size={checked['max_pattern_size']}, got {checked['min_pattern_size']}"
        )
        raise RequestError(message, parameter="repetition_detection", value=values)
    if checked["max_pattern_size"] and checked["min_count"] < 2:
        message = f"repetition_detection.min_count must be at least 2, got {checked['min_count']}"
        raise RequestError(message, parameter="repetition_detection", value=values)
    return checked


@checks_fields(_checked_repetition)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RepetitionDetectionParams:
    """When to stop a completion that repeats itself, with finish reason ``repetition``: vLLM's rules. Immutable.

    Raises:
      RequestError: Not an integer, sizes out of order, a count below 2 with a size above 0, or an unknown name.
    """

    max_pattern_size: int = 0
    """Longest pattern to detect, in tokens, at most 1024; 0 disables detection."""
    min_pattern_size: int = 0
    """Shortest pattern to detect, in tokens; 0 means 1."""
    min_count: int = 0
    """How many times in a row a pattern must occur at the end of the output; at least 2."""

    def __repr__(self) -> str:
        return changed_fields(self)
