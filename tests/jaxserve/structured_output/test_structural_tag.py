"""Structural tags in their present form: which texts each format takes."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from jaxserve.api.errors import RequestError
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.structured_output.grammar_check import SPECIAL_MARK, Vocabulary, check, make_matcher
from jaxserve.structured_output.grammar_source import write_grammar

SPECIAL = {"<|call|>": 256, "<|end|>": 257, "<|eos|>": 258}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """A token for each byte, and three special ones."""
    tokens = [bytes([byte]) for byte in range(255)] + [b""]
    return Vocabulary([*tokens, *(SPECIAL_MARK + name.encode() for name in SPECIAL)], [258]).build()


def texts_taken(tokenizer: LLTokenizer, form: Any, texts: list[str], **options: Any) -> list[str]:
    """Those texts, with special tokens by their names, that a format takes."""
    described = json.dumps({"type": "structural_tag", "format": form})
    source = write_grammar(StructuredOutputsParams(structural_tag=described, **options), SPECIAL)
    result = check(tokenizer, source.text, source.is_ebnf, source.named)
    assert "grammar" in result, (result, source.text)
    start = make_matcher(tokenizer, result["grammar"])
    found: list[str] = []
    for text in texts:
        ids = list(text.encode())
        for name, token in SPECIAL.items():
            raw = list(name.encode())
            for index in range(len(ids) - len(raw), -1, -1):
                if ids[index : index + len(raw)] == raw:
                    ids[index : index + len(raw)] = [token]
        matcher = start.deep_copy()
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            found.append(text)
    return found


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def token(name: int | str) -> dict[str, Any]:
    return {"type": "token", "token": name}


ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
FLAG = {"type": "json_schema", "json_schema": {"type": "boolean"}}
CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", FLAG, "</f>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS}
THINK = tag("<think>", ANY, "</think>")
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/n"}},
    },
    "required": ["city"],
    "$defs": {"n": {"type": "integer"}},
}

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "const_string": (const('a "b" é\n'), ['a "b" é\n'], ["", "a", 'a "b" é\n.']),
    "json_schema": (NUMBER, ["12", "-3"], ["", "true", "1."]),
    "a schema that allows all": ({"type": "json_schema", "json_schema": True}, ["12", '{"a": [null]}'], ["", "{"]),
    "regex": ({"type": "regex", "pattern": "^[a-z]+/\\d\\/(x|y)$"}, ["ab/1/x"], ["ab/1/", "/1/x", "ab/1/xy"]),
    "an empty regex": ({"type": "sequence", "elements": [{"type": "regex", "pattern": ""}, const("a")]}, ["a"], [""]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "yes" | "no" rest\nrest ::= [0-9]+'}, ["yes", "no12"], ["no"]),
    "lark": ({"type": "grammar", "grammar": 'start: "a" | "b" start'}, ["a", "bba"], ["b", ""]),
    "any_text": (ANY, ["", "any < text\n é"], ["<|call|>"]),
    "excludes": ({**ANY, "excludes": ["bad", "no"]}, ["", "ba", "b ad n o"], ["a bad one", "no", "xno"]),
    "max_chars": ({**ANY, "max_chars": 3}, ["", "é😀a"], ["abcd"]),
    "sequence": (
        {"type": "sequence", "elements": [const("n="), NUMBER, const(";"), FLAG]},
        ["n=1;true"],
        ["n=1;", "n=1"],
    ),
    "text before a string": (
        {"type": "sequence", "elements": [ANY, const("END"), NUMBER]},
        ["ab END1"],
        ["ab", "END", "x1"],
    ),
    "or": ({"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "7"], ["", "yes7"]),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, const("b")]},
        ["b", "ab"],
        ["aab"],
    ),
    "star": ({"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    "repeat without limit": ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaaa"], ["a"]),
    "tag": (tag("<n>", NUMBER, "</n>"), ["<n>12</n>"], ["<n>12", "12", "<n>x</n>", "<n>1</n>."]),
    "ends": (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>x</c></b>", "<a></a>"], ["<a>x", "<a>x</a></b>"]),
    "think": (THINK, ["<think>a </thin b</think>"], ["<think>a", "<think>a</think>b", "a</think>"]),
    "text with a limit in a tag": (tag("<", {**ANY, "max_chars": 2}, ">"), ["<>", "<ab>"], ["<abc>"]),
    "a tag in a tag": (tag("<a>", THINK, "</a>"), ["<a><think>x</think></a>"], ["<a><think>x</a>"]),
    "an end that is empty": (
        {"type": "sequence", "elements": [tag("<a>", ANY, ""), tag("<n>", NUMBER, "")]},
        ["<a>text<n>5"],
        ["<a>text", "<a>text<n>"],
    ),
    "alternatives in a tag": (tag("<", {"type": "or", "elements": [NUMBER, ANY]}, ">"), ["<1>", "<abc>"], ["<abc"]),
    "triggered_tags": (
        TRIGGERED,
        ["", "hi", "<f=a>12</f>", "x<f=b>true</f>y<f=a>3</f>z", "<f"],
        ["<f=c>", "<f=a>true</f>", "<f=b>true", "<f=a>1</f><f="],
    ),
    "at_least_one": (
        {**TRIGGERED, "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f> x <f=b>true</f>"],
        ["", "x<f=a>1</f>"],
    ),
    "stop_after_first": (
        {**TRIGGERED, "stop_after_first": True},
        ["x", "x<f=a>1</f>"],
        ["<f=a>1</f>x", "<f=a>1</f><f=a>1</f>"],
    ),
    "exactly one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f=a>1</f>", "<f=b>true</f>"],
        ["", "x<f=a>1</f>", "<f=a>1</f>x"],
    ),
    "triggers without some text": ({**TRIGGERED, "excludes": ["bad"]}, ["ok<f=a>1</f>ok"], ["bad", "ok<f=a>1</f>bad"]),
    "triggers in a tag": (tag("[", TRIGGERED, "]"), ["[]", "[a<f=a>1</f>b]"], ["[a", "[<f=c>]", "[a]b"]),
    "a trigger that is a special token": (
        {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag("<|call|>f:", NUMBER, "<|end|>")]},
        ["text", "a<|call|>f:1<|end|>b"],
        ["a<|call|>x", "a<|call|>", "a<|call|>f:1", "<|end|>"],
    ),
    "a trigger that begins a special token": (
        {"type": "triggered_tags", "triggers": ["<|"], "tags": [tag("<|call|>", NUMBER, "<|end|>")]},
        ["a<b", "a<|call|>1<|end|>"],
        ["<|call|>x"],
    ),
    "special tokens in strings": (
        {"type": "sequence", "elements": [const("a<|call|>b"), tag("<|call|>", ANY, ["x<|end|>", "y", "<|end|>z"])]},
        ["a<|call|>b<|call|>text<|end|>z", "a<|call|>b<|call|>tex<|end|>", "a<|call|>b<|call|>y"],
        ["a<|call|>b<|call|>text<|end|>", "a<|call|>b<|call|>text"],
    ),
    "reasoning and calls": (
        {"type": "sequence", "elements": [THINK, TRIGGERED]},
        ["<think>a</think>", "<think>a<f=c></think>b<f=a>1</f>"],
        ["b", "<think>a</think><f=c>"],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": CALLS, "separator": ", "},
        ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>true</f>, <f=a>2</f>"],
        ["<f=a>1</f>, ", "<f=a>1</f><f=a>1</f>", "x"],
    ),
    "at least one with separator": (
        {"type": "tags_with_separator", "tags": CALLS, "separator": "", "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f><f=a>1</f>"],
        [""],
    ),
    "one with separator": (
        {"type": "tags_with_separator", "tags": CALLS, "separator": ",", "stop_after_first": True},
        ["", "<f=a>1</f>"],
        ["<f=a>1</f>,<f=a>1</f>"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<n>", NUMBER], ["<b>", FLAG]], "excludes": ["bad"]},
        ["", "a<n>1 b<b>true", "a"],
        ["<n>x", "bad", "<b>"],
    ),
    "dispatch once": ({"type": "dispatch", "rules": [["<n>", NUMBER]], "loop": False}, ["a", "a<n>1"], ["a<n>1 b"]),
    "dispatch in a tag": (
        tag("[", {"type": "dispatch", "rules": [["<n>", NUMBER]], "excludes": ["]"]}, "]"),
        ["[a<n>1 b]", "[]"],
        ["[a", "[<n>]"],
    ),
    "token": (
        {"type": "sequence", "elements": [token("<|call|>"), const("a"), token(257)]},
        ["<|call|>a<|end|>"],
        ["<|call|>a"],
    ),
    "tokens around text": (
        tag(token("<|call|>"), ANY, token("<|end|>")),
        ["<|call|>x<|end|>"],
        ["<|call|>x", "x<|end|>"],
    ),
    "exclude_token": (
        {"type": "exclude_token", "exclude_tokens": ["<|call|>", 97]},
        ["b", "<|end|>"],
        ["a", "<|call|>", "bb"],
    ),
    "any_tokens": ({"type": "any_tokens", "exclude_tokens": ["<|call|>"]}, ["", "ab<|end|>"], ["a<|call|>"]),
    "any_tokens with a limit": ({"type": "any_tokens", "max_tokens": 2}, ["", "a<|end|>"], ["abc"]),
    "any_tokens in a tag": (
        tag(token("<|call|>"), {"type": "any_tokens"}, token("<|end|>")),
        ["<|call|>ab<|end|>"],
        ["<|call|><|end|><|end|>"],
    ),
    "token_triggered_tags": (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<|call|>"],
            "tags": [tag(token("<|call|>"), NUMBER, token("<|end|>"))],
        },
        ["", "ab", "a<|call|>1<|end|>b<|call|>2<|end|>"],
        ["<|call|>", "<|call|>x<|end|>"],
    ),
    "at least one token": (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": [256],
            "tags": [tag(token(256), NUMBER, token(257))],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<|call|>1<|end|>"],
        ["", "a<|call|>1<|end|>", "<|call|>1<|end|>b"],
    ),
    "token_dispatch": (
        {"type": "token_dispatch", "rules": [["<|call|>", NUMBER]], "loop": False},
        ["a", "a<|call|>1"],
        ["a<|call|>", "<|call|>1b"],
    ),
    "qwen_xml": (
        {"type": "json_schema", "json_schema": LOOK, "style": "qwen_xml"},
        [
            "<parameter=city>Zü <b>rich</parameter>",
            "\n<parameter=city>\nX\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=unit>C</parameter>\n",
            "<parameter=city>X</parameter><parameter=list>[1,2]</parameter>",
        ],
        [
            "",
            "<parameter=days>2</parameter>",
            "<parameter=city>X",
            "<parameter=city>X</parameter><parameter=unit>K</parameter>",
        ],
    ),
    "qwen_xml_parameter": (
        tag("<function=look>", {"type": "qwen_xml_parameter", "json_schema": LOOK}, "</function>"),
        ["<function=look><parameter=city>X</parameter></function>"],
        [
            "<function=look></function>",
            "<function=look><parameter=city>X</parameter><parameter=list>[x]</parameter></function>",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_formats(tokenizer: LLTokenizer, name: str) -> None:
    form, good, bad = CASES[name]
    assert texts_taken(tokenizer, form, [*good, *bad]) == good


def test_white_space_of_schemas(tokenizer: LLTokenizer) -> None:
    """The format's own limit, or the option of the request."""
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
    texts = ["[1,2]", "[1, 2]", "[1,   2]"]
    assert texts_taken(tokenizer, form, texts) == texts
    assert texts_taken(tokenizer, form, texts, disable_any_whitespace=True) == texts[:1]
    assert texts_taken(tokenizer, {**form, "max_whitespace_cnt": 1}, texts) == texts[:2]
    assert texts_taken(tokenizer, {**form, "max_whitespace_cnt": 0}, texts) == texts[:1]


REFUSED: list[tuple[Any, str]] = [
    ({"type": "magic"}, "has a format of type 'magic'; supported types: const_string, json_schema"),
    ({"value": "a"}, "has a format of type None; supported types"),
    ({"type": []}, "has a format of type"),
    ({"type": "const_string"}, "has a const_string whose value is None; expected a string"),
    ({**const("a"), "x": 1}, "has a const_string with the field 'x'; supported fields: value"),
    ({**NUMBER, "style": "glm_xml"}, "has a json_schema whose style is 'glm_xml'; expected json or qwen_xml"),
    ({**NUMBER, "any_order": True}, "expected false: properties are in the schema's order"),
    ({"type": "json_schema", "json_schema": "{}"}, "whose json_schema is '{}'; expected a JSON schema"),
    ({"type": "json_schema", "json_schema": False}, "must contain JSON schemas that are objects, got False"),
    ({**ANY, "max_tokens": 5}, "has a any_text whose max_tokens is 5; expected null: use max_chars"),
    ({**ANY, "excludes": [""]}, "expected a list of filled strings"),
    ({"type": "sequence", "elements": []}, "expected a list of at least one format"),
    (
        {"type": "sequence", "elements": [ANY, NUMBER]},
        "free text before a 'json_schema'; only const_string and tag can end it",
    ),
    ({"type": "star", "content": ANY}, "has a star of free text, which has no end"),
    ({"type": "repeat", "min": 3, "max": 2, "content": NUMBER}, "has a repeat whose max=2 is below min=3"),
    ({"type": "repeat", "min": 0, "max": True, "content": NUMBER}, "expected an integer from 0, or -1"),
    (tag("<a>", ANY, []), r"has a tag whose end is \[\]"),
    (tag("<a>", ANY, ["</a>", ""]), "expected a string, or a list of filled strings"),
    (tag(5, ANY, "a"), "has a tag whose begin is 5; expected a string or a token format"),
    ({**TRIGGERED, "triggers": ["<g="]}, "has a tag with begin='<f=a>', which starts with none of the triggers"),
    ({**TRIGGERED, "tags": [NUMBER]}, "expected a list of at least one tag"),
    ({**TRIGGERED, "tags": [tag(token(1), ANY, "a")]}, "which starts with none of the triggers"),
    (
        token("<|other|>"),
        "has the token '<|other|>', which is no special token of the model; give its id".replace("|", r"\|"),
    ),
    (token(-1), "expected a token id or name"),
    ({"type": "dispatch", "rules": [["a"]]}, "expected a list of pairs of a string and a format"),
    ({"type": "dispatch", "rules": [["a", ANY]]}, "has a dispatch of free text, which has no end"),
    ({"type": "qwen_xml_parameter", "json_schema": {"type": "array"}}, "parameters that are no object with properties"),
    (
        {"type": "qwen_xml_parameter", "json_schema": {"anyOf": []}},
        "parameters with anyOf, which is not supported there",
    ),
    ({"type": "qwen_xml_parameter", "json_schema": {"required": ["a"]}}, "whose required 'a' is no property"),
    (
        {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"type": "string", "maxLength": 2}}}},
        "has a qwen_xml parameter with maxLength, which is not supported there",
    ),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_be_enforced_is_refused_by_name(form: Any, message: str) -> None:
    described = json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(RequestError, match=f"structured_outputs.structural_tag .*{message}"):
        write_grammar(StructuredOutputsParams(structural_tag=described), SPECIAL)


def test_the_form_itself() -> None:
    for described, message in (
        ({"type": "structural_tag"}, "must be a JSON object with the lists 'structures'"),
        ({"type": "structural_tag", "format": None}, "must be a JSON object with the lists 'structures'"),
        (
            {"type": "structural_tag", "format": ANY, "triggers": []},
            "has the field 'triggers'; expected 'type' and 'format'",
        ),
        ([], "or with a 'format' and the type 'structural_tag'"),
    ):
        with pytest.raises(RequestError, match=message):
            write_grammar(StructuredOutputsParams(structural_tag=json.dumps(described)), SPECIAL)
    old = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<a"]}
    assert "tag_0" in write_grammar(StructuredOutputsParams(structural_tag=json.dumps(old)), SPECIAL).text


def test_ids_outside_the_vocabulary_are_refused(tokenizer: LLTokenizer) -> None:
    described = json.dumps({"type": "structural_tag", "format": token(5000)})
    source = write_grammar(StructuredOutputsParams(structural_tag=described), SPECIAL)
    assert "error" in check(tokenizer, source.text, source.is_ebnf, source.named)
