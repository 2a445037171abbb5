"""What requests can share and ask for, on the demo model: prefixes, samples, beams, priorities, processors, parsers."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, BeamSearchParams, ConfigError, FlatLogprobs, RequestError, SamplingParams, load_model
from tests.hooks import DEMO_DIRECTORY, ToolCall, num_unfinished, own_tokenizer

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 8,
    "compilation_cache_dir": "",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = "sort 42 7 19 88 3 55 61 20:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS, dtype="float32", reasoning_parser="think", tool_call_parser="hermes") as made:
        yield made
        assert value(made, "compiles_after_ready") == 0
        assert value(made, "kv_cache_usage_perc") == 0


def value(llm: LLM, name: str) -> float:
    (found,) = [metric.value for metric in llm.get_metrics() if metric.name == f"jaxserve:{name}"]
    return found


def ids(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


# ---------------------------------------------------------------- prefix cache


def test_a_prompt_seen_before_is_found_and_the_answer_is_the_same(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, again = (llm.generate(LONG, GREEDY, use_tqdm=False)[0] for _ in range(2))
    length = len(first.prompt_token_ids)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == length - 1, "all but the token whose scores are needed"
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_hits_are_counted_in_tokens(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = value(llm, "prefix_cache_queries"), value(llm, "prefix_cache_hits")
    outputs = [llm.generate(LONG, GREEDY, use_tqdm=False)[0] for _ in range(3)]
    length = len(outputs[0].prompt_token_ids)
    assert value(llm, "prefix_cache_queries") - before[0] == 3 * length
    assert value(llm, "prefix_cache_hits") - before[1] == 2 * (length - 1)


def test_the_next_turn_finds_the_answer_of_the_last(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first = llm.generate(LONG, GREEDY.clone(max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
    conversation = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate({"prompt_token_ids": [*conversation, 5, 6]}, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == len(conversation) - 1, "the last token's keys and values were never needed"


def test_requests_of_one_burst_share_what_they_begin_with(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": [*range(20, 36), last]} for last in (40, 41, 42, 43)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 16]
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone.append(ids(llm, prompt))
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_a_salt_keeps_prompts_apart(llm: LLM) -> None:
    llm.reset_prefix_cache()
    salted = {"prompt": LONG, "cache_salt": "tenant 1"}
    found = [llm.generate(one, GREEDY, use_tqdm=False)[0] for one in (LONG, salted, salted, LONG)]
    assert [bool(output.num_cached_tokens) for output in found] == [False, False, True, True]
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1


@pytest.mark.parametrize("skipping", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_a_request_that_must_compute_its_prompt_reads_nothing(skipping: dict[str, Any], llm: LLM) -> None:
    llm.generate(LONG, GREEDY, use_tqdm=False)
    (output,) = llm.generate(LONG, GREEDY.clone(**skipping), use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_without_caching_nothing_is_kept_but_samples_still_share(llm: LLM) -> None:
    params = SamplingParams(seed=4, n=3, max_tokens=8, ignore_eos=True)
    expected = llm.generate(LONG, params, use_tqdm=False)[0]
    with LLM("demo", **SETTINGS, dtype="float32", enable_prefix_caching=False) as made:
        found = [made.generate(LONG, params, use_tqdm=False)[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in found] == [0, 0]
        hits = value(made, "prefix_cache_hits")
        assert hits == 2 * 2 * (len(expected.prompt_token_ids) - 1), "two of three samples, each time"
        for output in found:
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]


def test_samples_of_a_request_share_its_prompt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    hits = value(llm, "prefix_cache_hits")
    params = SamplingParams(seed=9, n=4, max_tokens=8, temperature=2.0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [*range(20, 47)]}, params, use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert value(llm, "prefix_cache_hits") - hits == 3 * (len(output.prompt_token_ids) - 1)


# ---------------------------------------------------------------- beams


def reference_beams(prompt: list[int], width: int, length: int) -> list[tuple[list[int], float]]:
    """Beam search by the whole model on whole texts, no end of a text, best first."""
    model = load_model(str(DEMO_DIRECTORY), dtype="float32")
    beams = [(prompt, 0.0)]
    for _ in range(length):
        logits = np.asarray(model(np.array([tokens for tokens, _ in beams])), np.float64)[:, -1]
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        grown = [
            ([*tokens, token], score + row[token])
            for (tokens, score), row in zip(beams, logprobs, strict=True)
            for token in np.argsort(-row)[: 2 * width].tolist()
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_a_search_with_the_whole_model(width: int, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    prompts = ["count x:", "reverse hello:"]
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        tokens = llm.generate(prompt, GREEDY, use_tqdm=False)[0].prompt_token_ids
        expected = reference_beams(tokens, width, 6)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        found = [beam.cum_logprob for beam in output.sequences]
        assert found == pytest.approx([score for _, score in expected], abs=2e-3)
        assert all(beam.finish_reason == "length" for beam in output.sequences)


def test_a_beam_ends_with_its_text(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=12)
    best = llm.beam_search("12+30=", params, concurrency_limit=1)[0].sequences[0]
    assert all(entry.decoded_token is not None for position in best.logprobs for entry in position.values())
    assert (best.text, best.finish_reason) == ("12+30=42", "stop")
    kept = llm.beam_search("12+30=", BeamSearchParams(beam_width=2, max_tokens=12, include_stop_str_in_output=True))
    assert kept[0].sequences[0].tokens == [*best.tokens, 2]


def test_beams_share_pages(llm: LLM) -> None:
    llm.reset_prefix_cache()
    queries, hits = value(llm, "prefix_cache_queries"), value(llm, "prefix_cache_hits")
    llm.beam_search(LONG, BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    queries, hits = value(llm, "prefix_cache_queries") - queries, value(llm, "prefix_cache_hits") - hits
    assert hits / queries > 0.9


def test_a_width_beyond_the_logprobs_there_are_is_refused(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match="beam_width=11 requires max_logprobs of at least 22; this engine has max_logprobs=20"
    ):
        llm.beam_search(LONG, BeamSearchParams(beam_width=11, max_tokens=3))


# ---------------------------------------------------------------- priorities


def test_the_lowest_priority_runs_first() -> None:
    with LLM("demo", **{**SETTINGS, "max_num_seqs": 1}, scheduling_policy="priority", disable_log_stats=False) as made:
        outputs = made.generate([LONG] * 4, GREEDY, priority=[5, 0, -1, 0], use_tqdm=False)
    found: list[Any] = [output.metrics for output in outputs]
    order = sorted(range(4), key=lambda i: found[i].scheduled_ts)
    assert order == [2, 1, 3, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_a_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: priority requires scheduling_policy='priority'"):
        llm.generate([LONG, LONG], GREEDY, priority=[0, 3])
    with pytest.raises(RequestError, match="prompts.*2.*priority.*1"):
        llm.generate([LONG, LONG], GREEDY, priority=[0])


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_of_chosen_tokens(llm: LLM) -> None:
    wanted = [20, 282, 9]
    every = llm.generate(LONG, GREEDY.clone(logprobs=20), use_tqdm=False)[0].outputs[0]
    found = llm.generate(LONG, GREEDY.clone(logprob_token_ids=wanted), use_tqdm=False)[0].outputs[0]
    assert found.token_ids == every.token_ids
    for entry, full, token in zip(found.logprobs or [], every.logprobs or [], found.token_ids, strict=True):
        assert set(entry) == {token, *wanted}
        for token_id in set(entry) & set(full):
            assert entry[token_id].logprob == pytest.approx(full[token_id].logprob, abs=1e-4)


def test_flat_logprobs_hold_the_same(llm: LLM) -> None:
    params = GREEDY.clone(logprobs=3, prompt_logprobs=2)
    nested = llm.generate(LONG, params, use_tqdm=False)[0]
    flat = llm.generate(LONG, params.clone(flat_logprobs=True), use_tqdm=False)[0]
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == nested.outputs[0].logprobs
    assert len(flat.prompt_logprobs) == len(nested.prompt_logprobs or [])


@pytest.mark.parametrize("is_flat", [False, True])
def test_logprobs_know_where_tokens_begin_and_what_bytes_they_have(llm: LLM, is_flat: bool) -> None:
    emoji = llm.get_tokenizer().encode("a😀b", add_special_tokens=False)
    params = GREEDY.clone(prompt_logprobs=0, logprobs=0, structured_outputs={"choice": ["😀é"]})
    (output,) = llm.generate("a😀b", params.clone(flat_logprobs=is_flat), use_tqdm=False)
    prompt = [entry for entry in output.prompt_logprobs or () if entry]
    own = [entry[token] for entry, token in zip(prompt, output.prompt_token_ids[1:], strict=True)]
    first = len(output.prompt_token_ids) - len(emoji)
    assert [0, *(one.text_offset for one in own)][first:] == [0, *[1] * (len(emoji) - 2), 2]
    (sample,) = output.outputs
    assert sample.logprobs is not None
    found = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.text == "😀é" and sample.finish_reason == "stop"
    assert b"".join(one.token_bytes or b"" for one in found).decode() == sample.text
    assert [(one.decoded_token, one.text_offset) for one in found[:-1]] == [("\ufffd", 0)] * 4 + [("\ufffd", 1)] * 2
    assert (found[-1].token_bytes, found[-1].text_offset) == (b"", 2), "the end is no part of the text"


def test_the_cap_on_logprobs_is_the_engine_s(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs must be at most 20, the engine's max_logprobs; got 21"):
        llm.generate(LONG, GREEDY.clone(logprobs=21))
    with LLM("demo", **SETTINGS, max_logprobs=-1, logprobs_mode="processed_logprobs") as made:
        params = SamplingParams(seed=1, max_tokens=2, logprobs=-1, top_k=3)
        sample = made.generate(LONG, params, use_tqdm=False)[0].outputs[0]
        assert sample.logprobs is not None
        for entry in sample.logprobs:
            assert len(entry) == made.vocab_size
            kept = [math.exp(one.logprob) for one in entry.values() if one.logprob > -math.inf]
            assert len(kept) == 3 and sum(kept) == pytest.approx(1.0, abs=1e-4)


# ---------------------------------------------------------------- logits processors


class Favour:
    """Adds to one token's score; a request says which and how much."""

    arguments: Mapping[str, float] = {"favoured": 0.0, "by": 0.0}

    def __call__(self, logits: Any, arguments: dict[str, Any], positions: Any) -> Any:
        del positions
        is_favoured = jnp.arange(logits.shape[1]) == arguments["favoured"][:, None]
        return logits + jnp.where(is_favoured, arguments["by"][:, None], 0.0)


def test_a_logits_processor_acts_on_requests_that_name_its_arguments() -> None:
    with LLM("demo", **SETTINGS, logits_processors=[Favour]) as made:
        params = [GREEDY, GREEDY.clone(extra_args={"favoured": 30, "by": 1000}), GREEDY.clone(extra_args={"by": 0})]
        plain, favoured, neutral = made.generate([LONG] * 3, params, use_tqdm=False)
        assert favoured.outputs[0].token_ids == [30] * 12
        assert neutral.outputs[0].token_ids == plain.outputs[0].token_ids
        assert 30 not in plain.outputs[0].token_ids
        with pytest.raises(RequestError, match="unknown argument 'favored' in extra_args; .* favoured, by"):
            made.generate(LONG, GREEDY.clone(extra_args={"favored": 3}))
        with pytest.raises(RequestError, match=r"extra_args\['by'\] must be a number, got 'much'"):
            made.generate(LONG, GREEDY.clone(extra_args={"by": "much"}))
        assert value(made, "compiles_after_ready") == 0


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (["nowhere:Favour"], "cannot import 'nowhere:Favour'"),
        ([print], "expected a LogitsProcessor .callable, with a mapping `arguments`"),
        ([Favour, Favour], "two processors have an argument named 'favoured'"),
    ],
)
def test_what_is_no_logits_processor_is_refused(processors: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **SETTINGS, logits_processors=processors)


# ---------------------------------------------------------------- grammars, thinking, messages


def test_a_grammar_that_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = value(llm, "steps")
    with pytest.raises(RequestError, match="prompt 1:.*structured_outputs"):
        llm.generate([LONG] * 2, [GREEDY, GREEDY.clone(structured_outputs={"grammar": "start: nowhere"})])
    assert value(llm, "steps") == steps
    assert num_unfinished(llm) == 0


def test_thinking_ends_when_its_budget_is_used_up(llm: LLM) -> None:
    tokenizer = own_tokenizer(llm)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    params = GREEDY.clone(max_tokens=6 + len(end), ignore_eos=True, thinking_token_budget=4)
    found = ids(llm, "<think>sort 9 8 7 6 5 4 3", params.clone(thinking_token_budget=30))
    assert found[: len(end)] != end
    prompt = tokenizer.encode("<think>") + [282, 283]
    found = ids(llm, {"prompt_token_ids": prompt}, params)
    assert found[2 : 2 + len(end)] == end, "two tokens of the prompt count"


def test_a_thinking_budget_needs_a_parser() -> None:
    with LLM("demo", **SETTINGS) as made:
        with pytest.raises(RequestError, match="thinking_token_budget requires an engine with a reasoning_parser"):
            made.generate(LONG, GREEDY.clone(thinking_token_budget=4))
        with pytest.raises(ConfigError, match="needs an engine with reasoning_parser or tool_call_parser set"):
            made.parse_message("hello")


def test_an_answer_is_taken_apart(llm: LLM) -> None:
    text = '<think>hm</think>Sure.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = llm.parse_message(text)
    (call,) = message.tool_calls
    assert isinstance(call, ToolCall)
    assert (message.reasoning, message.content, call.name, call.arguments) == ("hm", "Sure.", "add", '{"a": 1}')


def test_streams_come_in_the_kind_asked_for(llm: LLM) -> None:
    full = llm.generate(LONG, GREEDY, use_tqdm=False)[0].outputs[0]
    deltas = [output.outputs[0] for output in llm.stream(LONG, GREEDY.clone(output_kind="DELTA"))]
    assert "".join(delta.text for delta in deltas) == full.text
    assert list(itertools.chain.from_iterable(delta.token_ids for delta in deltas)) == full.token_ids
    (final,) = llm.stream(LONG, GREEDY.clone(output_kind="FINAL_ONLY"))
    assert final.outputs[0].text == full.text and final.finished


class Poison:
    """Turns the scores of requests that ask for it into NaN from a position on."""

    arguments: Mapping[str, float] = {"poisoned_from": math.inf}

    def __call__(self, logits: Any, arguments: dict[str, Any], positions: Any) -> Any:
        return jnp.where((positions >= arguments["poisoned_from"])[:, None], jnp.nan, logits)


def test_scores_that_are_not_numbers_end_their_own_request() -> None:
    with LLM("demo", **SETTINGS, logits_processors=[Poison]) as made:
        healthy = GREEDY.clone(logprobs=2)
        alone = made.generate(LONG, healthy, use_tqdm=False)[0].outputs[0]
        length = len(made.generate(LONG, GREEDY, use_tqdm=False)[0].prompt_token_ids)
        poisoned = GREEDY.clone(extra_args={"poisoned_from": length + 2})
        made.reset_prefix_cache()
        beside, broken = made.generate([LONG, LONG], [healthy, poisoned], use_tqdm=False)
        assert (broken.outputs[0].finish_reason, len(broken.outputs[0].token_ids)) == ("error", 2)
        assert broken.error is not None and "NaN" in broken.error
        assert beside.outputs[0].token_ids == alone.token_ids
        assert num_unfinished(made) == 0 and value(made, "kv_cache_usage_perc") == 0
        again = made.generate(LONG, healthy, use_tqdm=False)[0].outputs[0]
        assert again.token_ids == alone.token_ids
