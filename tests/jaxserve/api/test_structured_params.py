"""StructuredOutputsParams and RepetitionDetectionParams: exactly one kind, nothing empty, nothing too deep."""

import copy
import json
import pickle
from typing import Any

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams


def nested(levels: int) -> Any:
    """An object with others in it, as many levels deep in all."""
    found: Any = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ({"json": {"type": "integer", "enum": (1, 2)}}, {"type": "integer", "enum": [1, 2]}),
        ({"json": '{"type": "integer"}'}, '{"type": "integer"}'),
        ({"json": {}}, {}),
        ({"json": "true"}, "true"),
        ({"regex": r"\d+"}, r"\d+"),
        ({"regex": ""}, ""),
        ({"choice": ["a", ""]}, ("a", "")),
        ({"grammar": "start: WORD"}, "start: WORD"),
        ({"json_object": True}, True),
        ({"structural_tag": "{}"}, "{}"),
    ],
)
def test_kinds(values: dict[str, Any], stored: object) -> None:
    params = StructuredOutputsParams(**values)
    (kind,) = values
    assert params.kind == kind
    assert getattr(params, kind) == stored
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(params) == hash(StructuredOutputsParams(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "structured_outputs must have exactly one of json, regex, .*; got none"),
        ({"disable_any_whitespace": True}, "structured_outputs must have exactly one of .*; got none"),
        ({"json": {}, "regex": "a"}, "structured_outputs must have exactly one of .*; got json and regex"),
        ({"json": ""}, "structured_outputs.json cannot be an empty string"),
        ({"json": " \n"}, "structured_outputs.json cannot be an empty string"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON: Expecting"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON schema, which is an object"),
        ({"json": 5}, "structured_outputs.json must be a dict, got int"),
        ({"json": {"a": object()}}, "structured_outputs.json must hold JSON values, got object"),
        ({"json": {1: 2}}, "a key of structured_outputs.json must be a string, got int"),
        ({"json": nested(65)}, "structured_outputs.json is nested too deeply: expected at most 64 levels"),
        ({"json": json.dumps(nested(65))}, "structured_outputs.json is nested too deeply: expected at most 64 levels"),
        ({"json": "[" * 100_000}, "structured_outputs.json is nested too deeply: expected at most 64 levels"),
        ({"regex": 5}, "structured_outputs.regex must be a string, got int"),
        ({"regex": "a\0"}, "structured_outputs.regex cannot contain a NUL character"),
        ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode"),
        ({"choice": []}, "structured_outputs.choice cannot be an empty list"),
        ({"choice": "ab"}, "structured_outputs.choice must be a list, got str"),
        ({"choice": ["a", 1]}, "an item of structured_outputs.choice must be a string, got int"),
        ({"grammar": " "}, "structured_outputs.grammar cannot be an empty string"),
        ({"grammar": ["x"]}, "structured_outputs.grammar must be a string, got list"),
        ({"json_object": False}, "structured_outputs.json_object must be True if given"),
        ({"json_object": 1}, "structured_outputs.json_object must be True or False, got int"),
        ({"structural_tag": ""}, "structured_outputs.structural_tag cannot be an empty string"),
        ({"structural_tag": "{"}, "structured_outputs.structural_tag is not valid JSON"),
        ({"structural_tag": {}}, "structured_outputs.structural_tag must be a string, got dict"),
        ({"structural_tag": json.dumps(nested(81))}, "structural_tag is nested too deeply: expected at most 80 levels"),
        ({"json": {}, "whitespace_pattern": 3}, "structured_outputs.whitespace_pattern must be a string, got int"),
        ({"json": {}, "disable_any_whitespace": "no"}, "disable_any_whitespace must be True or False, got str"),
        (
            {"json": {}, "disable_additional_properties": None},
            "additional_properties must be True or False, got NoneType",
        ),
        ({"jsn": {}}, "StructuredOutputsParams has no field 'jsn'; did you mean 'json'"),
    ],
)
def test_bad_structures(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**values)


def test_nesting_at_the_limit() -> None:
    assert StructuredOutputsParams(json=nested(64)).json == nested(64)
    StructuredOutputsParams(json=json.dumps(nested(64)))
    StructuredOutputsParams(structural_tag=json.dumps(nested(80)))


def test_an_object_within_itself_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = schema
    with pytest.raises(RequestError, match="nested too deeply"):
        StructuredOutputsParams(json=schema)


def test_repr_shows_what_is_set() -> None:
    assert repr(StructuredOutputsParams(choice=["a"])) == "StructuredOutputsParams(choice=('a',))"
    assert repr(RepetitionDetectionParams()) == "RepetitionDetectionParams()"


def test_repetition_detection() -> None:
    params = RepetitionDetectionParams(max_pattern_size=20, min_pattern_size=3, min_count=4)
    assert (params.max_pattern_size, params.min_pattern_size, params.min_count) == (20, 3, 4)
    assert RepetitionDetectionParams().max_pattern_size == 0
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError):
        params.min_count = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size must be at least 0, got -1"),
        ({"max_pattern_size": 2.0}, "repetition_detection.max_pattern_size must be an int, got float"),
        ({"min_pattern_size": 1}, "min_pattern_size must be at most max_pattern_size=0, got 1"),
        ({"max_pattern_size": 5}, "repetition_detection.min_count must be at least 2, got 0"),
        ({"max_pattern_size": 5, "min_count": 1}, "repetition_detection.min_count must be at least 2, got 1"),
        ({"min_count": -1}, "repetition_detection.min_count must be at least 0, got -1"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size must be at most 1024, got 1025"),
        ({"max_patern_size": 5}, "RepetitionDetectionParams has no field 'max_patern_size'; did you mean 'max_pattern"),
    ],
)
def test_bad_repetition_detection(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        RepetitionDetectionParams(**values)
