"""What the prefix cache knows of contexts: their pages are found there, noted as they fill up, and forgotten.

A context has pages in each page table of a model (``KVLayout``), for the same tokens; it is found where all tables have
the pages that its next token sees. A key ends with the number of its table, which tells the tables' pages apart.
"""

from collections.abc import Iterable, Iterator

from jaxserve.scheduling.kv_window import KVWindow
from jaxserve.scheduling.prefix_cache import PartialHit, PrefixCache, pack_tokens
from jaxserve.scheduling.sequence import Sequence


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
        num_pages = (len(sequence.token_ids) - 1) // self._page_size
        found = [list[int]() for _ in self._windows]
        for table, window in enumerate(self._windows):
            if window is None:
                found[table] = self._find_leading(sequence, self._marks[table], num_pages)
                num_pages = len(found[table])
        runs = list[tuple[KVWindow, list[int]]]()
        for table, window in enumerate(self._windows):
            if window is not None:
                found[table], run = self._find_all(sequence, self._marks[table], num_pages)
                runs.append((window, run))
        while num_pages and any(num_pages - self._first_seen(w, num_pages) > run[num_pages] for w, run in runs):
            num_pages -= 1
        firsts = [self._first_seen(window, num_pages) for window in self._windows]
        return num_pages, [pages[first:num_pages] for first, pages in zip(firsts, found, strict=True)]

    def find_partial(self, sequence: Sequence, num_shared: int) -> list[PartialHit]:
        """Cached pages to copy, one for each table, that begin with the tokens after the shared pages; all or none."""
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
        tables = [*zip(self._marks, sequence.tables, strict=False)]
        for index in range(sequence.num_registered_pages, num_full):
            content = self._content(sequence, index)
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], content))
            for mark, table in tables:
                self._cache.add(table.pages[index], keys[index] + mark, content, keys[index + 1] + mark)
            sequence.num_registered_pages = index + 1
        if not (with_last and num_left):
            return
        content = self._content(sequence, num_full, num_tokens)
        for mark, table in tables:
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

    def _find_leading(self, sequence: Sequence, mark: bytes, most: int) -> list[int]:
        """The cached pages of a table that a context begins with, ``most`` at most."""
        found: list[int] = []
        for key in self._keys(sequence, most):
            page = self._cache.find(key + mark)
            if page is None:
                break
            found.append(page)
        return found

    def _find_all(self, sequence: Sequence, mark: bytes, num_pages: int) -> tuple[list[int], list[int]]:
        """The cached pages of a table among a context's first (-1: not cached), and how many end in a row at each."""
        found, run = list[int](), [0]
        for key in self._keys(sequence, num_pages):
            page = self._cache.find(key + mark)
            found.append(-1 if page is None else page)
            run.append(0 if page is None else run[-1] + 1)
        return found, run

    def _keys(self, sequence: Sequence, num_pages: int) -> Iterator[bytes]:
        """The keys of a context's first full pages, made when they are asked for."""
        keys = sequence.page_keys
        for index in range(num_pages):
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], self._content(sequence, index)))
            yield keys[index + 1]

    def _first_seen(self, window: KVWindow | None, num_pages: int) -> int:
        """Return the first page that the token after ``num_pages`` full pages sees."""
        return 0 if window is None else window.first_page(num_pages * self._page_size)

    def _content(self, sequence: Sequence, index: int, num_tokens: int | None = None) -> bytes:
        """Tokens of a context's page, of the first ``num_tokens`` or of all."""
        start = index * self._page_size
        end = start + self._page_size
        return pack_tokens(sequence.token_ids[start : end if num_tokens is None else min(end, num_tokens)])
