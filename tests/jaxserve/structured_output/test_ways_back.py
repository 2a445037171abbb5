"""Constraints go back to where they were: then they say what one says that never left."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.parsers import reasoning_parser
from jaxserve.scheduling.constrained_drafts import masked_drafts
from jaxserve.scheduling.sequence import Constraint
from jaxserve.structured_output.constraints import AllOf, BadWords, ThinkingBudget
from jaxserve.structured_output.grammar_constraint import DeferredConstraint, GrammarConstraint
from jaxserve.structured_output.grammars import GrammarCompiler
from jaxserve.structured_output.reasoning import AfterReasoning, Reasoning, ReasoningMarkers
from jaxserve.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(MODEL_DIRECTORY)
VOCAB_SIZE = TOKENIZER.vocab_size
END = TOKENIZER.eos_token_id or 0
OBJECT = {"type": "object", "properties": {"name": {"enum": ["left", "lefty"]}, "n": {"type": "integer"}}}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": OBJECT | {"required": ["name", "n"], "additionalProperties": False}},
    "any json": {"json_object": True},
    "regex": {"regex": "(ab|abc)+[0-9]{2}"},
    "choice": {"choice": ["yes", "yesterday", "no"]},
    "grammar": {"grammar": 'root ::= [a-z]+ (" " [a-z]+)*'},
}


@pytest.fixture(scope="module", params=[True, False], ids=["with an end", "without an end"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [END] if request.param else [], num_threads=1)
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def bad_words() -> Constraint:
    return BadWords([ids(word) for word in ("ab", "abc", "bca", "aa", "caab")], VOCAB_SIZE)


def budget() -> Constraint:
    text_of = TOKENIZER.pieces(skip_special_tokens=False).shown
    return ThinkingBudget(("<a>", "<b>"), ids("<b>"), 4, ids("ab<a>"), VOCAB_SIZE, text_of)


def reasoning(inner: Constraint, is_open: bool | None) -> Constraint:
    form = reasoning_parser("deepseek_r1")
    start, end = (tuple(ids(text)) for text in (form.start_text, form.end_text))
    text_of = TOKENIZER.pieces(skip_special_tokens=False).shown
    return AfterReasoning(inner, Reasoning(ReasoningMarkers("deepseek_r1", start[:1], end), is_open), text_of)


def check_way_back(make: Callable[[], Constraint], pool: list[int], seed: int) -> None:
    """Walks with excursions, beside one without; tokens come from the pool if they may."""
    rng, walker, straight = random.Random(seed), make(), make()
    assert isinstance(walker, Constraint)
    for _ in range(25):
        if rng.random() < 0.8:
            state = walker.save()
            for _ in range(rng.randrange(6)):
                if walker.accept(step(walker, pool, rng)):
                    break
            walker.restore(state)
        token = step(straight, pool, rng)
        assert walker.mask() == straight.mask() and walker.forced() == straight.forced()
        is_complete = straight.accept(token)
        assert walker.accept(token) == is_complete
        if is_complete:
            break


def step(constraint: Constraint, pool: list[int], rng: random.Random) -> int:
    """A token that is allowed, often one that is forced."""
    mask, forced = constraint.mask(), constraint.forced()
    if mask is None:
        return rng.choice(forced or pool)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert all(bits[forced[:1]])
    allowed = np.flatnonzero(bits).tolist()
    return rng.choice([token for token in pool if bits[token]] or allowed)


@pytest.mark.parametrize("seed", range(10))
def test_constraints_go_back(seed: int) -> None:
    pool = ids("abc<a></think>")
    check_way_back(bad_words, pool, seed)
    check_way_back(budget, pool, seed)
    check_way_back(lambda: AllOf([budget(), bad_words()]), pool, seed)
    check_way_back(lambda: reasoning(bad_words(), True), pool, seed)
    check_way_back(lambda: reasoning(AllOf([bad_words(), budget()]), None), pool, seed)


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_go_back(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.submit(StructuredOutputsParams(**GRAMMARS[name]))
    grammar.result()
    pool = [*ids('ab{}"12,: ye'), END]
    for seed in range(30):
        check_way_back(lambda: DeferredConstraint(grammar), pool, seed)
    check_way_back(lambda: reasoning(DeferredConstraint(grammar), None), [*pool, *ids("</think>")], 1)
    check_way_back(lambda: AllOf([DeferredConstraint(grammar), bad_words()]), pool, 2)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_batch_of_masks_is_that_of_each_step(compiler: GrammarCompiler, name: str) -> None:
    """Also what is allowed without one."""
    grammar = compiler.submit(StructuredOutputsParams(**GRAMMARS[name]))
    grammar.result()
    rng = random.Random(0)
    rows, expected = list[tuple[DeferredConstraint, list[int]]](), list[list[bytes]]()
    for length in range(1, 13):
        constraint, tokens, masks = DeferredConstraint(grammar), list[int](), list[bytes]()
        state = constraint.save()
        while len(tokens) < length:
            allows = [token for token in range(VOCAB_SIZE) if constraint.allows(token)]
            bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
            masked = np.flatnonzero(bits).tolist()
            assert allows == masked or (masked == constraint.forced()[:1] and masked[0] in allows)
            allows = masked
            if constraint.accept(token := rng.choice(allows)):
                break
            tokens.append(token)
            masks.append(constraint.mask())
        constraint.restore(state)
        if tokens:
            rows.append((constraint, tokens))
            expected.append(masks)
    found = DeferredConstraint.masks_after(rows)
    assert [each.token_ids for each in masked_drafts(rows)] == [tokens for _, tokens in rows]
    assert [list(each.masks) for each in masked_drafts(rows)] == expected
    assert found in (expected, [None] * len(rows))  # where the model has no end, each row is walked


def test_a_grammar_goes_back_from_a_token_that_it_forbids(compiler: GrammarCompiler) -> None:
    grammar = compiler.submit(StructuredOutputsParams(choice=["yes", "no"])).result()
    constraint = grammar.constraint()
    constraint.accept(ids("y")[0])
    expected, state = constraint.mask(), constraint.save()
    constraint.accept(ids("e")[0])
    with pytest.raises(RuntimeError, match="is not allowed by the structured output"):
        constraint.accept(ids("x")[0])
    constraint.restore(state)
    assert constraint.mask() == expected
    assert isinstance(constraint, GrammarConstraint) and not constraint.accept(ids("e")[0])
