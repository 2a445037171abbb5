"""Propose drafts from a sequence's own tokens (prompt lookup): the method ``ngram`` of ``speculative_config``."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from jaxserve.scheduling.sequence import Sequence


class NgramProposer:
    """Proposes the tokens that followed the sequence's last n tokens where these first occurred.

    The longest n that occurred counts, between ``prompt_lookup_min`` and ``prompt_lookup_max``, as in vLLM. Each
    sequence has an index of its n-grams, which every call extends by the new tokens.

    Args:
        config: The checked ``speculative_config``. ``prompt_lookup_min`` and ``prompt_lookup_max`` default to each
            other, or both to 5.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._num_tokens: int = config["num_speculative_tokens"]
        shortest: int = config.get("prompt_lookup_min", config.get("prompt_lookup_max", 5))
        self._sizes = range(config.get("prompt_lookup_max", shortest), shortest - 1, -1)
        self._indexes: dict[Sequence, _Index] = {}

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``: return at most ``num_speculative_tokens`` beyond those that steps in flight sample."""
        return [self._continuation(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""
        self._indexes.pop(sequence, None)

    def _continuation(self, sequence: Sequence) -> list[int]:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index()
        tokens = sequence.token_ids
        index.extend(tokens, self._sizes)
        for size in self._sizes:
            end = index.ends.get(tuple(tokens[-size:]))
            if end is not None:
                return tokens[end : end + self._num_tokens + sequence.num_pending - 1]
        return []


class _Index:
    """Where the n-grams of one sequence first end.

    Attributes:
        ends: Number of tokens up to the end of each n-gram's first occurrence, without n-grams that end the sequence.
    """

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self._num_tokens = 0

    def extend(self, tokens: list[int], sizes: range) -> None:
        """Add the n-grams of all ``sizes`` that new tokens made, except those that end with the last token."""
        for end in range(self._num_tokens, len(tokens)):
            for size in sizes:
                if size <= end:
                    self.ends.setdefault(tuple(tokens[end - size : end]), end)
        self._num_tokens = len(tokens)
