"""One request's failure is its own: ids that come from text, and exceptions while a row is built or delivered."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, PoolingParams, RequestError, RequestOutput, SamplingParams
from jaxserve.device import lane
from jaxserve.device.batch import BatchBuilder
from jaxserve.device.masks import TokenMasks
from jaxserve.engine import engine as engine_module
from jaxserve.engine.model_defaults import writable_markers
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.errors import RequestFailedError, own_failure
from jaxserve.request import parse_prompts
from jaxserve.scheduling import endings, plan_draft
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.structured_output.constraints import BadWords
from jaxserve.structured_output.reasoning import ReasoningMarkers
from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams
from jaxserve.text.detokenizer import Detokenizer
from tests.random_checkpoint import LLAMA, write_checkpoint_with_tokenizer

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
    assert found == expected and llm.engine.num_unfinished == 0


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
    assert llm.engine.admission.limits.eos_token_ids == (2,), "the tokenizer's"
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
    (replica,) = llm.engine.replicas
    (scheduler,) = replica.schedulers
    assert llm.engine.num_unfinished == 0 and not scheduler.running and not scheduler.waiting
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def failing(
    patch: pytest.MonkeyPatch, owner: Any, name: str, is_meant: Callable[..., bool], error: type[BaseException]
) -> list[int]:
    """Make a function fail in the calls that are meant; return their count so far."""
    original, raised = getattr(owner, name), list[int]()

    def maybe(*arguments: Any, **options: Any) -> Any:
        if is_meant(*arguments, **options):
            raised.append(1)
            raise error("secret")
        return original(*arguments, **options)

    patch.setattr(owner, name, maybe)
    return raised


def of_victim(sequence: Sequence) -> bool:
    return sequence.num_prompt_tokens > 10


Place = tuple[Any, str, Callable[..., bool], dict[str, Any]]
BIAS = {300: -1.0}
LOOP = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
PLACES: dict[str, Place] = {
    "static mask": (TokenMasks, "_slot_mask", lambda self, sampling: True, {"allowed_token_ids": [300, 301]}),
    "row mask": (TokenMasks, "_row_words", lambda self, slot, *rest: slot == self_slot(self), {"bad_words": ["q"]}),
    "parameters": (BatchBuilder, "_set_params", lambda self, slot, s: s.logit_bias != (), {"logit_bias": BIAS}),
    "bias": (lane, "slot_row", lambda setup, size: bool(setup.sampling.logit_bias), {"logit_bias": BIAS}),
    "chunk": (plan_draft, "_targets", lambda sequence, end: of_victim(sequence), {"prompt_logprobs": 1}),
    "constraint's mask": (BadWords, "mask", lambda self: True, {"bad_words": ["12+30="]}),
    "constraint's next state": (BadWords, "accept", lambda self, token: True, {"bad_words": ["12+30="]}),
    "ending": (endings, "ends_in_repetition", lambda *arguments: True, {"repetition_detection": LOOP}),
    "scores of the prompt": (RequestState, "add_prompt_logprobs", lambda *arguments: True, {"prompt_logprobs": 1}),
    "scores": (Sample, "score", lambda *arguments: True, {"logprobs": 1}),
    "text": (Detokenizer, "push_tokens", lambda self, tokens: bool(self._stops), {"stop": ["§"]}),
}


def self_slot(masks: TokenMasks) -> int:
    """The only slot with a static mask."""
    return next(iter(masks._slots))


@pytest.mark.parametrize("place", PLACES)
def test_one_row_fails(llm: LLM, expected: list[list[int]], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, is_meant, changes = PLACES[place]
    with monkeypatch.context() as patch:
        raised = failing(patch, owner, name, is_meant, Injected)
        outputs = run(llm, PARAMS.clone(**changes))
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


@pytest.mark.parametrize("name", ["pooled_vector", "_chunk_pooling"])
def test_one_embedding_fails(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [PoolingParams(pooling="mean" if index == VICTIM else "last") for index in range(len(PROMPTS))]
    alone = [output.outputs.embedding for output in llm.embed(PROMPTS, pooling_params=params, use_tqdm=False)]
    requests = [
        llm.engine.prepare(parse_prompts(prompt)[0], each) for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    with monkeypatch.context() as patch:
        if name == "pooled_vector":
            failing(patch, engine_module, name, lambda total, count, one: one.pooling == "mean", Injected)
        else:
            failing(patch, plan_draft, name, lambda sequence, end: sequence.pooling == "mean", Injected)
        for request in requests:
            llm.engine.enqueue(request)
        while llm.engine.num_unfinished:
            llm.engine.step()
    for index, request in enumerate(requests):
        if index == VICTIM:
            assert isinstance(request.error, RequestFailedError) and request.embedding is None
        else:
            assert request.embedding == alone[index]
    assert_idle(llm)


def test_a_request_that_cannot_be_queued(llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing(patch, Scheduler, "add", lambda self, sequence: of_victim(sequence), Injected)
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
