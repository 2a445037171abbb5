"""Constraints in plain Python against the rules they stand for."""

import random

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.scheduling.sequence import Constraint
from jaxserve.structured_output.constraints import AllOf, BadWords, ThinkingBudget, bad_word_ids
from jaxserve.text.tokenizer import Tokenizer
from tests.sequences import Taken

VOCAB_SIZE = 70
START, END = [60], [61, 62, 61, 63]


def allowed(mask: bytes | None) -> set[int]:
    """Ids whose bit is set."""
    if mask is None:
        return set(range(VOCAB_SIZE))
    assert len(mask) == 4 * ((VOCAB_SIZE + 31) // 32)
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


class Fixed(Taken):
    """Allows the same tokens always; complete with one of them."""

    def __init__(self, tokens: set[int], last: int = -1) -> None:
        super().__init__()
        self.tokens = tokens
        self.last = last

    def mask(self) -> bytes:
        """The bits."""
        bits = np.zeros(96, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> bool:
        """Notes the token."""
        self.taken.append(token)
        return token == self.last


def banned_by_rule(words: list[list[int]], output: list[int]) -> set[int]:
    """vLLM's rule, word by word."""
    return {
        word[-1]
        for word in words
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]
    }


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_ban_what_the_rule_bans(seed: int) -> None:
    """Over few tokens, so that words overlap, repeat themselves and share prefixes."""
    generator = random.Random(seed)
    words = [[generator.randrange(4) for _ in range(generator.randint(2, 5))] for _ in range(8)]
    constraint = BadWords(words, VOCAB_SIZE)
    assert isinstance(constraint, Constraint)
    output: list[int] = []
    for _ in range(300):
        banned = banned_by_rule(words, output)
        mask = constraint.mask()
        assert (mask is None) == (not banned)
        assert allowed(mask) == set(range(VOCAB_SIZE)) - banned
        output.append(generator.randrange(4))
        assert not constraint.accept(output[-1])


def test_bad_words_of_large_ids() -> None:
    """The last bit of the last word."""
    constraint = BadWords([(3, VOCAB_SIZE - 1)], VOCAB_SIZE)
    constraint.accept(3)
    assert allowed(constraint.mask()) == set(range(VOCAB_SIZE - 1))


def forced_by_rule(tokens: list[int], budget: int) -> int | None:
    """The token that the budget forces, from all tokens so far."""

    def last(part: list[int]) -> int:
        places = [place for place in range(len(tokens)) if tokens[place : place + len(part)] == part]
        return max(places, default=-1)

    start = last(START)
    if start <= last(END) or len(tokens) - start - len(START) < budget:
        return None
    written = [length for length in range(1, len(END)) if tokens[-length:] == END[:length]]
    return END[max(written, default=0)]


def thinking_budget(budget: int, prompt: list[int]) -> ThinkingBudget:
    """The budget, where the text of a token is a character."""
    start, end = ("".join(map(chr, part)) for part in (START, END))
    return ThinkingBudget((start, end), END, budget, prompt, VOCAB_SIZE, chr)


@pytest.mark.parametrize("seed", range(40))
def test_thinking_budget_forces_what_the_rule_forces(seed: int) -> None:
    """Sections begin in prompt and output, end by themselves, begin again, and hold parts of the end sequence."""
    generator = random.Random(seed)
    pool = [*START * 2, *END, 5]
    budget = generator.randrange(6)
    tokens = [generator.choice(pool) for _ in range(generator.randrange(8))]
    constraint = thinking_budget(budget, tokens)
    for _ in range(200):
        forced = forced_by_rule(tokens, budget)
        mask = constraint.mask()
        assert (mask is None) == (forced is None)
        assert allowed(mask) == (set(range(VOCAB_SIZE)) if forced is None else {forced})
        tokens.append(generator.choice(pool) if forced is None else forced)
        assert not constraint.accept(tokens[-1])


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thinking_section_has_its_budget_and_no_more(budget: int) -> None:
    """The prompt opens the section, as chat templates do."""
    constraint = thinking_budget(budget, [1, *START])
    output: list[int] = []
    while len(output) < budget + len(END):
        output.append(min(allowed(constraint.mask())))
        constraint.accept(output[-1])
    assert output == [0] * budget + END
    assert constraint.mask() is None


def test_marks_of_a_thinking_section_may_share_tokens_with_other_text() -> None:
    texts = {1: "<think", 2: ">\n", 3: "Hm.", 4: "\n</", 5: "think>\n\n"}
    for prompt in ([1, 2], [3, 1, 2]):
        constraint = ThinkingBudget(
            ("<think>", "</think>"), [8, 9], 2, prompt, VOCAB_SIZE, lambda one: texts.get(one, "x")
        )
        assert constraint.mask() is None
        constraint.accept(3)
        assert constraint.mask() is None
        constraint.accept(3)
        assert allowed(constraint.mask()) == {8}
        constraint.accept(4)
        constraint.accept(5)
        assert constraint.mask() is None
        for token in (3, 1, 2, 3, 3):
            assert constraint.mask() is None
            constraint.accept(token)
        assert allowed(constraint.mask()) == {8}


def test_all_of_takes_what_all_allow() -> None:
    """And each of them sees every token."""
    first, second = Fixed({1, 2, 3}), Fixed({2, 3, 69}, last=3)
    both = AllOf([first, second])
    assert allowed(both.mask()) == {2, 3}
    assert not both.accept(2)
    assert both.accept(3)
    assert first.taken == second.taken == [2, 3]


def test_all_of_prefers_the_first_where_nothing_is_left() -> None:
    """A grammar wins over bad words."""
    assert allowed(AllOf([Fixed({1}), Fixed({2})]).mask()) == {1}
    words = BadWords([(1, 2)], VOCAB_SIZE)
    assert AllOf([words]).mask() is None
    words.accept(1)
    assert allowed(AllOf([words, Fixed({2})]).mask()) == set(range(VOCAB_SIZE)) - {2}
    assert allowed(AllOf([Fixed({1, 2}), words]).mask()) == {1}


def test_bad_word_ids_with_and_without_a_space(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """A word that a space makes longer has one form; one whose first token takes the space along has two."""
    tokenizer = tiny_tokenizers["byte-level"]
    number = tokenizer.token_to_id
    assert bad_word_ids(tokenizer, ["  hx"]) == [(number("h"), number("x")), (number("Ġh"), number("x"))]
    assert bad_word_ids(tokenizer, ["xy"]) == [(number("x"), number("y"))]


@pytest.mark.parametrize("name", ["qwen", "llama2", "mistral-v7", "deepseek-r1", "phi3"])
def test_bad_word_ids_of_real_tokenizers(name: str, real_tokenizer) -> None:
    """Every sequence spells the word, with or without a space."""
    tokenizer: Tokenizer = real_tokenizer(name)
    for word in ("banana", "Straße", "well-known thing"):
        found = bad_word_ids(tokenizer, [word])
        assert 1 <= len(found) <= 2
        assert {tokenizer.decode(ids).strip() for ids in found} == {word}


def test_bad_words_that_are_none(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """White space alone, and far too many."""
    tokenizer = tiny_tokenizers["byte-level"]
    with pytest.raises(RequestError, match="at least one token each; '  ' has none"):
        bad_word_ids(tokenizer, ["  "])
    with pytest.raises(RequestError, match="129 token sequences; at most 128"):
        bad_word_ids(tokenizer, ["xy"] * 129)
