"""Converts a request's structured output parameters to a grammar for llguidance."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from llguidance import LLMatcher

from jaxserve.api.errors import RequestError
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.structured_output.json_schema import UnenforceableError, close_objects, drop_annotations, state_bounds
from jaxserve.structured_output.structural_tag import TagWriter

FREE_TEXT = r"/(.|\n)*/"
JSON_WHITE_SPACE = r"[ \t\n\r]{1,32}"
"""Optional white space between tokens of JSON by default. It is bounded because models can get stuck in white space."""
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits on compiling grammars.

    Attributes:
        max_bytes: Longest schema, pattern, grammar or list of choices, as UTF-8.
        time_s: Seconds after which a grammar is rejected as too complex.
        memory_bytes: What a process that tests grammars may take beside the vocabulary.
        max_cached: Number of compiled grammars to cache.
        max_cached_bytes: Total bytes of their sources.
        max_waiting: Number of grammars that may wait for compilation.
    """

    max_bytes: int = 1 << 18
    time_s: float = 5.0
    memory_bytes: int = 256 << 20
    max_cached: int = 128
    max_cached_bytes: int = 1 << 23
    max_waiting: int = 256


class GrammarSource(NamedTuple):
    """The source of a grammar.

    Attributes:
        text: In llguidance's notation: Lark with extensions, or JSON.
        is_ebnf: Whether it is a user's grammar, which may be in llama.cpp's EBNF notation instead.
        named: Users' grammars by the names that ``text`` calls them.
    """

    text: str
    is_ebnf: bool = False
    named: Mapping[str, str] = MappingProxyType({})


def grammar_error(message: str, params: StructuredOutputsParams) -> RequestError:
    """Return an error that names the parameter and shows its value."""
    kind = params.kind
    value = getattr(params, kind)
    return RequestError(f"structured_outputs.{kind} {message}", parameter="structured_outputs", value={kind: value})


def content_key(params: StructuredOutputsParams, limits: GrammarLimits) -> tuple[str, ...]:
    """Return strings that differ whenever two parameters need different grammars.

    Raises:
        RequestError: The content is longer than the limit.
    """
    value = getattr(params, params.kind)
    text = value if isinstance(value, str) else json.dumps(value)
    num_bytes = len(text.encode())
    if num_bytes > limits.max_bytes:
        raise grammar_error(f"is {num_bytes} bytes long; the limit is {limits.max_bytes}", params)
    return (params.kind, text, *(repr(getattr(params, name)) for name in OPTIONS))


def write_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> GrammarSource:
    """Convert the parameters to a grammar that is not compiled yet.

    Args:
        params: The structured output parameters.
        special_tokens: Ids by name of the tokens that are not matched as text.

    Raises:
        RequestError: Options that do not apply to this kind, or an invalid structural tag.
    """
    kind, options = params.kind, _json_options(params)
    if kind == "json":
        return _json_grammar(_schema(params.json, params, options))
    if kind == "json_object":
        return _json_grammar({"type": "object", "x-guidance": options})
    if kind == "structural_tag":
        return _tag_grammar(params, options, special_tokens)
    if params.regex is not None:
        return GrammarSource(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        choices = dict.fromkeys(params.choice)
        return GrammarSource("start: " + " | ".join(json.dumps(choice) for choice in choices))
    assert params.grammar is not None
    return GrammarSource(params.grammar, is_ebnf=True)


def _json_grammar(schema: dict[str, Any]) -> GrammarSource:
    return GrammarSource(json.dumps({"grammars": [{"json_schema": schema}]}))


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options of a JSON schema."""
    if params.kind not in ("json", "json_object", "structural_tag"):
        given = [name for name in OPTIONS if getattr(params, name)]
        if given:
            raise grammar_error(f"is not a JSON schema, so {' or '.join(given)} does not apply", params)
    if params.whitespace_pattern is not None and params.disable_any_whitespace:
        raise grammar_error("accepts whitespace_pattern or disable_any_whitespace, not both", params)
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": JSON_WHITE_SPACE if params.whitespace_pattern is None else params.whitespace_pattern}


def _schema(given: Any, params: StructuredOutputsParams, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the options added; options in the schema itself take precedence."""
    schema: Any = json.loads(given) if isinstance(given, str) else copy.deepcopy(given)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise grammar_error(f"must contain JSON schemas that are objects, got {schema!r}", params)
    drop_annotations(schema)
    if params.disable_additional_properties:
        close_objects(schema)
    try:
        state_bounds(schema)
    except UnenforceableError as error:
        raise grammar_error(str(error), params) from error
    own = schema.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    if "whitespace_flexible" in own and params.whitespace_pattern is None:
        options = {}  # a pattern would override it
    schema["x-guidance"] = {**options, **own}
    return schema


def _tag_grammar(
    params: StructuredOutputsParams, options: dict[str, Any], special_tokens: Mapping[str, int]
) -> GrammarSource:
    """Return the grammar of a structural tag in the present form, with a format, or in the old one."""
    described = json.loads(params.structural_tag or "")
    form = described.get("format") if isinstance(described, dict) else None
    if form is None or not (form or described.get("type") == "structural_tag"):
        return GrammarSource(_tagged_text(described, params, options, special_tokens))
    unknown = sorted(set(described) - {"type", "format"})
    if unknown:
        raise grammar_error(f"has the field {unknown[0]!r:.60}; expected 'type' and 'format'", params)
    writer = TagWriter(
        lambda schema, more: json.dumps(_schema(schema, params, {**more} or options)),
        special_tokens,
        lambda message: grammar_error(message, params),
    )
    return GrammarSource(writer.grammar(form), named=writer.named)


def _tagged_text(
    described: Any, params: StructuredOutputsParams, options: dict[str, Any], special_tokens: Mapping[str, int]
) -> str:
    """Return a grammar of free text in which each trigger starts one of its tags: beginning, JSON, end."""
    triggers, structures = _tag_parts(described, params)
    lines = ["%llguidance {}", f"TEXT: {FREE_TEXT}"]
    for index, tag in enumerate(structures):
        begin, end = tag["begin"], tag["end"]
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if not trigger:
            raise grammar_error(
                f"has a tag with begin={begin!r}, which starts with none of the triggers {triggers}", params
            )
        schema = json.dumps(_schema(tag["schema"], params, options))
        head = f"head_{index}"
        if trigger in special_tokens:
            lines.append(f"{head}: TEXT <[{special_tokens[trigger]}]>")
        else:
            lines.append(f"{head}[lazy]: TEXT {json.dumps(trigger)}")
        rest = json.dumps(begin[len(trigger) :]) if len(begin) > len(trigger) else ""
        lines.append(f"tag_{index}: {head} {rest} %json {schema} {json.dumps(end) if end else ''}")
    tags = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return "\n".join([*lines, f"start: ({tags})* TEXT"])


def _tag_parts(described: Any, params: StructuredOutputsParams) -> tuple[list[str], list[dict[str, Any]]]:
    """Return triggers and tags after checking their types."""
    triggers = described.get("triggers") if isinstance(described, dict) else None
    structures = described.get("structures") if isinstance(described, dict) else None
    if not isinstance(triggers, list) or not isinstance(structures, list) or not structures:
        message = (
            "must be a JSON object with the lists 'structures' (not empty) and 'triggers', or with a 'format' and the "
            "type 'structural_tag'"
        )
        raise grammar_error(message, params)
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise grammar_error(f"must have strings as triggers, got {triggers}", params)
    for tag in structures:
        texts = [tag.get(name) for name in ("begin", "end")] if isinstance(tag, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or "schema" not in tag:
            raise grammar_error(
                f"must have tags with the strings 'begin' and 'end' and a 'schema', got {tag!r}", params
            )
    return triggers, structures
