"""Propose drafts from a sequence's tokens and past outputs (suffix decoding): ``suffix`` of ``speculative_config``.

The method is that of arXiv:2411.04975: the longest earlier occurrence of the last tokens is followed for about as many
tokens as it matched, as long as its continuations agree often enough.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from jaxserve.scheduling.proposers.token_index import TokenIndex
from jaxserve.scheduling.sequence import Sequence

MAX_PAST_SLOTS = 1 << 21
"""Most tokens of past outputs: 64 MiB."""
MAX_OWN_SLOTS = 1 << 17
"""Most tokens of a running sequence that are searched, its latest ones: 4 MiB."""
_FIRST_SLOTS = 256


class SuffixProposer:
    """Proposes what followed the longest earlier occurrence of a sequence's last tokens.

    Occurrences are those in its own prompt and output, and in the outputs of finished sequences with the same
    ``cache_root``. If continuations differ, the most frequent one counts, and its share is its probability.

    Args:
        config: The checked ``speculative_config``.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._depth: int = config["suffix_decoding_max_tree_depth"]
        self._least: float = config["suffix_decoding_min_token_prob"]
        factor, most = config["suffix_decoding_max_spec_factor"], config["num_speculative_tokens"]
        lengths = [min(most, int(factor * match), self._depth - match) for match in range(self._depth + 1)]
        self._lengths = list(itertools.accumulate(lengths, max))  # drafts after a match of each length: never fewer
        self._partitions = _Partitions()
        self._past = PastOutputs(config["suffix_decoding_max_cached_requests"], self._partitions)
        self._texts: dict[Sequence, _Text] = {}

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``: return at most ``num_speculative_tokens`` beyond those that steps in flight sample."""
        return [self._continuation(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``; the output is kept for later sequences."""
        text = self._texts.get(sequence)
        if text is not None:
            first = max(sequence.num_prompt_tokens - self._depth, 0)
            self._past.add(sequence.cache_root, text.values(sequence.token_ids[first:]))
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""
        if self._texts.pop(sequence, None) is not None:
            self._partitions.leave(sequence.cache_root)

    def _continuation(self, sequence: Sequence) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(self._partitions.enter(sequence.cache_root))
        text.extend(sequence.token_ids)
        context = text.values(sequence.token_ids[-self._depth :])
        num_in_flight, best, best_score = sequence.num_pending - 1, list[int](), 0.0
        for index in (text.index, self._past.index):
            places, match = index.places(context)
            count = self._lengths[match]
            if count:
                options = [index.following(place, num_in_flight + count) for place in places]
                found, score = _follow(options, num_in_flight, self._least)
                if score > best_score:
                    best, best_score = found, score
        return text.token_ids(best)


class PastOutputs:
    """The outputs of finished sequences, each after the last tokens of its prompt; the oldest leave first.

    Args:
        max_texts: Most outputs.
        partitions: Keeps the partition of each.
        num_slots: Most tokens, with one between any two outputs; a power of two.
    """

    def __init__(self, max_texts: int, partitions: "_Partitions", num_slots: int = MAX_PAST_SLOTS):
        self.index = TokenIndex(num_slots if max_texts else _FIRST_SLOTS)
        self._max_texts, self._partitions = max_texts, partitions
        self._texts: deque[_PastText] = deque()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, root: bytes, values: list[int]) -> None:
        """Add a text, of which the last tokens count if it is longer than the ring; drop older ones that it displaces.

        Args:
            root: Its partition.
            values: Its tokens, as values of the partition.
        """
        index = self.index
        values = values[-(index.num_slots - 2) :]
        if not self._max_texts or not values:
            return
        while len(self._texts) >= self._max_texts:
            self._drop_oldest()
        start = index.end + 1
        if start + len(values) > index.num_slots:
            while self._texts and self._texts[0].start > index.end:
                self._drop_oldest()
            start = 1
        while self._texts and start - 1 <= self._texts[0].start <= start + len(values):
            self._drop_oldest()
        index.write(start, values)
        self._texts.append(_PastText(start, index.end, root))
        self._partitions.enter(root)

    def _drop_oldest(self) -> None:
        start, end, root = self._texts.popleft()
        self.index.erase(start, end)
        self._partitions.leave(root)


class _PastText(NamedTuple):
    """Where a past output is, and the cache root of its partition."""

    start: int
    end: int
    root: bytes


class _Partitions:
    """Numbers of the cache roots in use. Tokens of different roots are different values, so that they never match."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._num_users: dict[bytes, int] = {}
        self._next = itertools.count()

    def enter(self, root: bytes) -> int:
        """Add a user of a root; return its number, which is not used again after all users have left."""
        if root not in self._numbers:
            self._numbers[root], self._num_users[root] = next(self._next), 0
        self._num_users[root] += 1
        return self._numbers[root]

    def leave(self, root: bytes) -> None:
        """Remove a user of a root."""
        self._num_users[root] -= 1
        if not self._num_users[root]:
            del self._numbers[root], self._num_users[root]


class _Text:
    """The indexed tokens of a running sequence.

    Attributes:
        index: The index, which grows with the text up to ``MAX_OWN_SLOTS``.

    Args:
        partition: Number of the sequence's partition.
    """

    def __init__(self, partition: int):
        self.index = TokenIndex(_FIRST_SLOTS)
        self._offset = (partition << 32) + 1  # a value is never 0, which ends a text
        self._num_tokens = 0

    def values(self, token_ids: list[int]) -> list[int]:
        """Return the values of tokens in this partition."""
        offset = self._offset
        return [token + offset for token in token_ids]

    def token_ids(self, values: list[int]) -> list[int]:
        """Return the tokens of values."""
        offset = self._offset
        return [value - offset for value in values]

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens after those that are known."""
        start, self._num_tokens = self._num_tokens, len(token_ids)
        if self.index.end + len(token_ids) - start < self.index.num_slots:
            if start < len(token_ids):
                self.index.write(self.index.end, self.values(token_ids[start:]))
            return
        kept = token_ids[-MAX_OWN_SLOTS // 2 :]
        self.index = TokenIndex(min(2 << len(kept).bit_length(), MAX_OWN_SLOTS))
        self.index.write(0, self.values(kept))


def _follow(options: list[list[int]], num_known: int, least: float) -> tuple[list[int], float]:
    """Return the most frequent continuation, and its expected number of right tokens.

    It ends where its share of all options falls below ``least``. The first ``num_known`` tokens do not count.
    """
    total, share, found, score = len(options), 1.0, list[int](), 0.0
    are_same = options.count(options[0]) == total
    while not are_same:
        column = [option[len(found)] for option in options]
        token = max(column, key=column.count)
        if column.count(token) < len(options):
            options = [option for option, here in zip(options, column, strict=True) if here == token]
            share, are_same = len(options) / total, options.count(options[0]) == len(options)
        if not token or share < least:
            return found, score
        score += share if len(found) >= num_known else 0.0
        found.append(token)
    rest = options[0][len(found) :]
    rest = rest[: rest.index(0)] if 0 in rest else rest
    return found + rest, score + share * max(len(rest) - max(num_known - len(found), 0), 0)
