"""What a request costs before it runs: its samples share what they have in common, and its options have bounds."""

import tracemalloc
from typing import Any

import pytest

from jaxserve import RequestError, SamplingParams
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import check_against
from jaxserve.engine.admission import Admission
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.request_state import RequestState
from jaxserve.structured_output.reasoning import ReasoningMarkers
from jaxserve.text.token_pieces import TokenPieces
from jaxserve.text.tokenizer import Tokenizer

PROMPT = tuple(range(100)) * 200
WORDS = [f"{number:08d}" for number in range(64)]


def admitted(tokenizer: Tokenizer, n: int, reasoning: ReasoningMarkers | None = None, **options: Any) -> RequestState:
    """The state of a request with ``n`` samples."""
    limits = ModelLimits(max_model_len=1 << 17, vocab_size=300, eos_token_ids=(0,), reasoning=reasoning)
    params = SamplingParams(n=n, **options)
    request = Request(request_id="one", token_ids=PROMPT, params=params)
    return Admission(limits, tokenizer, None).admit(request, default_seed=1, arrival_s=0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_bias": {token: 1.0 for token in range(300)}},
        {"stop_token_ids": [*range(300)], "min_tokens": 2},
        {"allowed_token_ids": [*range(300)]},
        {"bad_words": WORDS},
        {"stop": WORDS},
        {"logprobs": 5},
    ],
    ids=lambda options: next(iter(options), "prompt"),
)
def test_samples_share_the_prompt_and_the_options(
    tiny_tokenizers: dict[str, Tokenizer], options: dict[str, Any]
) -> None:
    """A sample has 8 KiB of its own, whatever the request has: the prompt alone would be 160 KB."""

    def num_bytes(n: int) -> int:
        tracemalloc.start()
        state = admitted(tiny_tokenizers["byte-level"], n, **options)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(state.samples) == n
        return taken

    num_bytes(1)  # what is made once
    assert (num_bytes(33) - num_bytes(1)) / 32 < 8 << 10


def test_the_prompt_is_searched_for_reasoning_once(
    tiny_tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each sample; and each sample has a budget of its own."""
    tokenizer = tiny_tokenizers["byte-level"]
    start, end = (tuple(tokenizer.encode(mark)) for mark in ("<think>", "</think>"))
    shown, looked_up = TokenPieces.shown, list[int]()

    def counted(pieces: TokenPieces, token: int) -> str:
        looked_up.append(token)
        return shown(pieces, token)

    monkeypatch.setattr(TokenPieces, "shown", counted)
    budget = {"thinking_token_budget": 1, "bad_words": ["ab"]}
    state = admitted(tokenizer, 5, ReasoningMarkers("qwen3", start, end), **budget)
    assert len(looked_up) == len(PROMPT)
    first, second = (sample.sequence.constraint for sample in state.samples[:2])
    assert first is not None and second is not None
    for token in (*start, 5):
        first.accept(token)
    assert first.forced() == list(end) and second.forced() == []
    first.accept(tokenizer.encode("a")[0])
    assert second.mask() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": range(1025)}, "stop_token_ids must have at most 1024 ids, got 1025"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias must have at most 1024 token ids, got 1025"),
        ({"bad_words": [*map(str, range(1025))]}, "bad_words must have at most 1024 strings, got 1025"),
    ],
)
def test_options_have_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.parameter == next(iter(options))
    assert len(str(caught.value)) < 300


def test_an_error_names_a_few_of_many_tokens() -> None:
    params = SamplingParams(allowed_token_ids=range(1 << 16))
    with pytest.raises(RequestError, match=r"got \[256, 257, .*263\] and 65272 more") as caught:
        check_against(params, vocab_size=256, max_logprobs=20)
    assert len(str(caught.value)) < 300
