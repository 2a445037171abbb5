"""Checks of single values, and dataclasses whose fields are checked before the object exists.

Values come from users, so no type is assumed. Every message says what was expected and what was given.
"""

import dataclasses
import difflib
import functools
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

from jaxserve.api.errors import RequestError

T = TypeVar("T")
Values = dict[str, Any]

_SCALARS = frozenset((type(None), bool, int, float))
"""Types of JSON values that are copied as they are."""


def checks_fields(
    check: Callable[[Values], Values], each: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Decorate a keyword-only dataclass to check names and values before its generated `__init__` receives them.

    Args:
      check: Takes the values of all fields and returns those to store.
      each: Checks of single fields, whose results `check` takes. Defaults pass theirs once, here.
    """

    def decorate(cls: type[T]) -> type[T]:
        generated = cls.__init__
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        required = [name for name, value in defaults.items() if value is dataclasses.MISSING]
        passed = {name: value for name, value in defaults.items() if name not in required}
        passed |= {name: each[name](name, value) for name, value in passed.items() if name in each}

        @functools.wraps(generated)
        def __init__(self: T, **values: Any) -> None:
            for name in values:
                if name not in defaults:
                    raise _unknown(cls.__name__, name, values[name], list(defaults))
            missing = [name for name in required if name not in values]
            if missing:
                raise RequestError(f"{cls.__name__} needs a value for {' and '.join(missing)}", parameter=missing[0])
            checked = {name: each[name](name, value) if name in each else value for name, value in values.items()}
            generated(self, **check({**passed, **checked}))

        cls.__init__ = __init__
        return cls

    return decorate


def _unknown(owner: str, name: str, value: object, known: list[str]) -> RequestError:
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; fields: {', '.join(known)}"
    return RequestError(f"{owner} has no field {name!r}{hint}", parameter=name, value=value)


def changed_fields(instance: Any) -> str:
    """Return text such as `SamplingParams(seed=3)`: the fields of a dataclass that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(instance, field.name)!r}"
        for field in dataclasses.fields(instance)
        if getattr(instance, field.name) not in (field.default, ())
    ]
    return f"{type(instance).__name__}({', '.join(changed)})"


def wrong_field(name: str, value: object, problem: str) -> RequestError:
    """Return the error of a field whose value is not accepted; ``problem`` completes a sentence that starts with the
    field."""
    return RequestError(f"{name} {problem}", parameter=name, value=value)


def number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return a finite number from `low` (exclusive with `above_low`) to `high`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        expected = f"a number in {_span(low, high, above_low)}"
        raise wrong_field(name, value, f"must be {expected}, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (low <= found <= high) or (above_low and found == low):
        raise wrong_field(name, value, f"must be in {_span(low, high, above_low)}, got {found}")
    return found


def _span(low: float, high: float, above_low: bool) -> str:
    return f"{'(' if above_low else '['}{low:g}, {high:g}]"


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise wrong_field(name, value, f"must be an int, got {type(value).__name__}")
    whole = int(value)
    if whole < low:
        raise wrong_field(name, value, f"must be at least {low}, got {whole}")
    if high is not None and whole > high:
        raise wrong_field(name, value, f"must be at most {high}, got {whole}")
    return whole


def flag(name: str, value: object) -> bool:
    """Return True or False; other values, even 0 and 1, are rejected."""
    if not isinstance(value, bool):
        raise wrong_field(name, value, f"must be True or False, got {type(value).__name__}")
    return value


def text(name: str, value: object) -> str:
    """Return a string that UTF-8 can encode; it may be empty."""
    if not isinstance(value, str):
        raise wrong_field(name, value, f"must be a string, got {type(value).__name__}")
    return unicode_text(name, value, parameter=name, value=value)


def unicode_text(what: str, written: str, **details: Any) -> str:
    """Return a string that UTF-8 can encode, which half of a surrogate pair is not.

    Args:
      what: What it is, in the message of the error.
      written: The string.
      **details: More arguments of the error.
    """
    try:
        written.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode: {error}", **details) from error
    return written


def texts(name: str, value: object, *, may_be_one: bool = False) -> tuple[str, ...]:
    """Return non-empty strings without duplicates; with `may_be_one` a single string counts as a list of one."""
    kind = "a string or a list of strings" if may_be_one else "a list of strings"
    items = (value,) if may_be_one and isinstance(value, str) else sequence(name, value)
    for item in items:
        if not isinstance(item, str):
            raise wrong_field(name, value, f"must be {kind}, got an item of {type(item).__name__}")
        if not item:
            raise wrong_field(name, value, "cannot contain an empty string")
        text(name, item)
    return tuple(dict.fromkeys(items))


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return integers >= 0; the vocabulary size is not known here."""
    items = sequence(name, value)
    if all(type(item) is int for item in items) and min(items, default=0) >= 0:
        return tuple(items)
    return tuple(integer(name, item, 0) for item in items)


def sequence(name: str, value: object) -> Sequence[Any]:
    """Return a list, a tuple or another sequence that is not a string."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise wrong_field(name, value, f"must be a list, got {type(value).__name__}")
    return cast("Sequence[Any]", value)


def mapping(name: str, value: object) -> Mapping[Any, Any]:
    """Return a dict or another mapping."""
    if not isinstance(value, Mapping):
        raise wrong_field(name, value, f"must be a dict, got {type(value).__name__}")
    return cast("Mapping[Any, Any]", value)


def instance_of(cls: type[T], name: str, value: object) -> T:
    """Return an instance of a dataclass with checked fields, built from a dict of its fields if needed."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise wrong_field(name, value, f"must be {cls.__name__} or a dict of its fields, got {type(value).__name__}")
    fields = cast("Mapping[Any, Any]", value)
    return cls(**{text(name, key): fields[key] for key in fields})


def json_copy(name: str, value: Any, max_nesting: int, _level: int = 1) -> Any:
    """Return a copy of a JSON value: None, booleans, numbers, strings, lists, and dicts with string keys.

    Args:
      name: Name of the value in messages.
      value: Tuples count as lists.
      max_nesting: Deepest nesting of lists and dicts; a list of numbers is 1 deep.
    """
    kind, given = value.__class__, value
    if kind in _SCALARS or (type(value) is str and value.isascii()):
        return value
    is_object = kind is dict or (kind is not list and isinstance(value, Mapping))
    if not is_object and kind is not list and not isinstance(value, list | tuple):
        return _json_scalar(name, given)
    if _level > max_nesting:
        raise RequestError(f"{name} is nested too deeply: expected at most {max_nesting} levels", parameter=name)
    if not is_object:
        return [json_copy(name, item, max_nesting, _level + 1) for item in given]
    copied: dict[str, Any] = {}
    for key, item in given.items():
        if type(key) is not str or not key.isascii():
            text(f"a key of {name}", key)
        copied[key] = json_copy(name, item, max_nesting, _level + 1)
    return copied


def _json_scalar(name: str, value: object) -> str | int | float:
    """Return a string, or a number of any library as Python's own."""
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise wrong_field(name, value, f"must hold JSON values, got {type(value).__name__}")


def parse_json(name: str, value: str, max_nesting: int) -> Any:
    """Parse a JSON text."""
    try:
        found = json.loads(value)
    except ValueError as error:
        raise wrong_field(name, value, f"is not valid JSON: {error}") from error
    except RecursionError:
        raise wrong_field(name, value, f"is nested too deeply: expected at most {max_nesting} levels") from None
    return json_copy(name, found, max_nesting)
