"""Constraints on the next token in plain Python; see `Constraint`."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.scheduling.sequence import Constraint, in_mask
from jaxserve.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
"""Most token sequences that `bad_words` may expand to; vLLM's default."""


OwnConstraint = TypeVar("OwnConstraint", bound=Constraint)


@cache
def _all_allowed(vocab_size: int) -> np.ndarray:
    """Return a mask that allows every id, as bytes; callers must not modify it."""
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
    """Bans the last token of a word when the output ends with the tokens before it.

    Args:
        token_sequences: Words of at least two tokens; words of one token need no constraint.
        vocab_size: Vocabulary size.
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
        """Return the mask of the tokens allowed next; None if all are."""
        recent = self._recent
        words = self._words.get(recent[-1]) if recent else None
        if words is None:
            return None
        banned = [token for before, token in words if recent[-len(before) :] == before]
        return _without(banned, self._vocab_size) if banned else None

    def allows(self, token: int) -> bool:
        """See ``Constraint``."""
        return in_mask(self.mask(), token)

    def accept(self, token: int) -> bool:
        """Advance by the next token; never completes the output."""
        self._recent.append(token)
        if len(self._recent) > 2 * self._max_recent:
            del self._recent[: -self._max_recent]
        return False

    def forced(self) -> list[int]:
        """See ``Constraint``: nothing is forced."""
        return []

    def save(self) -> list[int]:
        """See ``Constraint``."""
        return self._recent.copy()

    def restore(self, state: list[int]) -> None:
        """See ``Constraint``."""
        self._recent = state


class ThinkingBudget:
    """Forces the end of a thinking section that has used up its budget: vLLM's ``thinking_token_budget``.

    A section starts after the last start marker in the text of prompt and output that no end marker follows. Markers
    are found in the text because their last characters may share a token with what follows. If the section already
    ends with a prefix of the end's tokens, only the rest is forced. Each section has the full budget.

    Args:
        markers: What starts and ends a section, such as ``<think>`` and ``</think>``.
        end_ids: Tokens that spell the second.
        budget: Most tokens of a section, including those in the prompt.
        prompt_token_ids: The prompt.
        vocab_size: Vocabulary size.
        text_of: Returns the text of a token.
    """

    def __init__(
        self,
        markers: tuple[str, str],
        end_ids: Sequence[int],
        budget: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        text_of: Callable[[int], str],
    ) -> None:
        assert all(markers) and end_ids and budget >= 0, (markers, end_ids, budget)
        self._end = list(end_ids)
        self._budget = budget
        self._vocab_size = vocab_size
        self._text_of = text_of
        self._markers = markers
        self._recent = list(prompt_token_ids[-len(self._end) :])
        self._text = ""
        self._num_thinking: int | None = None
        pieces = [text_of(token) for token in prompt_token_ids]
        start, _ = self._find("".join(pieces))
        if start >= 0:
            begins = itertools.accumulate(map(len, pieces[:-1]), initial=0)
            self._num_thinking = sum(begin >= start for begin in begins)

    def mask(self) -> bytes | None:
        """Return a mask with a single token if the end is forced, else None."""
        forced = self.forced()
        return _only(forced[0], self._vocab_size) if forced else None

    def allows(self, token: int) -> bool:
        """See ``Constraint``."""
        return in_mask(self.mask(), token)

    def accept(self, token: int) -> bool:
        """Advance by the next token; never completes the output."""
        self._recent.append(token)
        del self._recent[: -len(self._end)]
        start, end = self._find(self._text_of(token))
        if start >= 0:
            self._num_thinking = 0
        elif end >= 0:
            self._num_thinking = None
        elif self._num_thinking is not None:
            self._num_thinking += 1
        return False

    def forced(self) -> list[int]:
        """See ``Constraint``: the rest of the end's tokens once the budget is used up."""
        if self._num_thinking is None or self._num_thinking < self._budget:
            return []
        recent, end = self._recent, self._end
        lengths = range(min(len(end) - 1, len(recent)), 0, -1)
        return end[next((length for length in lengths if recent[-length:] == end[:length]), 0) :]

    def save(self) -> tuple[list[int], str, int | None]:
        """See ``Constraint``."""
        return self._recent.copy(), self._text, self._num_thinking

    def restore(self, state: tuple[list[int], str, int | None]) -> None:
        """See ``Constraint``."""
        self._recent, self._text, self._num_thinking = state

    def _find(self, text: str) -> tuple[int, int]:
        """Append text; return where its last marker ends if that starts a section, and if it ends one; otherwise -1."""
        num_old = len(self._text)
        text = self._text + text
        self._text = text[max(0, len(text) - max(map(len, self._markers)) + 1) :]
        start, end = (text.rfind(marker) + len(marker) if marker in text else -1 for marker in self._markers)
        start, end = (at - num_old if at > num_old else -1 for at in (start, end))
        return (start, -1) if start > end else (-1, end)


class AllOf:
    """Combines constraints. If no token satisfies all of them, only the first one with a mask applies.

    Args:
        constraints: At least one constraint, in order of precedence.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        assert constraints
        self._constraints = tuple(constraints)

    def mask(self) -> bytes | None:
        """Return the mask of the tokens that every constraint allows; None if all are."""
        masks = [mask for constraint in self._constraints if (mask := constraint.mask()) is not None]
        if len(masks) < 2:
            return masks[0] if masks else None
        words = np.frombuffer(masks[0], np.uint32)
        for mask in masks[1:]:
            words = words & np.frombuffer(mask, np.uint32)
        return words.tobytes() if words.any() else masks[0]

    def allows(self, token: int) -> bool:
        """See ``Constraint``."""
        return in_mask(self.mask(), token)

    def accept(self, token: int) -> bool:
        """Advance by the next token; return whether it completes the output for any constraint."""
        complete = [constraint.accept(token) for constraint in self._constraints]
        return any(complete)

    def forced(self) -> list[int]:
        """See ``Constraint``: what the first constraint forces that forces anything."""
        return next((forced for constraint in self._constraints if (forced := constraint.forced())), [])

    def save(self) -> list[Any]:
        """See ``Constraint``."""
        return [constraint.save() for constraint in self._constraints]

    def restore(self, state: list[Any]) -> None:
        """See ``Constraint``."""
        for constraint, own in zip(self._constraints, state, strict=True):
            constraint.restore(own)


def separate(constraint: OwnConstraint) -> OwnConstraint:
    """Return a constraint in the same state that moves on by itself; words, markers and what they need are shared."""
    made = copy.copy(constraint)
    made.restore(constraint.save())
    return made


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token sequences of bad words: each word alone and, as in vLLM, after a space.

    The second form is used only if it has as many tokens as the first and another first token.

    Raises:
        RequestError: A word has no token, or there are more than `MAX_BAD_WORDS` sequences.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        if not plain:
            raise RequestError(
                f"bad_words must have at least one token each; {word!r} has none", parameter="bad_words", value=words
            )
        found.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    if len(found) > MAX_BAD_WORDS:
        message = f"bad_words expand to {len(found)} token sequences; at most {MAX_BAD_WORDS} are allowed"
        raise RequestError(message, parameter="bad_words", value=words)
    return found
