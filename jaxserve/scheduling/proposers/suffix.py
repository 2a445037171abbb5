"""Propose drafts from a sequence's tokens and past outputs (suffix decoding): ``suffix`` of ``speculative_config``.

The method is that of arXiv:2411.04975: the longest earlier occurrence of the last tokens is followed for about as many
tokens as it matched, as long as its continuations agree often enough.
"""

import ctypes
import itertools
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from jaxserve.scheduling.proposers.suffix_search import NativeSearch, PlainSearch, Row, Rules
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
    ``cache_root``. If continuations differ, the most frequent one counts, and its share is its probability. A text that
    repeats a past output keeps to it as long as both agree, however many others look alike there.

    Args:
        config: The checked ``speculative_config``.
        library: The native library (``token_index.find_library``), which searches faster; None: Python does.
    """

    def __init__(self, config: Mapping[str, Any], library: ctypes.CDLL | None = None):
        depth: int = config["suffix_decoding_max_tree_depth"]
        factor, most = config["suffix_decoding_max_spec_factor"], config["num_speculative_tokens"]
        lengths = [min(most, int(factor * match), depth - match) for match in range(depth + 1)]
        lengths = list(itertools.accumulate(lengths, max))  # never fewer drafts after a longer match
        rules = Rules(depth, config["suffix_decoding_min_token_prob"], lengths)
        self._depth, self._library, self._partitions = depth, library, _Partitions()
        self._past = PastOutputs(
            config["suffix_decoding_max_cached_requests"], self._partitions, library, MAX_PAST_SLOTS
        )
        past = self._past.index
        self._search = PlainSearch(rules, past) if library is None else NativeSearch(rules, past, library)
        self._texts: dict[Sequence, _Text] = {}

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``: return at most ``num_speculative_tokens`` beyond those that steps in flight sample."""
        rows, texts = list[Row](), self._texts
        for sequence in sequences:
            text = texts.get(sequence)
            if text is None:
                partition = self._partitions.enter(sequence.cache_root)
                text = texts[sequence] = _Text(_offset(partition), self._library)
            new = text.take(sequence.token_ids)
            rows.append(Row(text.index, text.offset, new, sequence.num_pending - 1))
        return self._search.continuations(rows)

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``; the output is kept for later sequences."""
        text = self._texts.get(sequence)
        if text is not None:
            first = max(sequence.num_prompt_tokens - self._depth, 0)
            self._past.add(sequence.cache_root, sequence.token_ids[first:])
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``."""
        if self._texts.pop(sequence, None) is not None:
            self._partitions.leave(sequence.cache_root)


class PastOutputs:
    """The outputs of finished sequences, each after the last tokens of its prompt; the oldest leave first.

    Args:
        max_texts: Most outputs.
        partitions: Keeps the partition of each.
        library: The native library, or None.
        num_slots: Most tokens, with one between any two outputs; a power of two.
    """

    def __init__(
        self,
        max_texts: int,
        partitions: "_Partitions",
        library: ctypes.CDLL | None,
        num_slots: int,
    ):
        self.index = TokenIndex(num_slots if max_texts else _FIRST_SLOTS, library)
        self._max_texts, self._partitions = max_texts, partitions
        self._texts: deque[_PastText] = deque()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, root: bytes, tokens: list[int]) -> None:
        """Add a text, of which the last tokens count if it is longer than the ring; drop older ones that it displaces.

        Args:
            root: Its partition.
            tokens: Its tokens.
        """
        index = self.index
        tokens = tokens[-(index.num_slots - 2) :]
        if not self._max_texts or not tokens:
            return
        while len(self._texts) >= self._max_texts:
            self._drop_oldest()
        start = index.end + 1
        if start + len(tokens) >= index.num_slots:
            while self._texts and self._texts[0].start > index.end:
                self._drop_oldest()
            start = 1
        while self._texts and start - 1 <= self._texts[0].start <= start + len(tokens):
            self._drop_oldest()
        index.write(start, tokens, _offset(self._partitions.enter(root)))
        self._texts.append(_PastText(start, index.end, root))

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
        offset: What its tokens are raised by in all indexes.

    Args:
        offset: The same.
        library: The native library, or None.
    """

    def __init__(self, offset: int, library: ctypes.CDLL | None):
        self.index, self.offset = TokenIndex(_FIRST_SLOTS, library), offset
        self._library, self._num_tokens, self._num_free = library, 0, _FIRST_SLOTS

    def take(self, token_ids: list[int]) -> list[int]:
        """Return the tokens after those that are known, which are to be written; the index has room for them."""
        new = token_ids[self._num_tokens :]
        self._num_tokens += len(new)
        self._num_free -= len(new)
        if self._num_free > 0:
            return new
        kept = token_ids[-MAX_OWN_SLOTS // 2 :]
        num_slots = min(2 << len(kept).bit_length(), MAX_OWN_SLOTS)
        self.index, self._num_free = TokenIndex(num_slots, self._library), num_slots - len(kept)
        return kept


def _offset(partition: int) -> int:
    """Return what the tokens of a partition are raised by: no sum is 0, which ends a text."""
    return (partition << 32) + 1
