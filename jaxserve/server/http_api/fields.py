"""Bodies of HTTP requests: JSON, and tables that give each field its check."""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import integer, text, token_ids

Check = Callable[[str, Any], Any]

MAX_NESTING = 100
"""How deep objects and arrays of a body may be nested. Schemas have a lower limit of their own."""
WITHOUT_EFFECT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction".split()
)
"""Fields of OpenAI's API that cannot change a response here: accepted, and named in the header like unknown fields."""
PROMPT_FORMS = "a string, a list of token ids, or a list of strings or of lists of token ids"

_LIMIT = 2**63
"""Integers are below it: messages to the engine process hold 64 bits."""


def read_fields(
    body: Mapping[str, Any], table: Mapping[str, Check], *, needs: str | None, is_strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Check the fields of a JSON object.

    Args:
        body: The object.
        table: Name to check.
        needs: A required field.
        is_strict: Whether unknown fields are errors.

    Returns:
        The values by name, without those that are null, and the names of unknown fields, which have no effect.

    Raises:
        RequestError: A wrong value, a missing field, or an unknown one.
    """
    unknown = [name for name in body if name not in table]
    if is_strict:
        check_known(unknown, table)
    if needs is not None and body.get(needs) is None:
        raise RequestError(f"the field {needs!r} is missing", parameter=needs)
    fields = {name: table[name](name, body[name]) for name in body if name in table and body[name] is not None}
    return fields, unknown


def check_known(unknown: list[str], table: Mapping[str, Check]) -> None:
    """Raise a RequestError for the first unknown field, unless it is one of OpenAI's without effect."""
    for name in unknown:
        if name not in WITHOUT_EFFECT:
            near = difflib.get_close_matches(name[:100], list(table), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {name[:100]!r}{hint}", parameter=name[:100])


def read_json(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse a request's body.

    Raises:
        RequestError: No JSON object, NaN or Infinity, text that is not Unicode, or nested too deeply.
    """
    too_deep = f"the body is nested too deeply: expected at most {MAX_NESTING} levels"
    try:
        found = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise RequestError(too_deep) from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body must be a JSON object, got {type(found).__name__}")
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
        level: list[Any] = [found]
        for _ in range(MAX_NESTING):
            items = (one.values() if type(one) is dict else one for one in level)
            level = [item for some in items for item in some if type(item) in (dict, list)]
        if level:
            raise RequestError(too_deep)
    if b"\\u" in raw:  # a lone surrogate can only be written as an escape
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body has text that is not valid Unicode: half of a surrogate pair") from None
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:40]} is out of range")
    return number


# ------------------------------------------------------------------------------------------------------------- checks


def limited(name: str, value: Any) -> Any:
    """Return a value after checking that its integers fit into 64 bits; its reader checks the rest.

    A float without a fraction becomes an integer: clients in languages with one kind of number write 1.0 for 1.
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    parts: list[Any] = [value]
    if isinstance(value, list):
        parts = value
    elif isinstance(value, dict):
        keys = (int(key) for key in value if key.removeprefix("-").isdecimal() and len(key) < 1000)
        parts = [*value.values(), *keys]
    if any(type(part) is int and not -_LIMIT < part < _LIMIT for part in parts):
        raise RequestError(f"{name}: integers must be less than 2**63 and more than -2**63", parameter=name)
    return value


def whole(low: int, high: int) -> Check:
    """Return a check for an integer from ``low`` to ``high``."""
    return lambda name, value: integer(name, limited(name, value), low, high)


def one_of(*choices: str) -> Check:
    """Return a check for one of some strings."""

    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise RequestError(f"{name} must be one of {', '.join(choices)}", parameter=name, value=value)
        return value

    return check


def filled_text(name: str, value: Any) -> str:
    """Check a string that is not empty."""
    if not text(name, value):
        raise RequestError(f"{name} must not be empty", parameter=name, value=value)
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Check a JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", parameter=name, value=value)
    return value


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Check a list of JSON objects."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", parameter=name, value=value)
    return [json_object(f"{name}[{index}]", item) for index, item in enumerate(value)]


def refused(reason: str) -> Check:
    """Return a check that only accepts what has no effect: null, false and the empty string."""

    def check(name: str, value: Any) -> None:
        if value is not False and value != "":
            raise RequestError(f"{name} is not supported: {reason}", parameter=name, value=value)

    return check


def prompts(name: str, value: Any) -> list[dict[str, Any]]:
    """Check a field with one prompt or several; return the ``text`` or ``token_ids`` of a ``Request`` for each.

    Raises:
        RequestError: Another form, an empty prompt, or no token id.
    """
    if isinstance(value, str):
        return [{"text": filled_text(name, value)}]
    if not isinstance(value, list):
        raise RequestError(f"{name} must be {PROMPT_FORMS}, got {type(value).__name__}", parameter=name)
    if not value:
        raise RequestError(f"{name} must not be empty", parameter=name)
    if type(value[0]) is int:
        return [{"token_ids": token_ids(name, value)}]
    if all(isinstance(item, str) for item in value):
        return [{"text": filled_text(name, item)} for item in value]
    if all(isinstance(item, list) and item for item in value):
        return [{"token_ids": token_ids(name, item)} for item in value]
    raise RequestError(f"{name} must be {PROMPT_FORMS}, none of them empty", parameter=name)
