"""Constraints on the next token that follow from the tokens before it, in plain Python. See `Constraint`."""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from jaxserve.errors import RequestError
from jaxserve.scheduling.sequence import Constraint
from jaxserve.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
"""Token sequences that `bad_words` may become; vLLM's default."""


@cache
def _all_allowed(vocab_size: int) -> np.ndarray:
    """A mask with a bit for every id, as bytes; not to be changed."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    bits[:vocab_size] = 1
    return np.packbits(bits, bitorder="little")


def _without(banned: Iterable[int], vocab_size: int) -> bytes:
    mask = _all_allowed(vocab_size).copy()
    for token in banned:
        mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return mask.tobytes()


@cache
def _only(token: int, vocab_size: int) -> bytes:
    mask = np.zeros_like(_all_allowed(vocab_size))
    mask[token >> 3] = 1 << (token & 7)
    return mask.tobytes()


class BadWords:
    """Bans the last token of a sequence wherever the output ends with the tokens before it.

    Args:
        token_sequences: Words of two or more tokens; those of one are banned everywhere and need no constraint.
        vocab_size: Ids are below it.
    """

    def __init__(self, token_sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words: dict[int, list[tuple[list[int], int]]] = {}
        self._recent: list[int] = []
        self._max_recent = 0
        for word in token_sequences:
            assert len(word) > 1 and max(word) < vocab_size, word
            *before, banned = word
            self._words.setdefault(before[-1], []).append((before, banned))
            self._max_recent = max(self._max_recent, len(before))

    def mask(self) -> bytes | None:
        """Tokens allowed next; None where no word is about to be complete."""
        recent = self._recent
        words = self._words.get(recent[-1]) if recent else None
        if words is None:
            return None
        banned = [token for before, token in words if recent[-len(before) :] == before]
        return _without(banned, self._vocab_size) if banned else None

    def accept(self, token: int) -> bool:
        """Takes the next token of the output; never ends the text."""
        self._recent.append(token)
        if len(self._recent) > 2 * self._max_recent:
            del self._recent[: -self._max_recent]
        return False


class ThinkingBudget:
    """Forces the end of a thinking section that has used its budget up: vLLM's ``thinking_token_budget``.

    A section begins after the last start sequence, of the prompt or of the output, that no end sequence follows. Where
    its tail already begins the end sequence, only the rest is forced. Each section has the whole budget.

    Args:
        start_ids: Tokens that begin a section, such as those of ``<think>``.
        end_ids: Tokens that end it.
        budget: Tokens it may have between them; those of the prompt count.
        prompt_token_ids: The prompt.
        vocab_size: Ids are below it.
    """

    def __init__(
        self,
        start_ids: Sequence[int],
        end_ids: Sequence[int],
        budget: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        assert start_ids and end_ids and budget >= 0, (start_ids, end_ids, budget)
        self._start = list(start_ids)
        self._end = list(end_ids)
        self._budget = budget
        self._vocab_size = vocab_size
        self._max_recent = max(len(self._start), len(self._end))
        prompt = list(prompt_token_ids)
        self._recent = prompt[-self._max_recent :]
        start, end = _last_place(prompt, self._start), _last_place(prompt, self._end)
        self._num_thinking = len(prompt) - start - len(self._start) if start > end else None

    def mask(self) -> bytes | None:
        """Tokens allowed next: one, where the end is forced; else None."""
        if self._num_thinking is None or self._num_thinking < self._budget:
            return None
        recent, end = self._recent, self._end
        lengths = range(min(len(end) - 1, len(recent)), 0, -1)
        num_written = next((length for length in lengths if recent[-length:] == end[:length]), 0)
        return _only(end[num_written], self._vocab_size)

    def accept(self, token: int) -> bool:
        """Takes the next token of the output; never ends the text."""
        recent = self._recent
        recent.append(token)
        del recent[: -self._max_recent]
        if recent[-len(self._start) :] == self._start:
            self._num_thinking = 0
        elif recent[-len(self._end) :] == self._end:
            self._num_thinking = None
        elif self._num_thinking is not None:
            self._num_thinking += 1
        return False


class AllOf:
    """Several constraints at once. Where no token keeps to all of them, the first that has a mask counts alone.

    Args:
        constraints: At least one; the one that matters most first.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        assert constraints
        self._constraints = tuple(constraints)

    def mask(self) -> bytes | None:
        """Tokens that every constraint allows."""
        masks = [mask for constraint in self._constraints if (mask := constraint.mask()) is not None]
        if len(masks) < 2:
            return masks[0] if masks else None
        words = np.frombuffer(masks[0], np.uint32)
        for mask in masks[1:]:
            words = words & np.frombuffer(mask, np.uint32)
        return words.tobytes() if words.any() else masks[0]

    def accept(self, token: int) -> bool:
        """Takes the next token; returns whether it completes the text for any of them."""
        complete = [constraint.accept(token) for constraint in self._constraints]
        return any(complete)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Token sequences that spell bad words: each word as it begins a text and as it follows a space.

    The second form counts where it is as long as the first and begins with another token, as in vLLM.

    Raises:
        RequestError: A word without a token, or more than `MAX_BAD_WORDS` sequences.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        if not plain:
            raise RequestError(
                f"bad_words needs words with at least one token; {word!r} has none", parameter="bad_words", value=words
            )
        found.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    if len(found) > MAX_BAD_WORDS:
        message = f"bad_words became {len(found)} token sequences; at most {MAX_BAD_WORDS} are allowed"
        raise RequestError(message, parameter="bad_words", value=words)
    return found


def _last_place(tokens: list[int], part: list[int]) -> int:
    """Index of the last occurrence, -1 where there is none."""
    first = part[0]
    for place in range(len(tokens) - len(part), -1, -1):
        if tokens[place] == first and tokens[place : place + len(part)] == part:
            return place
    return -1
