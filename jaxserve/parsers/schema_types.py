"""The JSON types that a tool's schema allows for a parameter."""

from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import unquote

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]
"""Name of a tool -> JSON schema of its parameters."""

_COMBINATIONS = ("anyOf", "oneOf", "allOf")


def value_types(schema: Schema, key: str) -> frozenset[str]:
    """Return the JSON types that the schema allows for a parameter; empty if it does not say."""
    parts = _parts(schema, schema)
    described = [part["properties"][key] for part in parts if key in _mapping(part.get("properties"))]
    if not described:
        described = [part.get("additionalProperties") for part in parts]
    return frozenset(name for one in described for part in _parts(one, schema) for name in _own_types(part))


def _mapping(value: Any) -> Schema:
    return cast("Schema", value) if isinstance(value, Mapping) else {}


def _parts(described: Any, root: Schema) -> list[Schema]:
    """Return a schema and those that it combines or refers to, each once."""
    found: dict[int, Schema] = {}
    pending: list[Any] = [described]
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping) or id(cast("Schema", one)) in found:
            continue
        schema = cast("Schema", one)
        found[id(schema)] = schema
        for name in _COMBINATIONS:
            alternatives = schema.get(name)
            pending += cast("list[Any]", alternatives) if isinstance(alternatives, list) else []
        pending.append(_resolve(schema.get("$ref"), root))
    return list(found.values())


def _resolve(reference: Any, root: Schema) -> Any:
    """Return what a JSON pointer such as "#/$defs/Name" or "#/definitions/Name" points at; None if nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = cast("Schema", found).get(name)
        elif isinstance(found, list):
            found = dict(zip(map(str, range(1000)), cast("list[Any]", found), strict=False)).get(name)
        else:
            return None
    return found


def _own_types(schema: Schema) -> set[str]:
    named: Any = schema.get("type")
    names: Iterable[Any] = cast("list[Any]", named) if isinstance(named, list) else [named]
    found = {name for name in names if isinstance(name, str)}
    if not found:
        listed: Any = schema.get("enum")
        values = (
            [schema["const"]] if "const" in schema else cast("list[Any]", listed if isinstance(listed, list) else [])
        )
        found = {_type_of(value) for value in values}
    if not found:
        found = {name for name, key in (("object", "properties"), ("array", "items")) if key in schema}
    return found | {"null"} if found and schema.get("nullable") is True else found


def _type_of(value: Any) -> str:
    for name, kind in (("boolean", bool), ("integer", int), ("number", float), ("array", list), ("object", Mapping)):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "string"
