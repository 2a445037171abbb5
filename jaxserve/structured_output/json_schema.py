"""Prepares JSON schemas for llguidance: drops keywords without effect, and states bounds so that it reads them exactly.

llguidance refuses unknown formats and several keywords whatever their value, and reads numbers of more than 15 digits
inexactly. In JSON Schema a format is an annotation unless a validator chooses to check it.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from types import MappingProxyType
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Values of ``format`` that llguidance enforces."""

# Keywords that hold further schemas: by name, or directly (one or a list).
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contentSchema"),
)
_KNOWN_DRAFT = re.compile(
    r"(http://json-schema\.org/draft-0[467]|https://json-schema\.org/draft/20(19-09|20-12))/schema#?"
)
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords that hold values, which may look like schemas."""
_BOUNDS = MappingProxyType({"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1})
_EXACT = 2**53
_MOST_INTEGER = 2**63 - 1024
"""Largest integer that llguidance's bounds hold."""
_MAX_BOUND = 10**300
_MAX_LONG_CONSTANTS = 64
"""Most constants of more than 15 digits: each is tried out."""

Schema = dict[str, Any]


class UnenforceableError(ValueError):
    """A schema asks for a value that llguidance cannot generate."""


def close_objects(schema: Any) -> None:
    """Forbid additional properties wherever a schema lists properties and does not mention others."""
    for inner in _schemas(schema):
        if any(isinstance(inner.get(name), dict) for name in ("properties", "patternProperties")):
            inner.setdefault("additionalProperties", False)


def drop_annotations(schema: Any) -> None:
    """Remove formats that are not enforced, and keywords whose value allows everything.

    Other keywords that llguidance does not know are annotations already; those that it cannot enforce stay, and it
    refuses them by name.
    """
    found = _schemas(schema)
    has_reference = any("$dynamicRef" in inner or "$recursiveRef" in inner for inner in found)
    for inner in reversed(found):  # those inside first: an emptied one allows everything
        for name, is_without_effect in _WITHOUT_EFFECT.items():
            if name in inner and is_without_effect(inner[name], inner):
                del inner[name]
        if not has_reference:
            inner.pop("$dynamicAnchor", None)
            inner.pop("$recursiveAnchor", None)


def state_bounds(schema: Any) -> None:
    """Replace bounds that llguidance would not keep to by the nearest ones inside that it does.

    Raises:
        UnenforceableError: A constant has too many digits.
    """
    for inner in _schemas(schema):
        types = inner.get("type", "number")
        is_integer = "number" not in (types if isinstance(types, list) else [types])
        for name, sign in _BOUNDS.items():
            if _is_number(inner.get(name)):
                inner[name] = _inward(inner[name], sign, is_integer)
    values = [value for inner in _schemas(schema) for value in (inner.get("const"), *_listed(inner.get("enum")))]
    long = [number for number in _numbers(values) if len(Decimal(repr(number)).as_tuple().digits) > 15]
    if len(long) > _MAX_LONG_CONSTANTS:
        raise UnenforceableError(f"has {len(long)} constants of over 15 digits; the limit is {_MAX_LONG_CONSTANTS}")
    for number in long:
        if not _is_written_exactly(number):
            raise UnenforceableError(f"has the constant {number!r}, which has too many digits to be generated exactly")


def _schemas(schema: Any) -> list[Schema]:
    """Return a schema and all schemas inside it, each before those inside it."""
    found: list[Schema] = []
    left = [schema]
    while left:
        one: Any = left.pop()
        if isinstance(one, list):
            left.extend(cast("list[Any]", one))
        if not isinstance(one, dict):
            continue
        inner = cast("Schema", one)
        found.append(inner)
        for name, value in inner.items():
            if name in _NAMED_SCHEMAS and isinstance(value, dict):
                left.extend(cast("Schema", value).values())
            elif name in _SCHEMAS or (name not in _VALUES and isinstance(value, dict)):
                left.append(value)
    return found


# --------------------------------------------------------------------------------------------------------- annotations


def _is_anything(value: Any, *, of_text: bool = False) -> bool:
    """Whether a schema allows every value, or every string if ``of_text``."""
    if isinstance(value, dict):
        return not cast("Schema", value) or (of_text and value == {"type": "string"})
    return value is True


def _allows_all(value: Any) -> bool:
    """Whether an object of schemas, or of lists of names, demands nothing."""
    return isinstance(value, dict) and all(
        one == [] or _is_anything(one) for one in cast("Mapping[str, Any]", value).values()
    )


def _is_idle_condition(inner: Schema) -> bool:
    return "if" not in inner or all(_is_anything(inner.get(name, True)) for name in ("then", "else"))


def _is_idle_count(inner: Schema) -> bool:
    return "contains" not in inner or (inner.get("minContains") == 0 and "maxContains" not in inner)


_WITHOUT_EFFECT: Mapping[str, Callable[[Any, Schema], bool]] = MappingProxyType(
    {
        "format": lambda value, _: isinstance(value, str) and value not in FORMATS,
        "$schema": lambda value, _: not _KNOWN_DRAFT.fullmatch(str(value)),
        "uniqueItems": lambda value, inner: value is False or inner.get("maxItems") in (0, 1),
        "propertyNames": lambda value, _: _is_anything(value, of_text=True),
        "unevaluatedItems": lambda value, _: _is_anything(value),
        "unevaluatedProperties": lambda value, _: _is_anything(value),
        "dependentRequired": lambda value, _: _allows_all(value),
        "dependentSchemas": lambda value, _: _allows_all(value),
        "dependencies": lambda value, _: _allows_all(value),
        "not": lambda value, _: value is False,
        "then": lambda _, inner: _is_idle_condition(inner),
        "else": lambda _, inner: _is_idle_condition(inner),
        "if": lambda _, inner: _is_idle_condition(inner),
        "maxContains": lambda _, inner: "contains" not in inner,
        "contains": lambda _, inner: _is_idle_count(inner),
        "minContains": lambda _, inner: "contains" not in inner,
    }
)
"""Keywords, in the order in which they are removed, and whether a value has no effect beside the others."""


# -------------------------------------------------------------------------------------------------------------- bounds


def _inward(bound: int | float, sign: int, is_integer: bool) -> int | float:
    """Return a bound, or if llguidance would read another number, the nearest one inside that it reads exactly.

    Args:
        bound: The bound.
        sign: 1 for a minimum, -1 for a maximum.
        is_integer: Whether the numbers are integers, whose bounds are not written as decimals.
    """
    if bound == 0:
        return 0  # not -0.0
    if abs(bound) > _MAX_BOUND or (abs(bound) < _EXACT and bound == int(bound)):
        return bound
    if is_integer and abs(bound) >= _EXACT:
        if bound * sign < -_MOST_INTEGER:
            return -sign * _MOST_INTEGER
        nearest = float(bound)
        while nearest < bound if sign > 0 else nearest > bound:
            nearest = math.nextafter(nearest, sign * math.inf)
        return int(nearest)
    exact = Decimal(repr(bound))
    unit = Decimal(1).scaleb(exact.adjusted() - 14)
    has_many_digits = len(exact.as_tuple().digits) > 15
    rounded = exact.quantize(unit, ROUND_CEILING if sign > 0 else ROUND_FLOOR) if has_many_digits else exact
    if abs(bound) >= _EXACT or exact.adjusted() < -8:  # read inexactly whatever the digits
        rounded += sign * unit
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _numbers(value: Any) -> Iterable[int | float]:
    """Yield the numbers in a JSON value."""
    if isinstance(value, list | dict):
        items = cast("Any", value.values() if isinstance(value, dict) else value)
        for item in items:
            yield from _numbers(item)
    elif _is_number(value):
        yield value


def _is_written_exactly(number: int | float) -> bool:
    """Whether llguidance writes a constant as the number that it is."""
    grammar = json.dumps({"grammars": [{"json_schema": {"const": number}}]})
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    text = list(format(Decimal(repr(number)), "f").encode())
    return not matcher.is_error() and matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
