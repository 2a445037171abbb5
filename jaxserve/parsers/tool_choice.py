"""Tools of requests, and the JSON schema that forces the model to call one."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxserve.api.errors import RequestError

_FORM = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of the parameters of each tool, by the tool's name.

    Raises:
      RequestError: A tool is invalid, or two have the same name.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for tool in cast("Sequence[Any]", tools):
        function: Any = cast("Mapping[str, Any]", tool).get("function") if isinstance(tool, Mapping) else None
        described: Mapping[str, Any] = cast("Any", function) if isinstance(function, Mapping) else {}
        name: Any = described.get("name")
        parameters: Any = described.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not name or not isinstance(parameters, Mapping):
            raise RequestError(f"a tool must be {_FORM}", parameter="tools", value=tool)
        if name in schemas:
            raise RequestError("two tools have the same name", parameter="tools", value=name)
        schemas[name] = dict(cast("Mapping[str, Any]", parameters))
    return schemas


def chosen_function(tool_choice: str | Mapping[str, Any] | None, schemas: Mapping[str, Any]) -> str | None:
    """Return the function that a tool choice names; None for "auto", "none", "required" and None.

    Raises:
      RequestError: The choice is invalid, or names a function that is not among the tools.
    """
    if tool_choice is None or tool_choice in ("auto", "none", "required"):
        return None
    function: Any = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name: Any = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        expected = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}"
        raise RequestError(f"tool_choice must be {expected}", parameter="tool_choice", value=tool_choice)
    if name not in schemas:
        raise RequestError("tool_choice names a function that is not in tools", parameter="tool_choice", value=name)
    return name


def tool_choice_schema(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None = None,
) -> dict[str, Any] | None:
    """Return the JSON schema for `StructuredOutputsParams(json=…)` that makes the model call a tool.

    Args:
      tools: In OpenAI's form.
      tool_choice: "required": a list of one or more calls, {"name": …, "parameters": {…}} each. A named function: its
        arguments alone. "auto", "none" or None: nothing is forced.
      parallel_tool_calls: False allows one call only.

    Returns:
      The schema; None when nothing is forced. `MessageParser` with the same tool choice parses the completion.

    Raises:
      RequestError: The tools or the choice are invalid, the function is unknown, there are no tools, or two tools
        define the same "$defs" name differently.
    """
    schemas = parameter_schemas(tools)
    if (name := chosen_function(tool_choice, schemas)) is not None:
        return schemas[name]
    if tool_choice != "required":
        return None
    if not schemas:
        raise RequestError("tool_choice='required' needs tools", parameter="tools", value=list(tools))
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for name, schema in schemas.items():
        for defined, definition in cast("Mapping[str, Any]", schema.get("$defs") or {}).items():
            if definitions.setdefault(defined, definition) != definition:
                raise RequestError("two tools define this name differently in $defs", parameter="tools", value=defined)
        parameters = {key: value for key, value in schema.items() if key != "$defs"}
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"properties": properties, "required": list(properties), "additionalProperties": False})
    made: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if parallel_tool_calls is False:
        made["maxItems"] = 1
    if definitions:
        made["$defs"] = definitions
    return made
