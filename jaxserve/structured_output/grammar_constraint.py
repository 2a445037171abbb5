"""Constraints of compiled grammars."""

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par_with_draft_tokens

from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.scheduling.sequence import in_mask
from jaxserve.structured_output.grammar_check import error_text
from jaxserve.structured_output.grammar_source import grammar_error

_OVER_LIMIT = "too many"
"""Part of llguidance's errors about exceeded limits: too many items, expressions or lexer states."""
_MAX_THREADS = 8


class GrammarConstraint:
    """A `Constraint` that tracks one completion's state in a grammar; created by `Grammar.constraint`.

    Args:
        grammar: The grammar.
        matcher: Matcher in its initial state, not shared.
        end_ids: End-of-sequence tokens.
        num_words: Length of a mask in 32-bit words.
        virtual_eos_id: End-of-sequence id outside the vocabulary, for a model without such a token.
    """

    __slots__ = ("_end_ids", "_grammar", "_mask", "_matcher", "_num_words", "_tokens", "_virtual_eos_id")

    def __init__(
        self,
        grammar: "Grammar",
        matcher: LLMatcher,
        end_ids: frozenset[int],
        num_words: int,
        virtual_eos_id: int | None,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = num_words
        self._virtual_eos_id = virtual_eos_id
        self._mask: bytes | None = None
        self._tokens: list[int] = []

    def mask(self) -> bytes:
        """Return the bit mask of the tokens allowed next.

        Raises:
            RequestError: The grammar is too complex for this completion.
            RuntimeError: The vocabulary cannot spell what the grammar requires next.
        """
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def allows(self, token: int) -> bool:
        """See ``Constraint``: without making a mask, which takes longer."""
        if self._mask is None and self._virtual_eos_id is None:
            return bool(self._matcher.validate_tokens([token]))
        return in_mask(self.mask(), token)

    def accept(self, token: int) -> bool:
        """Advance by the next token; return whether it completes the output.

        Raises:
            RequestError: The grammar is too complex for this completion.
            RuntimeError: The mask does not allow the token.
        """
        is_end = token in self._end_ids
        if is_end and self._matcher.is_accepting():
            return True  # not consumed: a rollback counts some ends of sequences as a token, and others not
        self._mask = None
        if not self._matcher.consume_token(token):
            raise self._failure(f"token {token} is not allowed by the structured output")
        self._tokens.append(token)
        if is_end:
            return True
        return self._virtual_eos_id is not None and (self._matcher.is_stopped() or not any(self.mask()))

    def forced(self) -> list[int]:
        """See ``Constraint``: how the tokenizer spells the text that has to come next."""
        return [token for token in self._matcher.compute_ff_tokens() if token != self._virtual_eos_id]

    def save(self) -> tuple[int, bytes | None]:
        """See ``Constraint``."""
        return len(self._tokens), self._mask

    def restore(self, state: tuple[int, bytes | None]) -> None:
        """See ``Constraint``; a matcher that has failed is made anew.

        Raises:
            RuntimeError: The new one fails too.
        """
        num_tokens, self._mask = state
        num_taken_back = len(self._tokens) - num_tokens
        del self._tokens[num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_taken_back):
            self._matcher = self._grammar.matcher()
            if not self._matcher.consume_tokens(self._tokens):
                raise self._failure("the structured output cannot return to an earlier token")

    @staticmethod
    def masks_after(rows: "Sequence[tuple[GrammarConstraint, list[int]]]") -> list[list[bytes] | None]:
        """See ``BatchedConstraint``: on several threads, and with one call for all rows."""
        if rows[0][0]._virtual_eos_id is not None:
            return [None] * len(rows)  # ``accept`` looks at each mask anyway
        ends = list(itertools.accumulate(1 + len(tokens) for _, tokens in rows))
        words = np.zeros((ends[-1], rows[0][0]._num_words), np.int32)
        calls = [(each._matcher, end - len(tokens) - 1, tokens) for end, (each, tokens) in zip(ends, rows, strict=True)]
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), calls, words)
        found = list[list[bytes] | None]()
        for end, (constraint, tokens) in zip(ends, rows, strict=True):
            own = words[end - len(tokens) : end]
            is_made = not constraint._matcher.is_error() and bool(own.any(axis=1).all())
            found.append([mask.tobytes() for mask in own] if is_made else None)
        return found

    def _compute(self) -> bytes:
        if self._virtual_eos_id is None:
            words = np.empty((1, self._num_words), np.int32)
        else:
            words = np.empty((1, self._virtual_eos_id // 32 + 1), np.int32)
        fill_next_token_bitmask(self._matcher, words)
        if self._matcher.is_error() or not words.any():
            raise self._failure("the structured output cannot continue")
        if self._virtual_eos_id is not None:
            words.view(np.uint32)[0, -1] &= ~np.uint32(1 << self._virtual_eos_id % 32)
        return words[0, : self._num_words].tobytes()

    def _failure(self, what: str) -> Exception:
        """Return why the matcher cannot continue: the client's error if the grammar exceeds llguidance's limits."""
        why = _error(self._matcher)
        if _OVER_LIMIT not in why.lower():
            return RuntimeError(f"{what}: {why}")
        self._grammar.is_exhausted = True
        return grammar_error(f"is too complex: {why}", self._grammar.params)


class Grammar:
    """A compiled grammar, shared by all completions that use it.

    Args:
        params: Parameters that it was compiled from.
        matcher: Matcher in its initial state.
        end_ids: End-of-sequence tokens.
        vocab_size: Vocabulary size.

    Attributes:
        params: Parameters that it was compiled from.
        is_exhausted: Whether a completion has exceeded llguidance's limits. Copies of a matcher share their lexer and
            its limits, so no completion can continue, and the grammar must be compiled again for new ones.
    """

    def __init__(
        self, params: StructuredOutputsParams, matcher: LLMatcher, end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.params = params
        self.is_exhausted = False
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def constraint(self) -> GrammarConstraint:
        """Create the constraint of a new completion."""
        virtual_eos_id = None if self._end_ids else self._vocab_size
        num_words = (self._vocab_size + 31) // 32
        return GrammarConstraint(self, self.matcher(), self._end_ids, num_words, virtual_eos_id)

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start of a completion."""
        return self._matcher.deep_copy()


class DeferredConstraint:
    """A `Constraint` whose grammar may still be compiling; used only once it is compiled.

    Args:
        grammar: Future from ``GrammarCompiler.submit``.
    """

    __slots__ = ("_constraint", "_grammar")

    def __init__(self, grammar: concurrent.futures.Future[Grammar]) -> None:
        self._grammar = grammar
        self._constraint: GrammarConstraint | None = None

    def mask(self) -> bytes:
        """Return the mask of the compiled grammar; see ``GrammarConstraint.mask``."""
        return self._compiled().mask()

    def allows(self, token: int) -> bool:
        """See ``GrammarConstraint.allows``."""
        return self._compiled().allows(token)

    def accept(self, token: int) -> bool:
        """Accept the next token; see ``GrammarConstraint.accept``."""
        return self._compiled().accept(token)

    def forced(self) -> list[int]:
        """See ``GrammarConstraint.forced``."""
        return self._compiled().forced()

    def save(self) -> tuple[int, bytes | None]:
        """See ``GrammarConstraint.save``."""
        return self._compiled().save()

    def restore(self, state: tuple[int, bytes | None]) -> None:
        """See ``GrammarConstraint.restore``."""
        self._compiled().restore(state)

    @classmethod
    def masks_after(cls, rows: "Sequence[tuple[DeferredConstraint, list[int]]]") -> list[list[bytes] | None]:
        """See ``GrammarConstraint.masks_after``."""
        return GrammarConstraint.masks_after([(each._compiled(), tokens) for each, tokens in rows])

    def _compiled(self) -> GrammarConstraint:
        if self._constraint is None:
            assert self._grammar.done(), "a request is enqueued once its grammar is compiled"
            self._constraint = self._grammar.result().constraint()
        return self._constraint


@functools.cache
def _executor() -> LLExecutor:
    """Return the threads that make masks."""
    return LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def _error(matcher: LLMatcher) -> str:
    return error_text(matcher)[:500] or f"it is complete ({matcher.stop_reason()})"
