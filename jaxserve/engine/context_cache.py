"""What the prefix cache knows of contexts: their pages are found there, noted as they fill up, and forgotten.

A context has pages in each page table of a model (``KVLayout``), for the same tokens; it is found where all tables have
the pages that its next token sees. The cache keeps the tables apart by what stands behind its keys.
"""

from collections.abc import Iterable

from jaxserve.engine.kv_window import KVWindow
from jaxserve.engine.prefix_cache import PartialHit, PrefixCache, pack_tokens
from jaxserve.engine.sequence import Sequence


class ContextCache:
    """The scheduler's part that looks contexts up in a prefix cache, and notes them there.

    Args:
        cache: Of the pages of all page tables.
        windows: For each page table, what its layers see; None for all.
    """

    def __init__(self, cache: PrefixCache, windows: Iterable[KVWindow | None]):
        self._cache = cache
        self._page_size = cache.page_size
        self._windows = tuple(windows)
        self._marks = [bytes([table] if table else []) for table in range(len(self._windows))]

    def begin(self, sequence: Sequence) -> None:
        """Set the key that all others of a sequence's context come after, unless it has it already."""
        root = self._cache.root_key(sequence.cache_root)
        if sequence.page_keys[:1] != [root]:
            sequence.page_keys = [root]

    def find_shared(self, sequence: Sequence) -> tuple[int, list[list[int]]]:
        """The number of cached pages that a sequence's context begins with, and those that its next token sees.

        They are in all tables, and leave at least one token to compute.
        """
        keys, num_shared = sequence.page_keys, 0
        found = [list[int]() for _ in self._windows]
        num_in_row = [0] * len(found)
        for index in range((len(sequence.token_ids) - 1) // self._page_size):
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], self._content(sequence, index)))
            for table, mark in enumerate(self._marks):
                page = self._cache.find(keys[index + 1] + mark)
                found[table].append(-1 if page is None else page)
                num_in_row[table] = 0 if page is None else num_in_row[table] + 1
            if any(window is None and not count for window, count in zip(self._windows, num_in_row, strict=True)):
                break
            seen = self._first_seen(index + 1)
            if all(index + 1 - first <= count for first, count in zip(seen, num_in_row, strict=True)):
                num_shared = index + 1
        seen = self._first_seen(num_shared)
        return num_shared, [pages[first:num_shared] for first, pages in zip(seen, found, strict=True)]

    def find_partial(self, sequence: Sequence, num_shared: int) -> list[PartialHit]:
        """A page of each table to copy behind the shared ones; none where one has none."""
        content = self._content(sequence, num_shared, len(sequence.token_ids) - 1)
        hits = [self._cache.find_partial(sequence.page_keys[num_shared] + mark, content) for mark in self._marks]
        found = [hit for hit in hits if hit is not None]
        return found if len(found) == len(hits) else []

    def register(self, sequence: Sequence, num_tokens: int, with_last: bool = False) -> None:
        """Notes the pages that the first ``num_tokens`` tokens fill, and with ``with_last`` the one they do not fill.

        The tokens are known, and written by steps planned or being planned.
        """
        keys = sequence.page_keys
        num_full, num_left = divmod(num_tokens, self._page_size)
        for index in range(sequence.num_registered_pages, num_full):
            content = self._content(sequence, index)
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], content))
            for mark, table in zip(self._marks, sequence.tables, strict=True):
                self._cache.add(table.pages[index], keys[index] + mark, content, keys[index + 1] + mark)
            sequence.num_registered_pages = index + 1
        if not (with_last and num_left):
            return
        content = self._content(sequence, num_full, num_tokens)
        for mark, table in zip(self._marks, sequence.tables, strict=True):
            if num_full >= table.num_released:
                self._cache.add(table.pages[num_full], keys[num_full] + mark, content)

    def page_end(self, sequence: Sequence) -> int:
        """Return the length at which the next page of a sequence is full."""
        return (sequence.num_registered_pages + 1) * self._page_size

    def forget(self, sequence: Sequence, start: int = 0) -> None:
        """Take out of the cache what a sequence computed from position ``start`` on, after the pages found at first."""
        first = max(sequence.num_cached_tokens, start) // self._page_size
        for index in range(first, len(sequence.page_keys)):
            content = self._content(sequence, index)
            for mark in self._marks:
                self._cache.forget_context(sequence.page_keys[index] + mark, content)

    def _first_seen(self, num_pages: int) -> list[int]:
        """The first page in each table that is seen by the token behind ``num_pages`` full pages."""
        position = num_pages * self._page_size
        return [0 if window is None else window.first_page(position) for window in self._windows]

    def _content(self, sequence: Sequence, index: int, num_tokens: int | None = None) -> bytes:
        """Tokens of a context's page, of the first ``num_tokens`` or of all."""
        start = index * self._page_size
        end = start + self._page_size
        return pack_tokens(sequence.token_ids[start : end if num_tokens is None else min(end, num_tokens)])
