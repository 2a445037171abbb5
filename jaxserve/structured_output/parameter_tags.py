"""Arguments of a call in the form of Qwen 3 Coder: ``<parameter=name>value</parameter>`` for each."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from jaxserve.api.errors import RequestError

END = "</parameter>"
_SPACE = r"/[ \t\n]{0,8}/"
_DEFINITIONS = ("$defs", "definitions")


class ParameterTags:
    """Writes the expression of an object's properties, in the schema's order.

    Args:
        write_schema: Checks a JSON schema and returns it as JSON.
        text_until: Returns the expression of any text up to and with a string.
    """

    def __init__(self, write_schema: Callable[[Any], str], text_until: Callable[[str], str]):
        self._write_schema = write_schema
        self._text_until = text_until

    def write(self, schema: Any, make_error: Callable[[str], RequestError]) -> str:
        """Return the expression.

        Args:
            schema: JSON schema of the object; only its listed properties are written.
            make_error: Makes the error of the request from a message.

        Raises:
            RequestError: The schema is not that of an object, or asks for strings with a pattern, length or format.
        """
        given = cast("Mapping[str, Any]", schema) if isinstance(schema, dict) else {}
        properties: Any = given.get("properties", {})
        if given.get("type", "object") != "object" or not isinstance(properties, dict):
            raise make_error("has qwen_xml parameters that are no object with properties")
        unknown = sorted(set(given) & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})
        if unknown:
            raise make_error(f"has qwen_xml parameters with {unknown[0]}, which is not supported there")
        required: Any = given.get("required", [])
        shared = {name: given[name] for name in _DEFINITIONS if name in given}
        parts = [_SPACE]
        for name, one in cast("Mapping[str, Any]", properties).items():
            value = self._value(one, shared, make_error)
            part = f"{json.dumps(f'<parameter={name}>')} {value} {_SPACE}"
            parts.append(part if name in required else f"({part})?")
        missing = [name for name in required if name not in properties]
        if missing:
            raise make_error(f"has qwen_xml parameters whose required {missing[0]!r:.60} is no property")
        return f"({' '.join(parts)})"

    def _value(self, schema: Any, shared: Mapping[str, Any], make_error: Callable[[str], RequestError]) -> str:
        """Return the expression of a value and the end of its tag: JSON, but strings are written as they are."""
        given = cast("Mapping[str, Any]", schema) if isinstance(schema, dict) else {}
        choices: Any = given.get("enum", [given["const"]] if "const" in given else None)
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in cast("list[Any]", choices)):
            texts = " | ".join(json.dumps(choice) for choice in cast("list[str]", choices))
            return f"{_SPACE} ({texts}) {_SPACE} {json.dumps(END)}"
        if given.get("type") == "string" or not re.search(
            r'"(type|\$ref|enum|const|anyOf|oneOf|allOf)"', json.dumps(schema)
        ):
            limits = sorted({"pattern", "minLength", "maxLength"} & set(given))
            if limits:
                raise make_error(f"has a qwen_xml parameter with {limits[0]}, which is not supported there")
            return self._text_until(END)
        if isinstance(schema, dict):
            schema = {**given, **shared}
        return f"{_SPACE} %json {self._write_schema(schema)} {_SPACE} {json.dumps(END)}"
