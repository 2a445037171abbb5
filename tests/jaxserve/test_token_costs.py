"""What runs for each token costs as much late in a long context as early: twice the context, the same work."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.api.structured_params import RepetitionDetectionParams
from jaxserve.parsers import MessageParser
from jaxserve.scheduling.endings import find_ending
from jaxserve.scheduling.proposers.ngram import NgramProposer
from jaxserve.scheduling.proposers.suffix import SuffixProposer
from jaxserve.scheduling.sequence import Constraint
from jaxserve.structured_output.constraints import BadWords, ThinkingBudget
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.text_offsets import TextOffsets
from jaxserve.text.tokenizer import Tokenizer
from tests.counted_lines import num_lines
from tests.sequences import make_sequence, proposed

NUM_MEASURED = 200
Consumer = Callable[[int], object]


def work(consume: Consumer, num_tokens: int) -> tuple[int, int]:
    """The lines that run for the last tokens of a context, and the bytes that they have allocated at a time."""
    for index in range(num_tokens):
        consume(index)
    gc.collect()
    tracemalloc.start()
    for index in range(num_tokens, num_tokens + NUM_MEASURED):
        consume(index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    def consume_more() -> None:
        for index in range(num_tokens + NUM_MEASURED, num_tokens + 2 * NUM_MEASURED):
            consume(index)

    return num_lines(consume_more), peak


def token(index: int) -> int:
    """Tokens that repeat themselves here and there, but not for long."""
    return 97 + (index * 2654435761 >> 13) % 11


def repetition(tokenizer: Tokenizer) -> Consumer:
    """Looks for patterns."""
    params = RepetitionDetectionParams(max_pattern_size=1024, min_count=20)
    sequence = make_sequence("r", [1] * 10, 10, 1 << 20, repetition=params)

    def consume(index: int) -> None:
        sequence.token_ids.append(token(index))
        assert find_ending(sequence, sequence.token_ids[-1]) is None

    return consume


def text(tokenizer: Tokenizer) -> Consumer:
    """Detokenizes, and looks for many long stop strings."""
    stops = [f"{'ab' * 60}{number}" for number in range(64)]
    detokenizer = Detokenizer(tokenizer.pieces(), stop=stops)

    def consume(index: int) -> None:
        assert detokenizer.push_tokens([token(index)]) is None
        detokenizer.take()

    return consume


def offsets(tokenizer: Tokenizer) -> Consumer:
    """Finds where tokens begin in the text."""
    found = TextOffsets(tokenizer.pieces())
    return lambda index: found.add(token(index))


def masking(constraint: Constraint) -> Consumer:
    """Masks what may follow each token, also after drafts that were taken back."""

    def consume(index: int) -> None:
        constraint.accept(token(index))
        constraint.restore(constraint.save())
        constraint.mask()

    return consume


def bad_words(tokenizer: Tokenizer) -> Consumer:
    """Bans the last tokens of words."""
    return masking(BadWords([[97 + number % 11] * 20 + [100 + number] for number in range(100)], 300))


def thinking_budget(tokenizer: Tokenizer) -> Consumer:
    """Counts the tokens of reasoning."""
    markers, shown = ("<think>", "</think>"), tokenizer.pieces(skip_special_tokens=False).shown
    end, begin = tokenizer.encode("</think>"), tokenizer.encode("<think>")
    return masking(ThinkingBudget(markers, end, 1 << 20, begin, 300, shown))


def proposer(made: Any) -> Consumer:
    """Proposes what may follow."""
    sequence = make_sequence("p", [1] * 10, 10, 1 << 20, num_pending=1)

    def consume(index: int) -> None:
        sequence.token_ids.append(token(index))
        proposed(made, sequence)

    return consume


def ngram(tokenizer: Tokenizer) -> Consumer:
    """Finds where the latest tokens first occurred."""
    return proposer(NgramProposer({"num_speculative_tokens": 4}))


def suffix(tokenizer: Tokenizer) -> Consumer:
    """Finds the longest match in the output, in Python."""
    names = {"max_cached_requests": 10, "max_spec_factor": 1.0, "max_tree_depth": 24, "min_token_prob": 0.1}
    keys = {f"suffix_decoding_{name}": value for name, value in names.items()}
    return proposer(SuffixProposer({"num_speculative_tokens": 4, **keys}, None))


def parser(completion: str) -> Callable[[Tokenizer], Consumer]:
    """Parses a completion that begins so."""

    def make(tokenizer: Tokenizer) -> Consumer:
        made = MessageParser("qwen3", "hermes")
        made.feed(completion)
        return lambda index: made.feed(chr(token(index)))

    return make


CONSUMERS: dict[str, Callable[[Tokenizer], Consumer]] = {
    **{each.__name__: each for each in (repetition, text, offsets, bad_words, thinking_budget, ngram, suffix)},
    "reasoning": parser("<think>"),
    "content": parser("<think>a</think>"),
    "tool call": parser('<think>a</think><tool_call>{"name": "f", "arguments": {"x": "'),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_twice_the_context_costs_the_same(name: str, tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """Lines count what Python does, and allocations what one call in C does: a copy of the context is both long and
    rare."""
    tokenizer, make = tiny_tokenizers["byte-level"], CONSUMERS[name]
    num_tokens = 1000 if name == "suffix" else 6000  # its tree takes long in Python
    work(make(tokenizer), 50)  # what is made once
    lines, peak = work(make(tokenizer), num_tokens)
    lines_of_twice, peak_of_twice = work(make(tokenizer), 2 * num_tokens)
    assert lines_of_twice < 1.3 * lines + 100
    assert peak_of_twice < 1.3 * peak + (8 << 10)
