"""SamplingParams: defaults, normalisation, and a clear error for everything else."""

import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams

# vLLM's defaults (vllm-conventions 2.4); stop and stop_token_ids are stored as tuples here.
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
    "bad_words": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert params.output_kind.name == "CUMULATIVE"
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
        ({"temperature": 0, "top_p": 0.3, "top_k": 5, "min_p": 0.1}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"bad_words": [], "logit_bias": {}, "frequency_penalty": 0}, {"bad_words": None, "logit_bias": None}),
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
    assert "raised to 0.01" in caplog.text


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
        ({"top_k": 5.0}, "top_k must be an int, got float"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\]"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 16385}, "n must be at most 16384"),
        ({"n": True}, "n must be an int, got bool"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an int, got float"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
        ({"seed": -2}, "seed must be at least 0, got -2"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"seed": 1.0}, "seed must be an int, got float"),
        ({"logprobs": -1}, "logprobs=-1 .* not supported: at most 20"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"logprobs": False}, "logprobs must be an int, got bool"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1 .* not supported: at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20, got 21"),
        ({"stop": ""}, "stop cannot contain an empty string"),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string"),
        ({"stop": 5}, "stop must be a list, got int"),
        ({"stop": ["a", 5]}, "stop must be a string or a list of strings, got an item of int"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list, got str"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids must be an int, got float"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got int"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens must be True or False, got str"),
    ],
)
def test_bad_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("repetition_penalty", True),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", object()),
        ("logprob_token_ids", [4]),
        ("flat_logprobs", True),
        ("spaces_between_special_tokens", False),
        ("thinking_token_budget", 0),
        ("repetition_detection", object()),
        ("extra_args", {"a": 1}),
        ("output_kind", "DELTA"),
    ],
)
def test_what_is_not_built_raises(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not supported yet") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert caught.value.value is value


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_other_output_kinds_raise(kind: str) -> None:
    cumulative = SamplingParams().output_kind
    with pytest.raises(RequestError, match="output_kind is not supported yet"):
        SamplingParams(output_kind=type(cumulative)[kind])


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(RequestError, match="no field 'temprature'; did you mean 'temperature'"):
        SamplingParams(**dict[str, Any](temprature=0.5))
    with pytest.raises(RequestError, match="no field 'zzz'; there are: n, "):
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


def test_helpers() -> None:
    assert SamplingParams(logprobs=0).needs_logprobs
    assert SamplingParams(prompt_logprobs=1).needs_logprobs
    assert not SamplingParams().needs_logprobs
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
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=99, seed=1)
    assert [record.message for record in caplog.records] == [
        "generation_config.json asks for repetition_penalty=1.05, not supported yet: left out"
    ]


def test_generation_config_without_sampling_is_greedy(caplog: pytest.LogCaptureFixture) -> None:
    config = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.0}
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.0)
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert SamplingParams.from_generation_config(config, temperature=0.7).temperature == 0.7
    assert not caplog.records


def test_generation_config_with_a_bad_value_names_it() -> None:
    with pytest.raises(RequestError, match="top_p must be in"):
        SamplingParams.from_generation_config({"top_p": 7})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers())
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
