"""Drafts from a request's own tokens: which ones are proposed, and that completions are those without drafts."""

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    ConfigError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from jaxserve.api.request import Request
from jaxserve.scheduling import drafts
from jaxserve.scheduling.proposers import registry
from jaxserve.scheduling.proposers.ngram import NgramProposer
from jaxserve.scheduling.proposers.registry import make_proposer
from jaxserve.scheduling.sequence import Sequence
from tests.jaxserve.test_request_mix import REQUESTS, SETTINGS, outcome, scores
from tests.sequences import proposed

FIXED: dict[str, Any] = {"enable_adaptive_verification": False}  # the number of steps does not depend on their times
NGRAM = FIXED | {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 3}
CYCLE = [*range(30, 37)] * 3
STORY = SamplingParams(temperature=0.0, max_tokens=90, logprobs=2, ignore_eos=True)


# ---------------------------------------------------------------- proposals


def looked_up(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The rule of vLLM, read literally."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tokens[start + size : start + size + count]
    return []


def decoding(tokens: list[int], num_in_flight: int = 0) -> Sequence:
    """A sequence with a row in the step that is being planned."""
    return Sequence(Request(request_id="s"), tokens, 1, 1000, num_pending=1 + num_in_flight)


def test_the_longest_match_counts_and_the_first_of_it() -> None:
    proposer = NgramProposer(NGRAM)
    assert proposed(proposer, decoding([1, 2, 3, 4, 2, 3])) == [4, 2, 3], "as in vLLM's documentation"
    assert proposed(proposer, decoding([7, 3, 5, 2, 3, 6, 2, 3, 8, 2, 3])) == [6, 2, 3]
    assert proposed(proposer, decoding([1, 2, 3, 4])) == []


def test_drafts_reach_past_the_tokens_that_steps_in_flight_sample() -> None:
    assert proposed(NgramProposer(NGRAM), decoding([1, 2, 3, 4, 5, 6, 7, 1], num_in_flight=2)) == [2, 3, 4, 5, 6]


def test_both_bounds_are_five_or_as_the_other() -> None:
    for bounds, expected in (
        ({}, range(5, 4, -1)),
        ({"prompt_lookup_max": 3}, range(3, 2, -1)),
        ({"prompt_lookup_min": 2}, range(2, 1, -1)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, range(4, 1, -1)),
    ):
        tokens = [*range(10, 20), 1, *range(10, 20)]
        proposer = make_proposer({"method": "ngram", "num_speculative_tokens": 2} | bounds)
        assert proposer is not None
        for length in range(12, 21):  # the last tokens of the first ten occurred, as many as follow the 1
            found = proposed(proposer, decoding(tokens[:length]))
            assert bool(found) == (length - 11 >= expected[-1]), (bounds, length)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12), st.data())
def test_an_index_that_grows_finds_what_a_search_finds(parts: list[list[int]], data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, 4))
    longest = data.draw(st.integers(shortest, 5))
    sizes = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    proposer, sequence = NgramProposer(NGRAM | sizes), decoding([])
    for part in parts:
        sequence.token_ids += part
        assert proposed(proposer, sequence) == looked_up(sequence.token_ids, shortest, longest, 3)


def test_a_sequence_that_is_cut_and_goes_on_still_gets_lists_of_its_tokens() -> None:
    """Its index is of no use then, and does no harm."""
    proposer, sequence = NgramProposer(NGRAM), decoding([1, 2, 3, 1, 2])
    proposed(proposer, sequence)
    del sequence.token_ids[2:]
    for token in (5, 1, 2):
        sequence.token_ids.append(token)
        assert set(proposed(proposer, sequence)) <= set(sequence.token_ids)


def test_finished_sequences_are_forgotten() -> None:
    proposer = NgramProposer(NGRAM)
    running = decoding([1, 2, 1])
    for end in (proposer.finish, proposer.forget):
        proposed(proposer, running)
        finished = decoding([1, 2, 1])
        proposed(proposer, finished)
        end(finished)
        end(decoding([1]))
    assert list(proposer._indexes) == [running]


# ---------------------------------------------------------------- completions


def generate(llm: LLM, requests: list[tuple[Any, dict[str, Any]]]) -> list[RequestOutput]:
    prompts, params = [prompt for prompt, _ in requests], [SamplingParams(**each) for _, each in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def metric(llm: LLM, name: str) -> Any:
    return {each.name: each.value for each in llm.get_metrics() if not each.labels}[f"jaxserve:{name}"]


def repeating(**params: Any) -> tuple[Any, dict[str, Any]]:
    """A request whose tokens repeat: a bias leaves few tokens to choose from, so that many drafts are accepted."""
    settings = {
        "temperature": 0.0,
        "max_tokens": 40,
        "ignore_eos": True,
        "logit_bias": {token: 60.0 for token in CYCLE},
    }
    return {"prompt_token_ids": CYCLE}, settings | params


MIX: list[tuple[Any, dict[str, Any]]] = [
    *REQUESTS,
    repeating(logprobs=2),
    repeating(max_tokens=7),
    repeating(seed=21, temperature=1.0, n=2, logprobs=0),
    repeating(min_tokens=12, stop_token_ids=CYCLE[:2]),
    repeating(structured_outputs={"regex": "[a-z]{3,9}"}, logit_bias=None),
]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """The completions of an engine without speculative decoding."""
    with LLM("demo", **SETTINGS) as llm:
        return generate(llm, MIX)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS, speculative_config=NGRAM) as made:
        yield made
        assert metric(made, "compiles_after_ready") == 0
        assert metric(made, "kv_cache_usage_perc") == 0


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert [outcome(output) for output in found] == [outcome(output) for output in expected]
    assert [scores(output) for output in found] == [scores(output) for output in expected]


def test_completions_are_those_without_drafts(llm: LLM, expected: list[RequestOutput]) -> None:
    """Of every kind of request; the second time with cached prompts."""
    for _ in range(2):
        check(generate(llm, MIX), expected)
    assert metric(llm, "prefix_cache_hits") > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 16, "async_scheduling": False},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        pytest.param({"num_gpu_blocks_override": 16, "speculative_config": SUFFIX}, marks=pytest.mark.slow),
        pytest.param({"data_parallel_size": 2, "speculative_config": SUFFIX}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "2 devices", "2 stages of 2 devices", "past outputs, preempted", "past outputs, 2 replicas"],
)
def test_completions_are_the_same_on_every_mesh_and_with_few_pages(
    settings: dict[str, Any], expected: list[RequestOutput]
) -> None:
    with LLM("demo", **{**SETTINGS, "speculative_config": NGRAM, **settings}) as llm:
        found = generate(llm, MIX)
        assert metric(llm, "compiles_after_ready") == 0
        if "num_gpu_blocks_override" in settings:
            assert metric(llm, "num_preemptions") > 0
            check(found, expected)
            return
        for replica in llm.engine.replicas:
            for scheduler in replica.schedulers:
                scheduler.proposer = None
        llm.reset_prefix_cache()
        check(found, generate(llm, MIX))


def check_reports(outputs: list[RequestOutput]) -> None:
    """The drafts that each completion reports account for its tokens, but for one of each other step."""
    for output in outputs:
        report, metrics = output.outputs[0].spec_decode_metrics, output.metrics
        assert report is not None and metrics is not None
        found = report.to_dict()
        drafted, accepted = found["per_step_drafted"], found["per_step_accepted"]
        assert (sum(drafted), sum(accepted)) == (metrics.num_draft_tokens, metrics.num_accepted_tokens)
        assert found["num_spec_steps"] == len(drafted) == len(accepted) == metrics.num_drafts
        assert [accepted.count(length) for length in range(9)] == found["acceptance_histogram"]
        assert found["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
        assert found["draft_acceptance_rate"] == sum(accepted) / sum(drafted)
        assert (found["num_accepted_draft_tokens"], found["num_draft_tokens"]) == (sum(accepted), sum(drafted))
        assert found["num_spec_tokens"] == 8 and sum(accepted) + len(accepted) < len(output.outputs[0].token_ids)


def test_past_outputs_make_the_same_completions_in_fewer_steps(expected: list[RequestOutput]) -> None:
    """Of every kind of request; of prompts that are asked again, nearly all drafts are right."""
    prompts: list[tuple[Any, dict[str, Any]]] = [
        (f"{number}+{7 * number}=", {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True})
        for number in range(101, 105)
    ]
    names = [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    reports: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed", "disable_log_stats": False}
    with LLM("demo", **SETTINGS, spec_method="suffix", spec_tokens=8, speculative_config=FIXED, **reports) as llm:
        llm.beam_search(["abcabcabc", "abcabcabc"], BeamSearchParams(beam_width=2, max_tokens=6))
        generate(llm, [("abcabcabc", {"max_tokens": 1, "prompt_logprobs": 1})] * 2)
        assert metric(llm, names[0]) == 0, "neither beams nor scores of prompts take drafts"
        for _ in range(2):
            check(generate(llm, MIX), expected)
        first = generate(llm, prompts)
        before = [metric(llm, name) for name in names]
        again = generate(llm, prompts)
        check(again, first)
        check_reports(again)
        drafts, drafted, accepted = (metric(llm, name) - old for name, old in zip(names, before, strict=True))
        assert accepted > 0.8 * drafted and accepted > 4 * drafts
        counts = [each.metrics for each in again if each.metrics is not None]
        assert sum(each.num_drafts for each in counts) == drafts
        assert sum(each.num_draft_tokens for each in counts) == drafted
        assert sum(each.num_accepted_tokens for each in counts) == accepted
        positions = [each for each in llm.get_metrics() if each.name.endswith("accepted_tokens_per_pos")]
        assert [each.labels for each in positions] == [{"position": str(position)} for position in range(8)]
        assert sum(each.value for each in positions) == metric(llm, names[2])
        assert metric(llm, "compiles_after_ready") == 0


def test_drafts_save_steps(llm: LLM) -> None:
    def num_steps() -> int:
        llm.reset_prefix_cache()
        before = metric(llm, "steps")
        generate(llm, [repeating()])
        return metric(llm, "steps") - before

    (scheduler,) = llm.engine.replicas[0].schedulers
    proposer, with_drafts = scheduler.proposer, num_steps()
    scheduler.proposer = None
    without_drafts = num_steps()
    scheduler.proposer = proposer
    assert with_drafts < 0.75 * without_drafts


def test_a_completion_ends_inside_an_accepted_draft(llm: LLM) -> None:
    """Wherever a stop string, a stop token or the length cuts it, and in every delta."""
    prompt = "reverse abcabcabc:"

    def completed(**changes: Any) -> CompletionOutput:
        params = {"temperature": 0.7, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 1} | changes
        return generate(llm, [(prompt, params)])[0].outputs[0]

    whole = completed()
    text, tokens = whole.text, [*whole.token_ids]
    assert whole.logprobs is not None
    assert text.startswith(" cbacbacba")
    for end in range(1, 20):
        by_length = completed(max_tokens=end)
        assert by_length.token_ids == tokens[:end] and by_length.finish_reason == "length"
        assert by_length.logprobs == whole.logprobs[:end]
        by_token = completed(stop_token_ids=[tokens[end]])
        assert by_token.token_ids == tokens[: tokens.index(tokens[end]) + 1] and by_token.stop_reason == tokens[end]
        assert by_token.logprobs == whole.logprobs[: len(by_token.token_ids)]
        stop = text[end : end + 3]
        by_string = completed(stop=[stop])
        assert by_string.text == text[: text.index(stop)] and by_string.stop_reason == stop
        assert by_string.logprobs == whole.logprobs[: len(by_string.token_ids)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, stop=["1116"])
    parts = [part.outputs[0].text for part in llm.stream(prompt, params)]
    assert parts[-1] == text[: text.index("1116")]
    assert all(later.startswith(earlier) for earlier, later in zip(parts, parts[1:], strict=False))


def test_a_story_is_the_same_with_drafts(stories_model: Path) -> None:
    prompts = ["Once upon a time", "Tom and Tom and Tom", "The cat sat. The cat sat. The cat"]
    settings: dict[str, Any] = {**SETTINGS, "max_num_seqs": 4}
    found: list[list[RequestOutput]] = []
    for config in (None, NGRAM, SUFFIX):
        with LLM(str(stories_model), **settings, speculative_config=config) as llm:
            found.append(llm.generate(prompts, STORY, use_tqdm=False))
            assert metric(llm, "compiles_after_ready") == 0
    for others in found[1:]:
        check(others, found[0])


def test_deltas_are_the_completion_and_an_aborted_request_leaves_no_page() -> None:
    async def run() -> None:
        async with AsyncLLM("demo", **SETTINGS, speculative_config=NGRAM) as llm:
            prompt, settings = repeating(max_tokens=60, output_kind=RequestOutputKind.DELTA)
            params = SamplingParams(**settings)
            deltas = [delta async for delta in llm.generate(prompt, params, "whole")]
            tokens = [token for delta in deltas for token in delta.outputs[0].token_ids]
            assert len(tokens) == 60 and deltas[-1].outputs[0].finish_reason == "length"
            received: list[int] = []
            async for delta in llm.generate(prompt, params, "aborted"):
                received += delta.outputs[0].token_ids
                await llm.abort("aborted")
            assert received == tokens[: len(received)] and len(received) < 60
            values = {each.name: each.value for each in llm.get_metrics()}
            assert values["jaxserve:kv_cache_usage_perc"] == 0

    asyncio.run(run())


def test_a_proposer_that_fails_costs_no_request_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected: list[RequestOutput]
) -> None:
    class Failing(NgramProposer):
        def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
            if max(sequence.num_output_tokens for sequence in sequences) > 5:
                raise KeyError("no such n-gram")
            return super().propose(sequences)

    makers: dict[str, Callable[..., Any]] = {"ngram": Failing}
    monkeypatch.setattr(registry, "PROPOSERS", makers)
    with LLM("demo", **SETTINGS, speculative_config=NGRAM) as llm:
        check(generate(llm, MIX), expected)
    (record,) = [each for each in caplog.records if each.name == drafts.__name__]
    assert record.message == "Failing failed; speculative decoding is off from now on" and record.exc_info


def test_a_model_that_only_embeds_takes_no_drafts() -> None:
    with pytest.raises(ConfigError, match="speculative_config needs a model that generates; LlamaForCausalLM runs"):
        LLM("demo", **SETTINGS, runner="pooling", speculative_config=NGRAM)
