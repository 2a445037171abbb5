"""SamplingParams: defaults, normalisation, and a clear error for everything else."""

import ast
import copy
import dataclasses
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    check_against,
)

WITHOUT_EFFECT = {"spaces_between_special_tokens"}  # it concerns slow tokenizers, and there are none here

# vLLM's defaults (vllm-conventions 2.4); lists of stops and bad words are stored as tuples here.
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": (),
    "output_kind": RequestOutputKind.CUMULATIVE,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert params.output_kind.name == "CUMULATIVE"
    assert set(VLLM_DEFAULTS) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert repr(params) == "SamplingParams()"


@pytest.mark.parametrize(
    ("given_values", "stored"),
    [
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": [7, np.int32(9)]}, {"stop_token_ids": (7, 9)}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 0}, {"seed": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 20}),
        ({"max_tokens": None, "min_tokens": 99}, {"max_tokens": None, "min_tokens": 99}),
        ({"max_tokens": -1, "min_tokens": 99}, {"max_tokens": None, "min_tokens": 99}),
        ({"temperature": 0, "top_p": 0.3, "top_k": 5, "min_p": 0.1}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 1}),
        ({"logprobs": -1, "prompt_logprobs": 5000}, {"logprobs": -1, "prompt_logprobs": 5000}),
        ({"stop_token_ids": [3, 3, 1]}, {"stop_token_ids": (3, 1)}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": [], "logit_bias": {}, "extra_args": {}}, {"bad_words": (), "logit_bias": None}),
        ({"bad_words": ["a", " b", "a"]}, {"bad_words": ("a", " b")}),
        ({"logit_bias": {"5": 1, 6: -200.5}}, {"logit_bias": {5: 1.0, 6: -200.5}}),
        ({"logit_bias": {np.int64(5): -math.inf, 6: 1e300}}, {"logit_bias": {5: -1e15, 6: 1e15}}),
        ({"allowed_token_ids": (4, 4, np.int64(2))}, {"allowed_token_ids": (4, 2)}),
        ({"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
        ({"logprob_token_ids": [7, 2]}, {"logprob_token_ids": (7, 2), "logprobs": None}),
        ({"logprob_token_ids": [7, 2], "logprobs": 2}, {"logprob_token_ids": (7, 2), "logprobs": 2}),
        ({"logprob_token_ids": []}, {"logprob_token_ids": None}),
        ({"output_kind": "DELTA"}, {"output_kind": RequestOutputKind.DELTA}),
        ({"output_kind": "final_only"}, {"output_kind": RequestOutputKind.FINAL_ONLY}),
        ({"output_kind": RequestOutputKind.DELTA}, {"output_kind": RequestOutputKind.DELTA}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": StructuredOutputsParams(regex="a+")}),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)},
        ),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
        ({"extra_args": {"a": (1, None, {"b": np.float32(0.5)})}}, {"extra_args": {"a": [1, None, {"b": 0.5}]}}),
        ({"flat_logprobs": True, "spaces_between_special_tokens": False}, {"flat_logprobs": True}),
        ({"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": True}),
    ],
)
def test_normalisation(given_values: dict[str, Any], stored: dict[str, Any]) -> None:
    params = SamplingParams(**given_values)
    assert {name: getattr(params, name) for name in stored} == stored


@pytest.mark.parametrize("temperature", [1e-9, 0.001, 0.0099])
def test_tiny_temperature_is_raised_with_a_warning(temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.01
    assert not params.is_greedy
    assert "using 0.01" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": math.nan}, r"temperature must be in \[0, 2\], got nan \(parameter=temperature, value=nan\)"),
        ({"temperature": math.inf}, r"temperature must be in \[0, 2\], got inf"),
        ({"temperature": -0.1}, r"temperature must be in \[0, 2\], got -0.1"),
        ({"temperature": 2.1}, r"temperature must be in \[0, 2\]"),
        ({"temperature": "1"}, "temperature must be a number in .*, got str"),
        ({"temperature": None}, "temperature must be a number in .*, got NoneType"),
        ({"temperature": True}, "temperature must be a number in .*, got bool"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"top_k": 2**31}, "top_k must be at most 2147483647, got 2147483648"),
        ({"top_k": 5.0}, "top_k must be an int, got float"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\]"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 16385}, "n must be at most 16384"),
        ({"n": True}, "n must be an int, got bool"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -2}, "max_tokens must be at least 1, got -2"),
        ({"max_tokens": 1.5}, "max_tokens must be an int, got float"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
        ({"seed": -2}, "seed must be at least 0, got -2"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"seed": 1.0}, "seed must be an int, got float"),
        ({"logprobs": -2}, "logprobs must be at least -1, got -2"),
        ({"logprobs": False}, "logprobs must be an int, got bool"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be at least -1, got -2"),
        ({"stop": ""}, "stop cannot contain an empty string"),
        ({"stop": [str(i) for i in range(65)]}, "stop must have at most 64 strings, got 65"),
        ({"stop": "a" * 257}, "stop must have strings of at most 256 characters, got one of 257"),
        ({"bad_words": [str(i) for i in range(1025)]}, "bad_words must have at most 1024 strings, got 1025"),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string"),
        ({"stop": 5}, "stop must be a list, got int"),
        ({"stop": ["a", 5]}, "stop must be a string or a list of strings, got an item of int"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list, got str"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids must be an int, got float"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got int"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens must be True or False, got str"),
        ({"temperature": 10**400}, r"temperature must be in \[0, 2\], got inf"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"presence_penalty": math.nan}, r"presence_penalty must be in \[-2, 2\], got nan"),
        ({"frequency_penalty": -3}, r"frequency_penalty must be in \[-2, 2\], got -3"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number in .*, got NoneType"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \[1e-15, 1e\+15\], got 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be in .*, got -1"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be in .*, got inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be in .*, got nan"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number .*, got bool"),
        ({"logit_bias": [1]}, "logit_bias must be a dict, got list"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias must have token ids as keys, got 'x'"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias must have token ids >= 0 as keys, got 1.5"),
        ({"logit_bias": {True: 1.0}}, "logit_bias must have token ids >= 0 as keys, got True"),
        (
            {"logit_bias": {-1: 1.0}},
            r"logit_bias must have token ids >= 0 as keys, got -1 \(parameter=logit_bias, value=-1",
        ),
        ({"logit_bias": {1: 1.0, "1": 2.0}}, "logit_bias has token id 1 twice"),
        ({"logit_bias": {1: "much"}}, r"logit_bias\[1\] must be a number .*, got str"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be in \[-inf, inf\], got nan"),
        ({"allowed_token_ids": []}, "allowed_token_ids cannot be an empty list"),
        ({"allowed_token_ids": 3}, "allowed_token_ids must be a list, got int"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids must be an int, got str"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0, got -1"),
        ({"bad_words": "no"}, "bad_words must be a list, got str"),
        ({"bad_words": ["a", ""]}, "bad_words cannot contain an empty string"),
        ({"bad_words": [3]}, "bad_words must be a list of strings, got an item of int"),
        ({"bad_words": ["\ud800"]}, "bad_words is not valid Unicode"),
        ({"stop": "\ud800"}, "stop is not valid Unicode"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids must have at most 128 ids, got 129"),
        ({"logprob_token_ids": [True]}, "logprob_token_ids must be an int, got bool"),
        (
            {"logprob_token_ids": [1, 2], "logprobs": 3},
            "None or the number of logprob_token_ids, 2; got 3",
        ),
        ({"flat_logprobs": 1}, "flat_logprobs must be True or False, got int"),
        ({"spaces_between_special_tokens": None}, "spaces_between_special_tokens must be True or False, got NoneType"),
        ({"output_kind": "SOME"}, "output_kind must be a RequestOutputKind or one of CUMULATIVE, DELTA, FINAL_ONLY"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind .*; got 1"),
        ({"structured_outputs": "json"}, "structured_outputs must be StructuredOutputsParams or a dict .*, got str"),
        ({"structured_outputs": {"jsn": {}}}, "StructuredOutputsParams has no field 'jsn'; did you mean 'json'"),
        ({"structured_outputs": {3: {}}}, "structured_outputs must be a string, got int"),
        ({"repetition_detection": 3}, "repetition_detection must be RepetitionDetectionParams or a dict .*, got int"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count must be at least 2, got 0"),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be at least 0, got -2"),
        ({"thinking_token_budget": 1.0}, "thinking_token_budget must be an int, got float"),
        ({"thinking_token_budget": True}, "thinking_token_budget must be an int, got bool"),
        ({"skip_reading_prefix_cache": "no"}, "skip_reading_prefix_cache must be True or False, got str"),
        ({"skip_reading_prefix_cache": False, "prompt_logprobs": 0}, "skip_reading_prefix_cache cannot be False with"),
        ({"extra_args": [1]}, "extra_args must be a dict, got list"),
        ({"extra_args": {1: 1}}, "a key of extra_args must be a string, got int"),
        ({"extra_args": {"a": {"b": object()}}}, "extra_args must hold JSON values, got object"),
    ],
)
def test_bad_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_extra_args_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(62):
        deep = [deep]
    SamplingParams(extra_args={"a": deep})
    with pytest.raises(RequestError, match="extra_args is nested too deeply: expected at most 64 levels"):
        SamplingParams(extra_args={"a": [deep]})
    deep.append(deep)
    with pytest.raises(RequestError, match="extra_args is nested too deeply"):
        SamplingParams(extra_args={"a": deep})


def test_what_is_stored_is_a_copy() -> None:
    bias, schema = {1: 2.0}, {"type": "object", "properties": {}}
    params = SamplingParams(logit_bias=bias, structured_outputs=StructuredOutputsParams(json=schema))
    bias[1] = 3.0
    schema["properties"]["x"] = {"type": "integer"}
    assert params.logit_bias == {1: 2.0}
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"type": "object", "properties": {}}


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(RequestError, match="no field 'temprature'; did you mean 'temperature'"):
        SamplingParams(**dict[str, Any](temprature=0.5))
    with pytest.raises(RequestError, match="no field 'zzz'; fields: n, "):
        SamplingParams(**dict[str, Any](zzz=0.5))
    with pytest.raises(RequestError, match="no field 'max_token'; did you mean 'max_tokens'"):
        SamplingParams().clone(max_token=3)


def test_clone_checks_again_and_leaves_the_first() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    changed = params.clone(temperature=0.0)
    assert (changed.is_greedy, changed.stop, changed.seed) == (True, ("x",), 3)
    assert params.temperature == 0.5
    with pytest.raises(RequestError, match="n must be 1"):
        changed.clone(n=2)
    with pytest.raises(AttributeError):
        params.seed = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_equality_hash_and_pickle() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], stop_token_ids=[1])
    assert params == SamplingParams(temperature=0.5, stop="x", stop_token_ids=(1,))
    assert hash(params) == hash(params.clone())
    assert pickle.loads(pickle.dumps(params)) == params
    with_dicts = params.clone(logit_bias={1: 2}, extra_args={"a": [1]}, structured_outputs={"json": {}})
    assert hash(with_dicts) == hash(with_dicts.clone())
    assert with_dicts != params
    assert pickle.loads(pickle.dumps(with_dicts)) == with_dicts
    assert copy.deepcopy(with_dicts) == with_dicts


def test_helpers() -> None:
    assert SamplingParams(logprobs=0).needs_logprobs
    assert SamplingParams(prompt_logprobs=1).needs_logprobs
    assert SamplingParams(logprob_token_ids=[1]).needs_logprobs
    assert not SamplingParams().needs_logprobs
    assert SamplingParams().num_logprobs is None
    assert SamplingParams(logprobs=-1).num_logprobs == -1
    assert SamplingParams(logprob_token_ids=[1, 2]).num_logprobs == 2
    assert SamplingParams().reads_prefix_cache
    assert not SamplingParams(prompt_logprobs=0).reads_prefix_cache
    assert SamplingParams(prompt_logprobs=0).clone(prompt_logprobs=None).reads_prefix_cache
    assert not SamplingParams(skip_reading_prefix_cache=True).reads_prefix_cache
    assert SamplingParams(skip_reading_prefix_cache=False).reads_prefix_cache
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert repr(SamplingParams(temperature=0.0, stop="a")) == "SamplingParams(temperature=0.0, stop=('a',))"


def test_generation_config(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_new_tokens": 99,
        "repetition_penalty": 1.05,
        "eos_token_id": [1, 2],
        "min_p": None,
    }
    with caplog.at_level(logging.WARNING):
        params = SamplingParams.from_generation_config(config, seed=1)
    assert params == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=99, seed=1, repetition_penalty=1.05
    )
    assert not caplog.records


def test_generation_config_without_sampling_is_greedy(caplog: pytest.LogCaptureFixture) -> None:
    config = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.0}
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.0)
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert SamplingParams.from_generation_config(config, temperature=0.7).temperature == 0.7
    assert not caplog.records


def test_generation_config_with_a_bad_value_names_it() -> None:
    with pytest.raises(RequestError, match="top_p must be in"):
        SamplingParams.from_generation_config({"top_p": 7})


def test_from_optional() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=None, seed=None, max_tokens=None)
    assert params == SamplingParams(max_tokens=None)
    biased = SamplingParams.from_optional(logit_bias={"1": 500, "2": -500, "3": 7}, temperature=0.5)
    assert biased == SamplingParams(logit_bias={1: 100.0, 2: -100.0, 3: 7.0}, temperature=0.5)
    with pytest.raises(RequestError, match="no field 'topp'; did you mean 'top_p'"):
        SamplingParams.from_optional(topp=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logprobs": 21}, "logprobs must be at most 20, the engine's max_logprobs; got 21 .parameter=logprobs"),
        ({"logprobs": -1}, r"logprobs must be at most 20, .*; got -1 \(all 100 tokens\)"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20, .*; got 21"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs must be at most 20, .* \(all 100 tokens\)"),
        (
            {"logit_bias": {99: 1, 100: 1, 3: 1, 400: 1}},
            r"logit_bias must have token ids from 0 to 99, got \[100, 400\]",
        ),
        ({"allowed_token_ids": [5, 100]}, r"allowed_token_ids must have token ids from 0 to 99, got \[100\]"),
        ({"logprob_token_ids": [100]}, r"logprob_token_ids must have token ids from 0 to 99, got \[100\]"),
        ({"stop_token_ids": [100]}, r"stop_token_ids must have token ids from 0 to 99, got \[100\]"),
    ],
)
def test_what_the_engine_cannot_do(values: dict[str, Any], message: str) -> None:
    params = SamplingParams(**values)
    with pytest.raises(RequestError, match=message) as caught:
        check_against(params, vocab_size=100, max_logprobs=20)
    assert caught.value.parameter == next(iter(values))


def test_what_the_engine_can_do() -> None:
    ids = {"logit_bias": {99: 1.0}, "allowed_token_ids": [99], "stop_token_ids": [99]}
    check_against(SamplingParams(logprobs=20, prompt_logprobs=20, **ids), vocab_size=100, max_logprobs=20)
    check_against(SamplingParams(logprobs=-1, prompt_logprobs=-1), vocab_size=100, max_logprobs=100)
    check_against(SamplingParams(logprobs=-1, prompt_logprobs=-1), vocab_size=100, max_logprobs=-1)
    tracked = list(range(30))
    check_against(SamplingParams(logprobs=30, logprob_token_ids=tracked), vocab_size=100, max_logprobs=20)
    with pytest.raises(RequestError, match="logprobs must be at most 100, .*; got 101"):
        check_against(SamplingParams(logprobs=101), vocab_size=100, max_logprobs=-1)


def test_beam_search_params() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    assert dataclasses.asdict(params) == {
        "beam_width": 4,
        "max_tokens": 8,
        "ignore_eos": False,
        "temperature": 0.0,
        "length_penalty": 1.0,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "BeamSearchParams needs a value for beam_width and max_tokens"),
        ({"beam_width": 2}, "BeamSearchParams needs a value for max_tokens"),
        ({"beam_width": 0, "max_tokens": 1}, "beam_width must be at least 1, got 0"),
        ({"beam_width": 16385, "max_tokens": 1}, "beam_width must be at most 16384"),
        ({"beam_width": 2.0, "max_tokens": 1}, "beam_width must be an int, got float"),
        ({"beam_width": 2, "max_tokens": None}, "max_tokens must be an int, got NoneType"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": 3}, r"temperature must be in \[0, 2\]"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": math.nan}, r"length_penalty must be in \[-32, 32\]"),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 0}, "ignore_eos must be True or False, got int"),
        ({"beam_with": 2, "max_tokens": 1}, "BeamSearchParams has no field 'beam_with'; did you mean 'beam_width'"),
    ],
)
def test_bad_beam_search_params(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**values)


def attributes_read(tree: ast.AST, of: str = "params") -> set[str]:
    """Names X of every `params.X`, `self.params.X`, `one_params.X` and so on that is read."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner.endswith(of) or owner == "self":
                found.add(node.attr if owner.endswith(of) else f"self.{node.attr}")
    return found


def test_every_field_is_read_by_the_engine(repository: Path) -> None:
    """A field that nothing reads is an option accepted and ignored. A property's fields count where it is read.

    A numeric option is read by the sampler, as `inputs.options.X`.
    """
    own = repository / "jaxserve" / "api" / "sampling_params.py"
    outside = [
        path for path in (repository / "jaxserve").rglob("*.py") if path.name not in (own.name, "sampling_checks.py")
    ]
    read = {name for path in outside for name in attributes_read(ast.parse(path.read_text()))}
    for node in ast.walk(ast.parse(own.read_text())):
        if isinstance(node, ast.FunctionDef) and (node.name in read or node.name == "check_against"):
            read |= {name.removeprefix("self.") for name in attributes_read(node) if name.startswith("self.")}
    sampler = [ast.parse(path.read_text()) for path in (repository / "jaxserve" / "sampling").rglob("*.py")]
    read |= {name for tree in sampler for name in attributes_read(tree, "options")}
    unread = {field.name for field in dataclasses.fields(SamplingParams)} - read
    assert unread == WITHOUT_EFFECT


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                st.none(),
                st.booleans(),
                st.integers(),
                st.floats(),
                st.text(max_size=3),
                st.lists(st.integers()),
                st.dictionaries(st.integers(0, 9) | st.text(max_size=3), st.floats(), max_size=3),
            )
            for name in VLLM_DEFAULTS
        },
    )
)
def test_any_values_give_params_or_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except RequestError:
        return
    assert 0.0 <= params.temperature <= 2.0
    assert 0.0 < params.top_p <= 1.0
    assert params.top_k >= 0
    assert params.clone() == params
