"""Ids that come from text are checked as ids that come as numbers: a tokenizer may have tokens that the model lacks."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, RequestError, SamplingParams
from jaxserve.engine.model_defaults import writable_markers
from jaxserve.structured_output.reasoning import ReasoningMarkers
from jaxserve.structured_params import StructuredOutputsParams
from tests.random_checkpoint import LLAMA, write_checkpoint_with_tokenizer

VOCAB_SIZE = 360
ADDED = {"<think>": False, "</think>": False, "<|tool|>": True, "<|bye|>": True}
"""Tokens after the model's last one, and whether each is special."""
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
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
    config = {**LLAMA, "vocab_size": VOCAB_SIZE, "eos_token_id": [-1, VOCAB_SIZE + 3]}
    write_checkpoint_with_tokenizer(made, config, seed=1)
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
    """-1 is no other name of the last token, and neither id is ever banned or sampled."""
    assert llm.engine.admission.limits.eos_token_ids == ()
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
def test_structured_outputs_with_tokens_that_the_model_lacks(llm: LLM, given: dict[str, str]) -> None:
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
