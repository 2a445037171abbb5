"""The engine end to end on a trained model: the reference's tokens under every setting, and every request option."""

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from tests.hooks import num_unfinished

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "compilation_cache_dir": "",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
STORY = "Once upon a time"


def value(llm: LLM, name: str, **labels: str) -> float:
    """A metric's value."""
    (found,) = [m.value for m in llm.get_metrics() if m.name == f"jaxserve:{name}" and m.labels == labels]
    return found


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def cases(stories_model: Path) -> list[dict[str, Any]]:
    """Prompts and greedy tokens made with transformers in float32."""
    return json.loads((stories_model / "expected.json").read_text())["cases"]


@pytest.fixture(scope="module")
def llm(stories_model: Path) -> Iterator[LLM]:
    """An engine that the tests of request options share."""
    with LLM(str(stories_model), **SETTINGS) as made:
        yield made
        assert value(made, "compiles_after_ready") == 0
        assert value(made, "kv_cache_usage_perc") == 0
        assert num_unfinished(made) == 0


@pytest.fixture(scope="module")
def hf_logprobs(stories_model: Path) -> Callable[[list[int]], np.ndarray]:
    """Transformers' log-probabilities [token, vocabulary] of what follows each token of a text."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        stories_model, dtype=torch.float32, attn_implementation="eager"
    )

    def logprobs(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1).numpy()

    return logprobs


# ---------------------------------------------------------------- the reference's tokens, however the engine is set up


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"async_scheduling": False}, id="one step at a time"),
        pytest.param({"tensor_parallel_size": 2, "async_scheduling": True}, id="two devices a layer"),
        pytest.param({"tensor_parallel_size": 4}, id="four devices a layer"),
        pytest.param({"data_parallel_size": 2, "max_num_seqs": 2}, id="two copies"),
        pytest.param({"block_size": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}, id="large pages"),
    ],
)
def test_greedy_tokens_are_those_of_the_reference(
    settings: dict[str, Any], cases: list[dict[str, Any]], stories_model: Path
) -> None:
    with LLM(str(stories_model), **{**SETTINGS, **settings}) as made:
        outputs = made.generate([case["prompt"] for case in cases], SamplingParams(temperature=0, max_tokens=200))
        assert [output.prompt_token_ids for output in outputs] == [case["prompt_ids"] for case in cases]
        assert tokens(outputs) == [case["greedy_ids"] for case in cases]
        assert [output.outputs[0].text.strip() for output in outputs] == [case["text"].strip() for case in cases]
        assert value(made, "compiles_after_ready") == 0
        assert value(made, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_requests_have_the_same_tokens(
    is_async: bool, cases: list[dict[str, Any]], stories_model: Path
) -> None:
    settings = {**SETTINGS, "num_gpu_blocks_override": 40, "max_model_len": 256, "async_scheduling": is_async}
    with LLM(str(stories_model), **settings) as made:
        prompts = [case["prompt"] for case in cases]
        outputs = made.generate(prompts, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
        assert tokens(outputs) == [case["greedy_ids"] for case in cases]
        assert value(made, "num_preemptions") > 0
        assert value(made, "kv_cache_usage_perc") == 0
        assert value(made, "compiles_after_ready") == 0


def test_sampled_texts_survive_preemption(stories_model: Path, llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=180, ignore_eos=True, logprobs=1) for seed in range(5)]
    expected = llm.generate([STORY] * 5, params, use_tqdm=False)
    with LLM(str(stories_model), **SETTINGS, num_gpu_blocks_override=40, max_model_len=256) as made:
        found = made.generate([STORY] * 5, params, use_tqdm=False)
        assert value(made, "num_preemptions") > 0
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, rel=1e-4)


# ---------------------------------------------------------------- how a text ends


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    (output,) = llm.generate(STORY, GREEDY.clone(stop=["xyzzy", "little g"]))
    found = output.outputs[0]
    assert found.text == full.text[: full.text.index("little g")]
    assert (found.finish_reason, found.stop_reason) == ("stop", "little g")
    assert found.token_ids == full.token_ids[: len(found.token_ids)]
    kept = llm.generate(STORY, GREEDY.clone(stop="little g", include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == found.text + "little g"
    assert kept.token_ids == found.token_ids


def test_a_stop_string_is_not_seen_before_min_tokens(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    found = llm.generate(STORY, GREEDY.clone(stop="e", min_tokens=12))[0].outputs[0]
    assert len(found.token_ids) >= 12
    assert full.text.startswith(found.text)
    assert "e" in found.text
    assert found.stop_reason == "e"


def test_a_stop_token_ends_the_text_and_is_kept_among_the_ids(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    place = next(i for i, token in enumerate(full.token_ids) if i > 4 and token not in full.token_ids[:i])
    token = full.token_ids[place]
    found = llm.generate(STORY, GREEDY.clone(stop_token_ids=[511, token]))[0].outputs[0]
    assert found.token_ids == full.token_ids[: place + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    kept = llm.generate(STORY, GREEDY.clone(stop_token_ids=[token], include_stop_str_in_output=True))[0].outputs[0]
    assert full.text.startswith(found.text)
    assert len(found.text) < len(kept.text)


def test_min_tokens_keeps_stop_tokens_from_being_chosen(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    found = llm.generate(STORY, GREEDY.clone(stop_token_ids=[full.token_ids[2]], min_tokens=8))[0].outputs[0]
    assert found.token_ids[:2] == full.token_ids[:2]
    assert full.token_ids[2] not in found.token_ids[:8]
    assert len(found.token_ids) >= 8


@pytest.fixture(scope="module")
def early_end(stories_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a frequent token, the full stop, declared as the end of a text."""
    directory = tmp_path_factory.mktemp("early_end")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stories_model / name, directory / name)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 426], "temperature": 0.0}')
    return directory


def test_the_end_of_a_text_as_the_checkpoint_declares_it(early_end: Path, llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with LLM(str(early_end), **SETTINGS, chat_template=template) as made:
        found = made.generate(STORY, GREEDY)[0].outputs[0]
        assert found.token_ids == full.token_ids[: full.token_ids.index(426) + 1]
        assert (found.finish_reason, found.stop_reason) == ("stop", None)
        assert not found.text.endswith(".")
        ignored = made.generate(STORY, GREEDY.clone(ignore_eos=True))[0].outputs[0]
        assert ignored.token_ids == full.token_ids
        later = made.generate(STORY, GREEDY.clone(min_tokens=16))[0].outputs[0]
        assert 426 not in later.token_ids[:16]
        assert len(later.token_ids) >= 16

        assert made.get_default_sampling_params().temperature == 0.0
        assert made.generate(STORY)[0].outputs[0].token_ids == full.token_ids[: len(found.token_ids)][:16]

        messages = [{"role": "user", "content": "One"}, {"role": "user", "content": "day"}]
        (answer,) = made.chat(messages, GREEDY)
        assert answer.prompt == "Oneday"
        assert (
            answer.outputs[0].token_ids
            == made.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY)[0].outputs[0].token_ids
        )
        assert len(made.chat([messages, messages[:1]], GREEDY)) == 2


def test_without_a_limit_the_text_goes_on_to_the_end_of_the_context(llm: LLM) -> None:
    found = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(found.prompt_token_ids) + len(found.outputs[0].token_ids) == 512
    assert found.outputs[0].finish_reason == "length"
    same = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True))[0]
    assert same.outputs[0].token_ids == found.outputs[0].token_ids


def test_a_prompt_that_leaves_room_for_one_token(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5] * 511}
    found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5, min_tokens=3))[0].outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (1, "length")


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    found = llm.generate(STORY, GREEDY.clone(detokenize=False))[0].outputs[0]
    assert found.text == ""
    assert found.token_ids == full.token_ids


def test_streamed_text_adds_up_to_the_whole(llm: LLM) -> None:
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    parts = [output.outputs[0].text for output in llm.stream(STORY, GREEDY)]
    assert len(parts) == 24
    assert parts[-1] == full.text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(parts))


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("count", [0, 3, 20])
def test_logprobs_are_those_of_transformers(
    count: int, llm: LLM, hf_logprobs: Callable[[list[int]], np.ndarray]
) -> None:
    params = SamplingParams(seed=3, max_tokens=40, logprobs=count, ignore_eos=True)
    prompts = [STORY, "Tim", "Lily and Tom went to the park"]
    for output in llm.generate(prompts, params, use_tqdm=False):
        found = output.outputs[0]
        text = output.prompt_token_ids + found.token_ids
        expected = hf_logprobs(text)[len(output.prompt_token_ids) - 1 : -1]
        assert found.logprobs is not None
        for entry, token, row in zip(found.logprobs, found.token_ids, expected, strict=True):
            check_entry(entry, token, row, count)
        total = sum(row[token] for row, token in zip(expected, found.token_ids, strict=True))
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-2)


def check_entry(entry: dict[int, Any], token: int, row: np.ndarray, count: int) -> None:
    """One position: the chosen token and the ``count`` best, each with its rank, value and text."""
    best = np.argsort(-row)[:count].tolist()
    assert set(entry) == {token, *best}
    assert len(entry) in (count, count + 1)
    for token_id, found in entry.items():
        assert found.logprob == pytest.approx(row[token_id], abs=1e-4)
        assert found.rank == 1 + int((row > row[token_id]).sum())
        assert isinstance(found.decoded_token, str)


@pytest.mark.parametrize("length", [1, 7, 100])
def test_prompt_logprobs_are_those_of_transformers(
    length: int, llm: LLM, cases: list[dict[str, Any]], hf_logprobs: Callable[[list[int]], np.ndarray]
) -> None:
    """A hundred tokens take four chunks of at most 32."""
    prompt = (cases[0]["prompt_ids"] + cases[0]["greedy_ids"])[:length]
    others = [SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=k) for k in (2, 0)]
    params = [others[0], SamplingParams(temperature=0, max_tokens=40), others[1]]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params, use_tqdm=False)
    assert outputs[1].prompt_logprobs is None
    expected = hf_logprobs(prompt)
    for output, count in ((outputs[0], 2), (outputs[2], 0)):
        found = output.prompt_logprobs
        assert found is not None
        assert len(found) == length
        assert found[0] is None
        for position, entry in enumerate(found[1:], 1):
            assert entry is not None
            check_entry(entry, prompt[position], expected[position - 1], count)
        assert output.outputs[0].logprobs is None


def test_logprobs_change_no_token(llm: LLM, cases: list[dict[str, Any]]) -> None:
    prompts = [case["prompt"] for case in cases]
    params = [GREEDY.clone(logprobs=i if i else None, prompt_logprobs=i or None) for i in range(len(cases))]
    assert tokens(llm.generate(prompts, params)) == [case["greedy_ids"][:24] for case in cases]


# ---------------------------------------------------------------- random samples


def test_a_seed_decides_the_samples(llm: LLM) -> None:
    params = SamplingParams(seed=11, n=4, max_tokens=20)
    (first,), (again,) = llm.generate(STORY, params), llm.generate(STORY, params)
    texts = [sample.token_ids for sample in first.outputs]
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) == 4
    assert texts == [sample.token_ids for sample in again.outputs]
    other = llm.generate(STORY, params.clone(seed=12))[0]
    assert texts != [sample.token_ids for sample in other.outputs]


def test_more_samples_than_places_in_a_step(llm: LLM) -> None:
    (output,) = llm.generate(STORY, SamplingParams(seed=1, n=9, max_tokens=6, ignore_eos=True))
    assert [len(sample.token_ids) for sample in output.outputs] == [6] * 9
    assert output.finished


def test_requests_without_a_seed_differ_and_follow_the_engine_s_seed(stories_model: Path) -> None:
    found = []
    for seed in (0, 0, 5):
        with LLM(str(stories_model), **{**SETTINGS, "max_num_seqs": 1}, seed=seed) as made:
            found.append(tokens(made.generate([STORY] * 2, SamplingParams(max_tokens=40), use_tqdm=False)))
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0][0] != found[0][1]


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    """Among them rows that are greedy, that ask for logprobs and that have stop tokens: other programs run then."""
    params = SamplingParams(seed=42, max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
    alone = llm.generate(STORY, params)[0].outputs[0].token_ids
    neighbours = [
        SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=9, min_tokens=8, logprobs=5),
        SamplingParams(seed=2, max_tokens=64, min_p=0.2, prompt_logprobs=1),
    ]
    prompts = ["Tim", STORY, "The sun was", STORY]
    outputs = llm.generate(prompts, [neighbours[0], params, *neighbours[1:]], use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone
    greedy_alone = llm.generate("Tim", neighbours[0])[0].outputs[0].token_ids
    assert outputs[0].outputs[0].token_ids == greedy_alone


def test_narrow_sampling_is_greedy(llm: LLM) -> None:
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].token_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.01}):
        params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 24, **narrow})
        assert llm.generate(STORY, params)[0].outputs[0].token_ids == expected, narrow


def test_sampled_tokens_follow_the_model_s_probabilities(
    llm: LLM, hf_logprobs: Callable[[list[int]], np.ndarray]
) -> None:
    """The second token of 1200 samples against the model, by a chi-squared test; the seeds are fixed."""
    prompt = {"prompt_token_ids": [1]}
    outputs = llm.generate([prompt] * 12, [SamplingParams(seed=s, n=100, max_tokens=1) for s in range(12)])
    chosen = [sample.token_ids[0] for output in outputs for sample in output.outputs]
    expected = np.exp(hf_logprobs([1])[-1]) * len(chosen)
    counts = np.bincount(chosen, minlength=512)
    frequent = expected >= 5
    observed = [*counts[frequent], counts[~frequent].sum()]
    wanted = [*expected[frequent], expected[~frequent].sum()]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    assert freedom >= 2
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


# ---------------------------------------------------------------- order, numbers and requests that are taken back


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, cases: list[dict[str, Any]]) -> None:
    params = [GREEDY.clone(max_tokens=length) for length in (24, 1, 17, 3, 9)]
    outputs = llm.generate([case["prompt"] for case in cases], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == [case["prompt"] for case in cases]
    assert [len(text) for text in tokens(outputs)] == [24, 1, 17, 3, 9]
    assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)


def test_an_aborted_request_gives_its_pages_back(llm: LLM, cases: list[dict[str, Any]]) -> None:
    aborted = value(llm, "request_success", finished_reason="abort")
    stream = llm.stream(STORY, SamplingParams(max_tokens=100, ignore_eos=True, n=3))
    seen = [next(stream) for _ in range(5)]
    assert value(llm, "kv_cache_usage_perc") > 0
    assert value(llm, "num_requests_running") == 3
    stream.close()
    assert not seen[-1].finished
    assert value(llm, "kv_cache_usage_perc") == 0
    assert value(llm, "num_requests_running") == value(llm, "num_requests_waiting") == 0
    assert value(llm, "request_success", finished_reason="abort") == aborted + 3
    outputs = llm.generate([case["prompt"] for case in cases], GREEDY, use_tqdm=False)
    assert tokens(outputs) == [case["greedy_ids"][:24] for case in cases]


def test_metrics_count_tokens_and_requests(llm: LLM) -> None:
    before = {m.name: m.value for m in llm.get_metrics()}
    ended = value(llm, "request_success", finished_reason="length")
    outputs = llm.generate([STORY, "Tim"], GREEDY, use_tqdm=False)
    after = {m.name: m.value for m in llm.get_metrics()}
    grown = {name: after[name] - before[name] for name in after}
    assert grown["jaxserve:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert grown["jaxserve:generation_tokens"] == 48
    assert value(llm, "request_success", finished_reason="length") == ended + 2
    assert grown["jaxserve:decode_rows"] == 46
    assert after["jaxserve:num_requests_running"] == after["jaxserve:num_requests_waiting"] == 0


def test_times_of_a_request_are_in_order(stories_model: Path) -> None:
    with LLM(str(stories_model), **{**SETTINGS, "max_num_seqs": 1}, disable_log_stats=False) as made:
        first, second = made.generate([STORY] * 2, GREEDY.clone(max_tokens=3), use_tqdm=False)
    found: list[Any] = [first.metrics, second.metrics]
    for times in found:
        assert times is not None
        arrival_ts = times.first_token_ts - times.first_token_latency
        stages = [arrival_ts, times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts]
        assert 0.0 not in stages and stages == sorted(stages)
        assert abs(time.time() - times.arrival_time) < 600
        assert (times.num_generation_tokens, times.is_corrupted) == (3, False)
    assert found[1].scheduled_ts >= found[0].last_token_ts
