"""JSON schemas as llguidance gets them: annotations, what it refuses, and bounds of numbers."""

import copy
import json
import math
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.api.errors import RequestError
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.structured_output.grammar_source import write_grammar
from jaxserve.structured_output.json_schema import FORMATS

BYTES = LLTokenizer("byte")


def matcher(schema: Any, **options: Any) -> LLMatcher:
    """Of a completion that follows a schema, over single bytes."""
    params = StructuredOutputsParams(json=schema, **options)
    return LLMatcher(BYTES, write_grammar(params, {}).text, log_level=0)


def takes(schema: Any, text: str) -> bool:
    """Whether a text can be generated for a schema."""
    made = matcher(schema)
    assert not made.is_error(), made.get_error()
    raw = list(text.encode())
    return made.try_consume_tokens(raw) == len(raw) and made.is_accepting()


# As Pydantic, OpenAPI and JSON Schema write them.
NAMES = (
    "password binary byte path file-path directory-path uri-reference uri-template iri iri-reference idn-email"
    " idn-hostname json-pointer relative-json-pointer regex json-string multi-host-uri int32 int64 float double decimal"
    " base64 base64url color phone unix-time uint64 my-own"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_formats_without_effect_are_annotations(name: str) -> None:
    for kind in ("string", ["string", "null"], None):
        schema = {"format": name, **({} if kind is None else {"type": kind})}
        inside = {"type": "object", "properties": {"format": schema}, "$defs": {"a": schema}, "anyOf": [{}, schema]}
        assert takes(schema, '"any text"')
        assert takes(inside, '{"format":"x"}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_enforced_stay_so(name: str) -> None:
    assert not takes({"type": "string", "format": name}, '"?? ??"')
    assert takes({"const": {"format": "password"}}, '{"format":"password"}'), "a value is no schema"


def test_properties_may_have_names_of_keywords() -> None:
    names = ("format", "uniqueItems", "not", "const", "enum", "$schema", "if", "properties")
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": list(names)}
    text = json.dumps(dict.fromkeys(names, True), separators=(",", ":"))
    assert takes(schema, text)
    assert not takes(schema, text.replace("true", "1"))
    assert not takes({"type": "object", "properties": {"uniqueItems": False}}, '{"uniqueItems":1}')


IDLE = [
    *({"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"propertyNames": {"type": "string"}}),
    *({"propertyNames": True}, {"unevaluatedItems": True}, {"unevaluatedProperties": {}}, {"dependentRequired": {}}),
    *({"dependentRequired": {"a": []}}, {"dependentSchemas": {"a": True}}, {"dependencies": {}}, {"not": False}),
    *({"if": {"type": "array"}}, {"then": False}, {"else": False}, {"if": False, "then": True, "else": {}}),
    *({"minContains": 2}, {"maxContains": 1}, {"contains": False, "minContains": 0}, {"$dynamicAnchor": "a"}),
    *({"$recursiveAnchor": True}, {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base"}, {"$schema": 3}),
    *(
        {"$schema": "https://json-schema.org/draft-07/schema"},
        {"propertyNames": {"format": "byte"}},
        {"nullable": True},
    ),
    *({"discriminator": {"propertyName": "a"}}, {"xml": {"name": "a"}}, {"example": 1}, {"x-own": {"type": 3}}),
    *({"readOnly": True}, {"deprecated": False}, {"contentEncoding": "base64", "contentMediaType": "image/png"}),
    *({"contentSchema": {"not": {}}}, {"externalDocs": {}}, {"examples": [{"format": "x"}]}, {"$comment": "c"}),
]


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_without_effect_are_annotations(keywords: dict[str, Any]) -> None:
    before = copy.deepcopy(keywords)
    assert takes(keywords, '{"a":[1,1]}')
    assert takes({"type": "array", "items": {"type": "integer", **keywords}, **keywords}, "[1]")
    assert keywords == before


REFUSED = [
    *({"uniqueItems": True}, {"propertyNames": {"pattern": "^a"}}, {"unevaluatedItems": False}, {"not": {}}),
    *({"unevaluatedProperties": False}, {"dependentRequired": {"a": ["b"]}}, {"dependencies": {"a": {"not": {}}}}),
    *(
        {"if": {}, "then": False},
        {"contains": {"type": "integer"}},
        {"contains": True, "minContains": 0, "maxContains": 1},
    ),
    *({"$dynamicRef": "#a"}, {"dependentSchemas": {"a": False}}),
]


@pytest.mark.parametrize("keywords", REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_by_name(keywords: dict[str, Any]) -> None:
    error = matcher({"type": ["array", "object"], **keywords}).get_error()
    assert "Unimplemented keys" in error and next(iter(keywords)) in error


@pytest.mark.parametrize(
    "number", [9007199254740993, 2**62 + 1, 2**64 + 1, 10**400 + 1, 123456789012345678, -(2**53) - 1]
)
def test_constants_that_would_be_written_as_other_numbers_are_refused(number: int) -> None:
    for schema in ({"const": number}, {"type": "object", "properties": {"a": {"enum": [1, {"b": [number]}]}}}):
        with pytest.raises(
            RequestError, match=f"structured_outputs.json has the constant {number}, which has too many"
        ):
            write_grammar(StructuredOutputsParams(json=schema), {})
    assert takes({"const": 2**53 + 2}, str(2**53 + 2))
    assert takes({"enum": [0.1, 123456789012345, 1e22]}, str(10**22))
    with pytest.raises(RequestError, match="has 65 constants of over 15 digits; the limit is 64"):
        write_grammar(StructuredOutputsParams(json={"enum": [2**60 + i for i in range(65)]}), {})


# -------------------------------------------------------------------------------------------------------------- bounds

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def random_bounds(generator: random.Random) -> dict[str, Any]:
    """A schema of numbers with bounds of all sizes, some in the form of draft 4."""

    def bound() -> int | float:
        made = (
            generator.randint(-20, 20),
            generator.uniform(-10, 10),
            round(generator.uniform(-10, 10), 2),
            generator.randint(-(2**63), 2**63 - 1),
            2**53 + generator.randint(-3, 3),
            generator.uniform(-1, 1) * 10 ** generator.randint(-6, 15),
            generator.choice([0, 0.0, -0.0, 1, 2**63 - 1, -(2**63), 2**64 - 1]),
        )
        return generator.choice(made)

    kind = generator.choice(["integer", "number", ["number", "null"], ["integer", "string"], None])
    schema: dict[str, Any] = {} if kind is None else {"type": kind}
    schema |= {name: bound() for name in generator.sample(KEYWORDS, generator.randint(1, 3))}
    if generator.random() < 0.2:
        for limit, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            schema.pop(strict, None)
            if limit in schema:
                schema[strict] = generator.choice([True, False])
    return schema


def near(schema: dict[str, Any]) -> set[str]:
    """Numbers on and around the bounds."""
    texts: set[str] = set()
    for name in KEYWORDS:
        bound = schema.get(name)
        if bound is None or isinstance(bound, bool):
            continue
        for number in (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)):
            exact, tiny = Decimal(repr(number)), Decimal("1e-20")
            around = (
                exact,
                exact + 1,
                exact - 1,
                exact + tiny,
                exact - tiny,
                *map(Decimal, (int(exact), int(exact) - 1)),
            )
            texts |= {format(one, "f") for one in around}
    return texts


def test_numbers_keep_to_their_bounds() -> None:
    """The validator is the jsonschema package, with exact decimals: a reader of floats rounds 9.99…9 to 10."""
    num_taken = 0
    for seed in range(80):
        schema = random_bounds(random.Random(seed))
        is_draft_4 = any(isinstance(schema.get(name), bool) for name in KEYWORDS)
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        validator = (jsonschema.Draft4Validator if is_draft_4 else jsonschema.Draft202012Validator)(exact)
        start = matcher(schema)
        if start.is_error():
            assert "Unsatisfiable" in start.get_error() or "Failed to generate regex" in start.get_error()
            continue
        for text in near(schema):
            raw, made = list(text.encode()), start.deep_copy()
            if made.try_consume_tokens(raw) == len(raw) and made.is_accepting():
                num_taken += 1
                assert validator.is_valid(json.loads(text, parse_float=Decimal)), (schema, text)
    assert num_taken > 100


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-1", str(2**62)], [str(2**63)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**62)], ["-1", str(2**64)]),
        ({"type": "number", "exclusiveMaximum": 10}, ["9.9999", "-3"], ["10", "10.0"]),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            ["0.001", "1"],
            ["0", "-0", "0.0", "1." + "0" * 30 + "1"],
        ),
        ({"type": "number", "minimum": 10, "exclusiveMinimum": True}, ["10.5", "11"], ["10", "9.99"]),
        ({"type": "number", "maximum": 123456789.25}, ["123456789.25", "123456789"], ["123456789.26"]),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
        ({"type": "integer", "minimum": 1.5}, ["2"], ["1"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        ({"minimum": 3, "maximum": 5}, ["3", "5", '"x"'], ["2.9", "5.1"]),
    ],
)
def test_bounds(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in [*good, *bad] if takes(schema, text)] == good
