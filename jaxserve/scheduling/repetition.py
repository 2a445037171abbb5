"""Find out whether an output repeats itself, at the same cost for each token however long the context is."""

from typing import Final

import numpy as np

from jaxserve.api.structured_params import RepetitionDetectionParams

_ROOM: Final = 256
"""Tokens that are kept beyond those that are compared, so that they rarely have to be moved."""


class RepetitionSearch:
    """Compares each token of an output with those that the longest pattern reaches back to: vLLM's rule.

    For each size of a pattern it keeps the number of latest tokens that equal the token as far before them. The output
    ends in ``min_count`` copies of a pattern once these are all tokens of the copies after the first.

    Args:
        params: Sizes of patterns, and how often one must occur.
    """

    __slots__ = ("_end", "_factor", "_longest", "_needed", "_num_seen", "_recent", "_runs", "_shortest")

    def __init__(self, params: RepetitionDetectionParams):
        self._shortest, self._longest = max(params.min_pattern_size, 1), params.max_pattern_size
        self._factor = max(params.min_count - 1, 1)
        self._needed = self._runs = self._recent = np.zeros(0, np.int64)
        self._end = self._num_seen = 0

    def ends_in_copies(self, token_ids: list[int], num_prompt_tokens: int) -> bool:
        """Take in the output tokens since the last call; return whether the output ends in copies of a pattern.

        Args:
            token_ids: The prompt and the output.
            num_prompt_tokens: Length of the prompt, which is not compared with.
        """
        if self._longest < self._shortest:
            return False
        if not len(self._recent):  # sequences that wait have no tokens, and need no room for them
            sizes = np.arange(self._shortest, self._longest + 1)
            self._needed, self._runs = sizes * self._factor, np.zeros(len(sizes), np.int64)
            self._recent = np.zeros(self._longest + _ROOM, np.int64)
        for index in range(num_prompt_tokens + self._num_seen, len(token_ids)):
            self._add(token_ids[index])
        return bool((self._runs >= self._needed).any())

    def _add(self, token: int) -> None:
        """Compare the next token with those before it."""
        num_reached = min(self._num_seen, self._longest) - self._shortest + 1  # sizes that do not reach into the prompt
        if num_reached > 0:
            last = self._end - self._shortest + 1
            same = self._recent[last - num_reached : last][::-1] == token
            runs = self._runs[:num_reached]
            runs += 1
            runs *= same
        if self._end == len(self._recent):
            self._recent[: self._longest] = self._recent[self._end - self._longest :].copy()
            self._end = self._longest
        self._recent[self._end] = token
        self._end += 1
        self._num_seen += 1
