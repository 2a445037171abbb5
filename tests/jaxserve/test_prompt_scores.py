"""Log-probabilities of prompts: arrays that read like those of each token, and no more of a request than is allowed."""

import asyncio
import tracemalloc
from typing import Any, cast

import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, EngineConfig, RequestError, SamplingParams
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.request import Request
from jaxserve.engine.admission import Admission
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.request_state import MAX_UNREAD, RequestState, Sample, logprob_entry
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.step import ScoredChunk
from jaxserve.text.tokenizer import Tokenizer

NUM_TOKENS = 1000


def random_scores(num_rows: int, num_top: int, seed: int = 0) -> TokenLogprobs:
    """Numbers of a step, with a token twice among the most likely ones of some rows."""
    random = np.random.default_rng(seed)
    top_ids = np.stack([random.permutation(256)[:num_top] for _ in range(num_rows)]).astype(np.int32)
    top_ids[::3, -1] = top_ids[::3, 0]
    top = np.sort(-random.exponential(size=(num_rows, num_top)).astype(np.float32))[:, ::-1]
    chosen, ranks = -random.exponential(size=num_rows).astype(np.float32), random.integers(1, 99, num_rows)
    tracked = np.zeros((num_rows, 0), np.float32)
    return TokenLogprobs(*cast("list[Any]", [chosen, ranks.astype(np.int32), top_ids, top, tracked]))


def admitted(tokenizer: Tokenizer, num_logprobs: int, detokenize: bool = True) -> RequestState:
    """A prompt of as many tokens as a step has rows, and one more."""
    prompt = tuple(np.random.default_rng(1).integers(0, 256, NUM_TOKENS + 1).tolist())
    params = SamplingParams(prompt_logprobs=num_logprobs, detokenize=detokenize)
    request = Request(request_id="one", token_ids=prompt, params=params)
    limits = ModelLimits(max_model_len=1 << 16, vocab_size=300, eos_token_ids=(0,), max_logprobs=-1)
    return Admission(limits, tokenizer, None).admit(request, default_seed=1, arrival_s=0.0)


def chunk(state: RequestState, start: int, stop: int) -> ScoredChunk:
    """The query tokens from ``start`` to ``stop``, which are rows of the same numbers."""
    return ScoredChunk(state.samples[0].sequence, start, start, list(state.prompt_token_ids[start + 1 : stop + 1]))


@pytest.mark.parametrize("detokenize", [True, False])
@pytest.mark.parametrize("num_logprobs", [0, 4, -1])
def test_they_are_those_of_each_token(
    tiny_tokenizers: dict[str, Tokenizer], num_logprobs: int, detokenize: bool
) -> None:
    """In chunks, of which one comes twice, as after a preemption."""
    state = admitted(tiny_tokenizers["byte-level"], num_logprobs, detokenize)
    scores = random_scores(NUM_TOKENS, 6)
    for start, stop in ((0, 300), (300, 700), (0, 500), (500, NUM_TOKENS)):
        state.add_prompt_logprobs(chunk(state, start, stop), scores)
    found = state.output().prompt_logprobs
    assert isinstance(found, list) and len(found) == NUM_TOKENS + 1 and found[0] is None
    for position, token in enumerate(state.prompt_token_ids[1:]):
        expected = logprob_entry(token, position, scores, num_logprobs, state.tokenizer)
        own = found[position + 1]
        assert own is not None and list(own) == list(expected)
        for other, entry in own.items():
            wanted = expected[other]
            assert (entry, entry.token_bytes) == (wanted, wanted.token_bytes)
        assert not detokenize or own[token].text_offset == (state.prompt_offsets or [])[position + 1]


def test_they_take_forty_bytes_each(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """An object would take 200, and as many again in the front end."""
    state = admitted(tiny_tokenizers["byte-level"], 20)
    state.sends_arrays = True
    scores = random_scores(NUM_TOKENS, 20)
    state.add_prompt_logprobs(chunk(state, 0, 10), scores)
    tracemalloc.start()
    state.add_prompt_logprobs(chunk(state, 10, NUM_TOKENS), scores)
    output = state.output()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(output.prompt_logprobs, PackedLogprobs)
    assert taken < 40 * 21 * NUM_TOKENS
    parts = [*output.prompt_logprobs.parts(7)]
    assert max(map(len, parts)) == 7
    assert [position for part in parts for position in part] == list(output.prompt_logprobs)


def limits(most: int) -> ModelLimits:
    """Those of a small vocabulary."""
    return ModelLimits(max_model_len=1000, vocab_size=100, eos_token_ids=(), max_logprobs_per_request=most)


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({"prompt_logprobs": 4}, 50 * 5),
        ({"logprobs": 2, "n": 3, "max_tokens": 7}, 3 * 7 * 3),
        ({"prompt_logprobs": -1, "logprobs": 0, "max_tokens": 7}, 50 * 101 + 7),
        ({"logprob_token_ids": [1, 2, 3], "max_tokens": 7}, 7 * 4),
    ],
)
def test_a_request_has_so_many_at_most(fields: dict[str, Any], num_logprobs: int) -> None:
    params = SamplingParams(**fields)
    assert limits(num_logprobs).fit_logprobs(params, 50, True) is params
    assert limits(-1).fit_logprobs(params, 50, True) is params
    with pytest.raises(RequestError, match=rf"limit {num_logprobs - 1} \(max_logprobs_per_request\)") as caught:
        limits(num_logprobs - 1).fit_logprobs(params, 50, True)
    assert caught.value.parameter == ("prompt_logprobs" if fields == {"prompt_logprobs": 4} else "logprobs")


def test_only_engines_that_serve_limit_the_logprobs_of_a_request() -> None:
    params = SamplingParams(n=500, logprobs=20, max_tokens=100, min_tokens=100)

    async def serve() -> None:
        async with AsyncLLM("demo", warm_up=False) as engine:
            async for _ in engine.generate("a", params):
                pass

    with pytest.raises(RequestError, match="limit 1048576 .max_logprobs_per_request."):
        asyncio.run(serve())
    assert EngineConfig.from_arguments("demo").max_logprobs_per_request == -1


def test_max_tokens_that_were_not_asked_for_are_lowered() -> None:
    params = SamplingParams(logprobs=2, n=3, max_tokens=900)
    assert limits(99).fit_logprobs(params, 50, False).max_tokens == 11
    with pytest.raises(RequestError, match=r"0 logprobs of 50 prompt tokens and 9 of 3 x 1 output tokens; limit 8"):
        limits(8).fit_logprobs(params, 50, False)
    plain = SamplingParams(max_tokens=900)
    assert limits(0).fit_logprobs(plain, 50, True) is plain


def test_logprobs_of_completions_are_made_as_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all in the step in which a request finishes, which would hold up all others."""
    read, pending = Sample.read, list[int]()

    def noted(sample: Sample, tokenizer: Tokenizer | None) -> None:
        pending.append(len(sample.scores))
        read(sample, tokenizer)

    monkeypatch.setattr(Sample, "read", noted)
    params = SamplingParams(max_tokens=3 * MAX_UNREAD, logprobs=2, ignore_eos=True, temperature=0.0)
    with LLM("demo", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=32) as llm:
        (output,) = llm.generate("12+", params)
    found = output.outputs[0]
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids) == 3 * MAX_UNREAD
    assert sum(pending) == 3 * MAX_UNREAD and max(pending) <= MAX_UNREAD
