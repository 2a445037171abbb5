"""Requests as tables of fields: a name, and the check that a value goes through."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import integer, text

Check = Callable[[str, Any], Any]

WITHOUT_EFFECT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction".split()
)
"""Fields of OpenAI's that cannot change an answer here: accepted, and named in the header like unknown ones."""

_LIMIT = 2**63
"""Whole numbers are below it: the protocol between the processes has 64 bits for them."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a request gives.

    Attributes:
        values: Checked, by name; null counts as not given.
        unused: Names of fields that change nothing.
    """

    values: Mapping[str, Any]
    unused: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or what stands for one that was not given."""
        return self.values.get(name, default)

    def chosen(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of some fields that were given."""
        return {name: self.values[name] for name in names if name in self.values}


def read_fields(body: Mapping[str, Any], table: Mapping[str, Check], *, needs: str | None, is_strict: bool) -> Fields:
    """Checks the fields of a request by a table.

    Args:
        body: As JSON.
        table: Name -> check.
        needs: A field that must be there.
        is_strict: Whether unknown fields are errors.

    Raises:
        RequestError: A wrong value, a missing field, or an unknown one.
    """
    unknown = [name for name in body if name not in table]
    if is_strict:
        check_known(unknown, table)
    if needs is not None and body.get(needs) is None:
        raise RequestError(f"the field {needs!r} is missing", parameter=needs)
    values = {name: table[name](name, body[name]) for name in body if name in table and body[name] is not None}
    return Fields(MappingProxyType(values), tuple(unknown))


def check_known(unknown: list[str], table: Mapping[str, Check]) -> None:
    """Raises for the first field that nobody knows.

    Raises:
        RequestError: There is one; the nearest known name is suggested.
    """
    for name in unknown:
        if name not in WITHOUT_EFFECT:
            near = difflib.get_close_matches(name[:100], list(table), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {name[:100]!r}{hint}", parameter=name[:100])


def limited(name: str, value: Any) -> Any:
    """A value whose whole numbers fit into 64 bits; what else it must be is checked by who reads it.

    A float without fraction counts as a whole number, as clients in languages with one kind of number write them.
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and not -_LIMIT < value < _LIMIT:
        raise RequestError(f"{name} must be less than 2**63 and more than -2**63", parameter=name)
    for part in _parts(value):
        if type(part) is int and not -_LIMIT < part < _LIMIT:
            raise RequestError(f"{name} must have numbers less than 2**63 and more than -2**63", parameter=name)
    return value


def _parts(value: Any) -> list[Any]:
    """The items of a list or object and its keys that are numbers."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return []
    return [*value.values(), *(int(key) for key in value if key.removeprefix("-").isdecimal() and len(key) < 1000)]


def whole(low: int, high: int) -> Check:
    """A whole number from ``low`` to ``high``."""

    def check(name: str, value: Any) -> int:
        return integer(name, limited(name, value), low, high)

    return check


def one_of(*choices: str) -> Check:
    """One of some texts."""

    def check(name: str, value: Any) -> str:
        if value not in choices:
            message = f"{name} must be one of {', '.join(choices)}"
            raise RequestError(message, parameter=name, value=value)
        return value

    return check


def filled_text(name: str, value: Any) -> str:
    """A text that is not empty."""
    if not text(name, value):
        raise RequestError(f"{name} must not be empty", parameter=name, value=value)
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", parameter=name, value=value)
    return value


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", parameter=name, value=value)
    return [json_object(f"{name}[{place}]", item) for place, item in enumerate(value)]


def refused(reason: str) -> Check:
    """No value but null and what changes nothing: false, and the empty text."""

    def check(name: str, value: Any) -> None:
        if value is not False and value != "":
            raise RequestError(f"{name} is not supported: {reason}", parameter=name, value=value)

    return check
