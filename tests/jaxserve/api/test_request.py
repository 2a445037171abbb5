"""The forms that prompts come in."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import parse_prompts, priorities_for_each
from jaxserve.api.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hi", [("Hi", None)]),
        ("", [("", None)]),
        ([1, 2], [(None, (1, 2))]),
        ((1, np.int64(2)), [(None, (1, 2))]),
        ({"prompt": "Hi"}, [("Hi", None)]),
        ({"prompt_token_ids": [3]}, [(None, (3,))]),
        ({"prompt": "Hi", "prompt_token_ids": [3]}, [("Hi", (3,))]),
        (
            ["Hi", [1, 2], {"prompt": "x"}, {"prompt_token_ids": (3,)}],
            [("Hi", None), (None, (1, 2)), ("x", None), (None, (3,))],
        ),
        ([], []),
    ],
)
def test_forms(prompts: object, expected: list) -> None:
    assert [(item.text, item.token_ids) for item in parse_prompts(prompts)] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be a string, .* got int"),
        (None, "prompts must be a string, .* got NoneType"),
        (b"Hi", "prompts must be .* got bytes"),
        (["a", 5], "prompt 1 must be a string, .* got int"),
        (["a", None], "prompt 1 must be .* got NoneType"),
        (["a", []], "prompt 1 has no token ids"),
        ([[1], [1, "x"]], "prompt 1: token id 1 must be an int, got 'x'"),
        ([1, "x"], "prompt 0: token id 1 must be an int, got 'x'"),
        ([1, True], "prompt 0: token id 1 must be an int, got True"),
        ([1, 2.0], "prompt 0: token id 1 must be an int, got 2.0"),
        ([4, -1], "prompt 0: token ids must be at least 0, got -1"),
        ({}, "prompt 0: the mapping has neither"),
        ({"prompt": 3}, "prompt 0: 'prompt' must be a string, got int"),
        ({"prompt_token_ids": "abc"}, "prompt 0: 'prompt_token_ids' must be a list of ints, got str"),
        (["a", {"prompt": "x", "multi_modal_data": {}}], "prompt 1: key 'multi_modal_data' is not supported"),
        (["a", "\ud800"], "prompt 1 is not valid Unicode"),
        ({"prompt": "a", "cache_salt": ""}, "prompt 0: 'cache_salt' must be a non-empty string, got ''"),
        ({"prompt": "a", "cache_salt": 5}, "prompt 0: 'cache_salt' must be a non-empty string, got 5"),
        (["a", {"prompt_token_ids": [1], "cache_salt": "\ud800"}], "prompt 1 is not valid Unicode"),
        ({"cache_salt": "x"}, "prompt 0: the mapping has neither"),
    ],
)
def test_bad_prompt_is_named_by_index(prompts: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_prompts(prompts)


def test_cache_salt() -> None:
    prompts = ["a", {"prompt": "a", "cache_salt": "x"}, {"prompt_token_ids": [1], "cache_salt": "y"}, {"prompt": "b"}]
    assert [item.cache_salt for item in parse_prompts(prompts)] == [None, "x", "y", None]
    assert [item.cache_salt for item in parse_prompts({"prompt": "a", "cache_salt": None})] == [None]


def test_priorities() -> None:
    assert priorities_for_each(None, 3) == [0, 0, 0]
    assert priorities_for_each([2, -1], 2) == [2, -1]
    assert priorities_for_each((np.int64(4),), 1) == [4]
    assert priorities_for_each([], 0) == []


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (3, "priority must be a list, got int"),
        ([1], r"the lengths of prompts \(2\) and priority \(1\) must be the same"),
        ([1, 2.0], r"priority\[1\] must be an int, got float"),
        ([1, None], r"priority\[1\] must be an int, got NoneType"),
        ([2**63, 0], r"priority\[0\] must be at most"),
    ],
)
def test_bad_priorities(priority: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        priorities_for_each(priority, 2)


def test_params_go_to_each_prompt() -> None:
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert [item.params for item in parse_prompts(["a", "b"], one)] == [one, one]
    assert [item.params for item in parse_prompts(["a", "b"], [one, other])] == [one, other]
    assert [item.params for item in parse_prompts(["a", "b"], [None, other])] == [SamplingParams(), other]
    assert [item.params for item in parse_prompts("a", None, one)] == [one]


def test_params_of_another_length_or_type_raise() -> None:
    with pytest.raises(RequestError, match=r"lengths of prompts \(2\) and sampling_params \(1\)"):
        parse_prompts(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match=r"sampling_params\[1\] must be SamplingParams, got dict"):
        parse_prompts(["a", "b"], [SamplingParams(), {}])
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams or a list of them, got int"):
        parse_prompts(["a", "b"], 3)


def test_requests_need_no_jax(repository: Path) -> None:
    """Run apart, since this process has long imported it."""
    modules = "jaxserve.api.request, jaxserve.api.outputs, jaxserve.text.tokenizer, jaxserve.text.detokenizer"
    code = f"import sys, {modules}; print([name for name in ('jax', 'torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repository)
    assert done.stdout.strip() == "[]"
