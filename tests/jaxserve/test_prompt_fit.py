"""Prompts that are cut, and outputs that must find room."""

import pytest

from jaxserve import RequestError, SamplingParams
from jaxserve.api.request import parse_prompt
from jaxserve.engine.admission import fit_max_tokens, truncate_prompt

PROMPT = [*range(10)]


@pytest.mark.parametrize(
    ("kept", "max_output_tokens", "expected"),
    [
        (4, 3, [6, 7, 8, 9]),
        (10, 3, PROMPT),
        (12, 3, PROMPT),
        (-1, 3, PROMPT[-9:]),
        (-1, None, PROMPT),
        (-1, 11, [9]),
        (-1, 12, PROMPT),  # no room at all: a matter of the length check
    ],
)
def test_the_last_tokens_are_kept(kept: int, max_output_tokens: int | None, expected: list[int]) -> None:
    assert truncate_prompt(PROMPT, kept, max_output_tokens, 12) == expected


@pytest.mark.parametrize("kept", [0, -2, 13])
def test_truncation_has_a_range(kept: int) -> None:
    with pytest.raises(
        RequestError, match="truncate_prompt_tokens must be -1, or between 1 and max_model_len=12"
    ) as caught:
        truncate_prompt(PROMPT, kept, 3, 12)
    assert caught.value.parameter == "truncate_prompt_tokens"


def test_outputs_are_cut_unless_that_is_an_error() -> None:
    params = SamplingParams(max_tokens=5, min_tokens=4)
    assert fit_max_tokens(params, 7, 12, True) is params
    assert (fit_max_tokens(params, 9, 12, False).max_tokens, fit_max_tokens(params, 9, 12, False).min_tokens) == (3, 3)
    assert fit_max_tokens(SamplingParams(max_tokens=None), 9, 12, True).max_tokens == 3
    with pytest.raises(
        RequestError,
        match="This model's maximum context length is 12 tokens. However, you requested 5 output tokens and your "
        "prompt contains at least 9 input tokens, for a total of at least 14 tokens",
    ) as caught:
        fit_max_tokens(params, 9, 12, True)
    assert (caught.value.parameter, caught.value.value) == ("max_tokens", 5)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_leaves_no_room_is_refused_either_way(max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(RequestError, match="However, you requested 1 output tokens") as caught:
        fit_max_tokens(params, 12, 12, True)
    assert (caught.value.parameter, caught.value.value) == ("input_tokens", 12)
    with pytest.raises(RequestError, match="length is 12 tokens. However, you requested 1 output tokens"):
        fit_max_tokens(params, 12, 12, False)


def test_one_prompt_is_one() -> None:
    assert parse_prompt("a").text == "a"
    with pytest.raises(RequestError, match="generate takes one prompt, got 2"):
        parse_prompt(["a", "b"])
