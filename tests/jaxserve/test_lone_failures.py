"""One request's failure is its own: ids that come from text, and exceptions while a row is built or delivered."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import (
    LLM,
    PoolingParams,
    RepetitionDetectionParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.hooks import (
    LLAMA,
    ReasoningMarkers,
    RequestFailedError,
    embed_together,
    eos_token_ids,
    fail,
    held,
    num_unfinished,
    own_failure,
    writable_markers,
    write_checkpoint_with_tokenizer,
)

VOCAB_SIZE = 360
ADDED = {"<think>": False, "</think>": False, "<|tool|>": True, "<|bye|>": True}
"""Tokens after the model's last one, and whether each is special."""
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compile_sizes": {"decode": [3], "mixed": [16]},
    "compilation_cache_dir": "",
    "warm_up": False,
    "kv_cache_memory_bytes": 1 << 20,
    "reasoning_parser": "think",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has four more tokens, one of them its end token."""
    made = tmp_path_factory.mktemp("more_tokens")
    config = {**LLAMA, "vocab_size": VOCAB_SIZE, "eos_token_id": VOCAB_SIZE + 3}
    write_checkpoint_with_tokenizer(made, config, seed=1)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE + 2]}))
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {**form, "id": VOCAB_SIZE + index, "content": text, "special": special}
        for index, (text, special) in enumerate(ADDED.items())
    ]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **SETTINGS) as made:
        yield made


@pytest.fixture(autouse=True)
def alive(llm: LLM) -> Iterator[None]:
    """Each test leaves an engine that gives the same tokens."""
    expected = [output.outputs[0].token_ids for output in llm.generate(["12+30=", "a"], GREEDY, use_tqdm=False)]
    yield
    found = [output.outputs[0].token_ids for output in llm.generate(["12+30=", "a"], GREEDY, use_tqdm=False)]
    assert found == expected and num_unfinished(llm) == 0


# ---------------------------------------------------------------- ids that come from text


@pytest.mark.parametrize("word", ["<|tool|>", "<think>", "ab<|tool|>", "<|tool|><|bye|>"])
def test_bad_words_of_tokens_that_the_model_lacks(llm: LLM, word: str) -> None:
    match = r"bad_words must consist of the model's tokens, 0 to 359; got 36\d \('<.*>'\).*parameter=bad_words"
    with pytest.raises(RequestError, match=match):
        llm.generate(["12+30=", "a"], [GREEDY, GREEDY.clone(bad_words=["ok", word])], use_tqdm=False)


def test_markers_that_the_model_lacks(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """A budget cannot be kept, and structured outputs need not wait for an end that the model cannot write."""
    with pytest.raises(RequestError, match="spells the parser's markers with tokens of the model"):
        llm.generate("<", GREEDY.clone(thinking_token_budget=1), use_tqdm=False)
    params = GREEDY.clone(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), max_tokens=8)
    for output in llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False):
        assert output.outputs[0].text in ("yes", "no")
    markers = ReasoningMarkers("think", (VOCAB_SIZE,), (5, VOCAB_SIZE + 1), ((7,),))
    with caplog.at_level(logging.WARNING):
        assert writable_markers(markers, VOCAB_SIZE) is None
    assert "reasoning_parser=think: the tokenizer spells its markers with the tokens [360, 361]" in caplog.text
    assert writable_markers(markers, VOCAB_SIZE + 2) is markers


def test_end_tokens_that_the_model_lacks(llm: LLM) -> None:
    """An id outside the vocabulary is neither banned nor sampled."""
    assert eos_token_ids(llm) == (2,), "the tokenizer's"
    last = llm.generate("a", GREEDY.clone(allowed_token_ids=[VOCAB_SIZE - 1], min_tokens=2), use_tqdm=False)
    assert last[0].outputs[0].token_ids == [VOCAB_SIZE - 1] * 4


TAGGED = {"structures": [{"begin": "<|tool|>x", "schema": {"type": "integer"}, "end": "!"}], "triggers": ["<|tool|>"]}


@pytest.mark.parametrize(
    "given",
    [
        {"structural_tag": json.dumps(TAGGED)},
        {"grammar": 'start: "<|tool|>" /[a-c]{2}/'},
        {"grammar": "start: /a?/ <|tool|>"},
        {"grammar": "start: /a?/ <[362]>"},
        {"regex": r"<\|tool\|>[ab]"},
        {"choice": ["<think>", "<|bye|>"]},
    ],
)
def test_structured_outputs_with_tokens_that_the_model_lacks(llm: LLM, given: dict[str, Any]) -> None:
    """They are spelled with others, or refused by name; neighbours get what they would alone."""
    alone = llm.generate("12+30=", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = GREEDY.clone(structured_outputs=StructuredOutputsParams(**given), max_tokens=20)
    try:
        outputs = llm.generate(["12+30=", "a"], [GREEDY, params], use_tqdm=False)
    except RequestError as error:
        assert "structured_outputs" in str(error)
        return
    assert outputs[0].outputs[0].token_ids == alone
    assert outputs[1].error is None and max(outputs[1].outputs[0].token_ids) < VOCAB_SIZE


# ---------------------------------------------------------------- rows that cannot be built or delivered

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["12+30=", "reverse moon: a prompt of several chunks", "1"]
VICTIM = 1
"""The prompt whose request fails."""


class Injected(ValueError):
    """An error that nobody has foreseen, with details that are for the log only."""


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run(llm, PARAMS)]


def run(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """The outputs of all prompts, the victim's with its own parameters."""
    each = [params if index == VICTIM else PARAMS for index in range(len(PROMPTS))]
    return llm.generate(PROMPTS, each, use_tqdm=False)


def assert_idle(llm: LLM) -> None:
    assert held(llm) == (0, 0, 0, 0)


BIAS = {300: -1.0}
LOOP = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
PLACES: dict[str, dict[str, Any]] = {
    "static mask": {"allowed_token_ids": [300, 301]},
    "row mask": {"bad_words": ["q"]},
    "parameters": {"logit_bias": BIAS},
    "bias": {"logit_bias": BIAS},
    "chunk": {"prompt_logprobs": 1},
    "constraint's mask": {"bad_words": ["12+30="]},
    "constraint's next state": {"bad_words": ["12+30="]},
    "ending": {"repetition_detection": LOOP},
    "scores of the prompt": {"prompt_logprobs": 1},
    "scores": {"logprobs": 1},
    "text": {"stop": ["§"]},
}
"""What fails, and the victim's parameters that lead there."""


def injected() -> BaseException:
    return Injected("secret")


@pytest.mark.parametrize("place", PLACES)
def test_one_row_fails(llm: LLM, expected: list[list[int]], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        raised = fail(patch, place, injected)
        outputs = run(llm, PARAMS.clone(**PLACES[place]))
    assert raised
    for index, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        if index == VICTIM:
            assert output.error is not None and "secret" not in output.error and "Injected, see the log" in output.error
            assert output.finished and output.outputs[0].finish_reason == "error"
        else:
            assert output.error is None and output.outputs[0].token_ids == tokens
    assert_idle(llm)
    assert [output.outputs[0].token_ids for output in run(llm, PARAMS)] == expected
    assert_idle(llm)


@pytest.mark.parametrize("place", ["vector", "chunk of a vector"])
def test_one_embedding_fails(llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [PoolingParams(pooling="mean" if index == VICTIM else "last") for index in range(len(PROMPTS))]
    alone = [output.outputs.embedding for output in llm.embed(PROMPTS, pooling_params=params, use_tqdm=False)]
    with monkeypatch.context() as patch:
        fail(patch, place, injected)
        requests = embed_together(llm, PROMPTS, params)
    for index, request in enumerate(requests):
        if index == VICTIM:
            assert isinstance(request.error, RequestFailedError) and request.embedding is None
        else:
            assert request.embedding == alone[index]
    assert_idle(llm)


def test_a_request_that_cannot_be_queued(llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail(patch, "queue", injected)
        with pytest.raises(Injected):
            run(llm, PARAMS)
    assert_idle(llm)
    assert [output.outputs[0].token_ids for output in run(llm, PARAMS)] == expected


def test_panics_of_libraries_are_failures_and_interrupts_are_not() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    panicked = panic("index out of bounds")
    assert own_failure(panicked).__cause__ is panicked
    error = Injected("x")
    assert own_failure(error) is error
    for kind in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(kind):
            own_failure(kind())
