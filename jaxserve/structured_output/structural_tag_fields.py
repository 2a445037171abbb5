"""The types of formats in structural tags, with their fields as xgrammar documents them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

Format = Mapping[str, Any]
REQUIRED = object()
"""The default of a field that must be given."""
NO_LIMIT = -1
"""A maximum that is none."""

Field = tuple[Any, Callable[[Any], bool], str]
"""The default, whether a value is right, and what is expected."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_filled(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_token(value: Any) -> bool:
    return _is_count(value) or _is_filled(value)


def _list_of(is_right: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, list) and len(cast("list[Any]", value)) >= least and all(map(is_right, value))

    return check


def _is_format(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tag(value: Any) -> bool:
    return isinstance(value, dict) and cast("Format", value).get("type", "tag") == "tag"


def _is_begin(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, dict) and cast("Format", value).get("type") == "token")


def _pair_of(is_first: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(cast("list[Any]", value)) == 2
            and is_first(value[0])
            and _is_format(value[1])
        )

    return check


def _flag(default: bool) -> Field:
    return default, lambda value: isinstance(value, bool), "true or false"


_CONTENT: Field = (REQUIRED, _is_format, "a format")
_FORMATS: Field = (REQUIRED, _list_of(_is_format, 1), "a list of at least one format")
_TAGS: Field = (REQUIRED, _list_of(_is_tag, 1), "a list of at least one tag")
_EXCLUDES: Field = ((), _list_of(_is_filled), "a list of filled strings")
_TOKENS: Field = ((), _list_of(_is_token), "a list of token ids or names")
_SCHEMA: Field = (REQUIRED, lambda value: isinstance(value, dict | bool), "a JSON schema")
_ONCE: Mapping[str, Field] = MappingProxyType({"at_least_one": _flag(False), "stop_after_first": _flag(False)})
_STYLES = ("json", "qwen_xml")

FIELDS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "const_string": {"value": (REQUIRED, _is_text, "a string")},
        "json_schema": {
            "json_schema": _SCHEMA,
            "style": ("json", lambda value: value in _STYLES, " or ".join(_STYLES)),
            "any_order": (False, lambda value: value is False, "false: properties are in the schema's order"),
            "max_whitespace_cnt": (None, _is_count, "an integer from 0"),
        },
        "qwen_xml_parameter": {"json_schema": _SCHEMA},
        "regex": {"pattern": (REQUIRED, _is_text, "a regular expression")},
        "grammar": {"grammar": (REQUIRED, _is_filled, "a grammar in EBNF or Lark notation")},
        "any_text": {
            "excludes": _EXCLUDES,
            "max_chars": (None, _is_count, "an integer from 0"),
            "max_tokens": (None, lambda _: False, "null: use max_chars, max_tokens of texts is not supported"),
        },
        "sequence": {"elements": _FORMATS},
        "or": {"elements": _FORMATS},
        "optional": {"content": _CONTENT},
        "star": {"content": _CONTENT},
        "plus": {"content": _CONTENT},
        "repeat": {
            "min": (REQUIRED, _is_count, "an integer from 0"),
            "max": (REQUIRED, lambda value: _is_count(value) or value == NO_LIMIT, "an integer from 0, or -1"),
            "content": _CONTENT,
        },
        "tag": {
            "begin": (REQUIRED, _is_begin, "a string or a token format"),
            "content": _CONTENT,
            "end": (
                REQUIRED,
                lambda value: _is_begin(value) or _list_of(_is_text)(value),
                "strings or a token format",
            ),
        },
        "triggered_tags": {
            "triggers": (REQUIRED, _list_of(_is_filled, 1), "a list of filled strings"),
            "tags": _TAGS,
            **_ONCE,
            "excludes": _EXCLUDES,
        },
        "tags_with_separator": {"tags": _TAGS, "separator": (REQUIRED, _is_text, "a string"), **_ONCE},
        "dispatch": {
            "rules": (REQUIRED, _list_of(_pair_of(_is_filled), 1), "a list of pairs of a string and a format"),
            "loop": _flag(True),
            "excludes": _EXCLUDES,
        },
        "token": {"token": (REQUIRED, _is_token, "a token id or name")},
        "exclude_token": {"exclude_tokens": _TOKENS},
        "any_tokens": {"exclude_tokens": _TOKENS, "max_tokens": (None, _is_count, "an integer from 0")},
        "token_triggered_tags": {
            "trigger_tokens": (REQUIRED, _list_of(_is_token, 1), "a list of token ids or names"),
            "tags": _TAGS,
            "exclude_tokens": _TOKENS,
            **_ONCE,
        },
        "token_dispatch": {
            "rules": (REQUIRED, _list_of(_pair_of(_is_token), 1), "a list of pairs of a token and a format"),
            "loop": _flag(True),
            "exclude_tokens": _TOKENS,
        },
    }
)
"""The fields of each type of format, by name."""
