"""Find out whether an output repeats itself, at a cost for each token that does not grow with the context."""

import collections
from typing import Final

from jaxserve.api.structured_params import RepetitionDetectionParams

_ROOM: Final = 256
"""Different tokens that are remembered beyond those that are compared, so that old ones rarely have to be dropped."""


class RepetitionSearch:
    """Compares each token of an output with those that the longest pattern reaches back to: vLLM's rule.

    For each size of a pattern it keeps the number of latest tokens that equal the token as far before them, where there
    are any. The output ends in ``min_count`` copies of a pattern once these are all tokens of the copies after the
    first.

    Args:
        params: Sizes of patterns, and how often one must occur.
    """

    __slots__ = ("_factor", "_longest", "_num_seen", "_places", "_runs", "_shortest")

    def __init__(self, params: RepetitionDetectionParams):
        self._shortest, self._longest = max(params.min_pattern_size, 1), params.max_pattern_size
        self._factor = max(params.min_count - 1, 1)
        self._runs: dict[int, int] = {}  # by size
        self._places: dict[int, collections.deque[int]] = {}  # of each token in the output
        self._num_seen = 0

    def ends_in_copies(self, token_ids: list[int], num_prompt_tokens: int) -> bool:
        """Take in the output tokens since the last call; return whether the output ends in copies of a pattern.

        Args:
            token_ids: The prompt and the output.
            num_prompt_tokens: Length of the prompt, which is not compared with.
        """
        if self._longest < self._shortest:
            return False
        for index in range(num_prompt_tokens + self._num_seen, len(token_ids)):
            self._add(token_ids[index])
        return any(run >= size * self._factor for size, run in self._runs.items())

    def _add(self, token: int) -> None:
        """Compare the next token with those before it."""
        index, runs = self._num_seen, self._runs
        places = self._places.get(token)
        if places is None:
            places = self._places[token] = collections.deque()
            if len(self._places) > self._longest + _ROOM:
                self._forget(index - self._longest)
        while places and places[0] < index - self._longest:
            places.popleft()
        sizes = (index - place for place in places)
        self._runs = {size: runs.get(size, 0) + 1 for size in sizes if size >= self._shortest}
        places.append(index)
        self._num_seen += 1

    def _forget(self, first: int) -> None:
        """Drop tokens that are not among those from ``first`` on; the latest has no place yet."""
        self._places = {token: found for token, found in self._places.items() if not found or found[-1] >= first}
