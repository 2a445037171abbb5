"""The position of one completion in a compiled grammar, advanced token by token."""

import concurrent.futures

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask


class GrammarConstraint:
    """A `Constraint`: one text's place in a grammar. Made by `Grammar.constraint`.

    Args:
        matcher: At the start; this object's own.
        end_ids: Tokens that end the text where the grammar lets it.
        num_words: Length of a mask in 32-bit words.
        private_id: An id above the model's that stands for the end, for a model without a token for it.
    """

    __slots__ = ("_end_ids", "_mask", "_matcher", "_num_words", "_private_id")

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], num_words: int, private_id: int | None) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = num_words
        self._private_id = private_id
        self._mask: bytes | None = None

    def mask(self) -> bytes:
        """Tokens allowed next, as bits.

        Raises:
            RuntimeError: The grammar became too complex with this text, or the vocabulary cannot spell what it needs.
        """
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def accept(self, token: int) -> bool:
        """Takes the next token; returns whether the text is complete with it and ends.

        Raises:
            RuntimeError: The token is none that the mask allows.
        """
        self._mask = None
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} does not fit the structured output: {_error(self._matcher)}")
        if token in self._end_ids:
            return True
        return self._private_id is not None and (self._matcher.is_stopped() or not any(self.mask()))

    def _compute(self) -> bytes:
        if self._private_id is None:
            words = np.empty((1, self._num_words), np.int32)
        else:
            words = np.empty((1, self._private_id // 32 + 1), np.int32)
        fill_next_token_bitmask(self._matcher, words)
        if self._matcher.is_error() or not words.any():
            raise RuntimeError(f"the structured output cannot go on: {_error(self._matcher)}")
        if self._private_id is not None:
            words.view(np.uint32)[0, -1] &= ~np.uint32(1 << self._private_id % 32)
        return words[0, : self._num_words].tobytes()


class Grammar:
    """A compiled grammar, shared by all texts that keep to it.

    Args:
        matcher: At the start of a text.
        end_ids: Tokens that end a text.
        vocab_size: Ids are below it.
    """

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def constraint(self) -> GrammarConstraint:
        """A new text's constraint, at its start."""
        private_id = None if self._end_ids else self._vocab_size
        return GrammarConstraint(self._matcher.deep_copy(), self._end_ids, (self._vocab_size + 31) // 32, private_id)


class CompiledLater:
    """A `Constraint`: the start of a grammar that is still being compiled. Used only once the grammar is there.

    Args:
        grammar: What ``GrammarCompiler.submit`` returned.
    """

    __slots__ = ("_constraint", "_grammar")

    def __init__(self, grammar: concurrent.futures.Future[Grammar]) -> None:
        self._grammar = grammar
        self._constraint: GrammarConstraint | None = None

    def mask(self) -> bytes:
        """Return the mask of the compiled grammar; see ``GrammarConstraint.mask``."""
        return self._compiled().mask()

    def accept(self, token: int) -> bool:
        """Accept the next token; see ``GrammarConstraint.accept``."""
        return self._compiled().accept(token)

    def _compiled(self) -> GrammarConstraint:
        if self._constraint is None:
            assert self._grammar.done(), "Engine.enqueue waits for the grammar"
            self._constraint = self._grammar.result().constraint()
        return self._constraint


def _error(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:500] or f"it is complete ({matcher.stop_reason()})"
