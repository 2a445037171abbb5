"""Look up the pages of sequences in the prefix cache, and register them there, for all page tables of a model."""

from collections.abc import Iterable, Iterator

from jaxserve.scheduling.page_allocator import KVWindow
from jaxserve.scheduling.prefix_cache import KEY_BYTES, PageRecord, PartialHit, PrefixCache, pack_tokens
from jaxserve.scheduling.sequence import Sequence


def table_tag(table: int) -> bytes:
    """Return what follows a page's keys in the cache to distinguish the page tables."""
    return bytes([table] if table else [])


def table_of(record: PageRecord) -> int:
    """Return the page table of a cached page."""
    tag = record.parent[KEY_BYTES:]
    return tag[0] if tag else 0


class ContextCache:
    """Looks up sequences in the prefix cache and registers their pages there.

    Args:
        cache: Prefix cache shared by all page tables.
        windows: Sliding window of each page table; None for full attention.
    """

    def __init__(self, cache: PrefixCache, windows: Iterable[KVWindow | None]):
        self._cache = cache
        self._page_size = cache.page_size
        self._windows = tuple(windows)
        self._is_plain = self._windows == (None,)
        self._tags = [table_tag(table) for table in range(len(self._windows))]

    def begin(self, sequence: Sequence) -> None:
        """Set the root key that a sequence's page keys start from; keep its keys if the root is unchanged."""
        root = self._cache.root_key(sequence.cache_root)
        if sequence.page_keys[:1] != [root]:
            sequence.page_keys = [root]

    def find_shared(self, sequence: Sequence) -> tuple[int, list[list[int]]]:
        """Return the number of leading pages cached in all tables, and for each table those its next token sees.

        At least one token is left to compute.
        """
        num_pages = (len(sequence.token_ids) - 1) // self._page_size
        if self._is_plain:
            leading = self._find_leading(sequence, self._tags[0], num_pages)
            return len(leading), [leading]
        return self._find_in_tables(sequence, num_pages)

    def _find_in_tables(self, sequence: Sequence, num_pages: int) -> tuple[int, list[list[int]]]:
        """Return what ``find_shared`` does, for several page tables or a window."""
        found = [list[int]() for _ in self._windows]
        for table, window in enumerate(self._windows):
            if window is None:
                found[table] = self._find_leading(sequence, self._tags[table], num_pages)
                num_pages = len(found[table])
        runs = list[tuple[KVWindow, list[int]]]()
        for table, window in enumerate(self._windows):
            if window is not None:
                found[table], run = self._find_all(sequence, self._tags[table], num_pages)
                runs.append((window, run))
        while num_pages and any(num_pages - self._first_seen(w, num_pages) > run[num_pages] for w, run in runs):
            num_pages -= 1
        firsts = [self._first_seen(window, num_pages) for window in self._windows]
        return num_pages, [pages[first:num_pages] for first, pages in zip(firsts, found, strict=True)]

    def find_partial(self, sequence: Sequence, num_shared: int) -> list[PartialHit]:
        """Return one cached page to copy per table that starts with the tokens after the shared pages.

        Empty unless every table has one.
        """
        if len(sequence.token_ids) - 1 - num_shared * self._page_size < self._cache.min_shared_tokens:
            return []
        content = self._content(sequence, num_shared, len(sequence.token_ids) - 1)
        hits = [self._cache.find_partial(sequence.page_keys[num_shared] + tag, content) for tag in self._tags]
        found = [hit for hit in hits if hit is not None]
        return found if len(found) == len(hits) else []

    def register(self, sequence: Sequence, num_tokens: int, with_last: bool = False) -> None:
        """Register the full pages of the first ``num_tokens`` tokens and, if ``with_last``, the partly filled one.

        The tokens must be known to the host and written by steps planned or being planned.
        """
        num_full, num_left = divmod(num_tokens, self._page_size)
        for index in range(sequence.num_registered_pages, num_full):
            self._register_full(sequence, index)
        if with_last and num_left:
            content = self._content(sequence, num_full, num_tokens)
            for tag, table in zip(self._tags, sequence.tables, strict=False):
                if num_full >= table.num_released:
                    self._cache.add(table.pages[num_full], sequence.page_keys[num_full] + tag, content)

    def _register_full(self, sequence: Sequence, index: int) -> None:
        """Register the full page ``index`` of each table."""
        keys, content = sequence.page_keys, self._content(sequence, index)
        if len(keys) == index + 1:
            keys.append(self._cache.key(keys[index], content))
        for tag, table in zip(self._tags, sequence.tables, strict=False):
            self._cache.add(table.pages[index], keys[index] + tag, content, keys[index + 1] + tag)
        sequence.num_registered_pages = index + 1

    def next_page_end(self, sequence: Sequence) -> int:
        """Return the length, in tokens, at which the next page of a sequence is full."""
        return (sequence.num_registered_pages + 1) * self._page_size

    def forget(self, sequence: Sequence) -> None:
        """Remove the pages that a sequence computed itself from the cache."""
        first = max(sequence.num_cached_tokens, 0) // self._page_size
        for index in range(first, len(sequence.page_keys)):
            content = self._content(sequence, index)
            for tag in self._tags:
                self._cache.forget_context(sequence.page_keys[index] + tag, content)

    def _find_leading(self, sequence: Sequence, tag: bytes, max_pages: int) -> list[int]:
        """Return the longest run of cached leading pages of a table, at most ``max_pages``."""
        found: list[int] = []
        for key in self._keys(sequence, max_pages):
            page = self._cache.find(key + tag)
            if page is None:
                break
            found.append(page)
        return found

    def _find_all(self, sequence: Sequence, tag: bytes, num_pages: int) -> tuple[list[int], list[int]]:
        """Return a table's pages (-1 if not cached), and the length of the cached run that ends before each page."""
        found, run = list[int](), [0]
        for key in self._keys(sequence, num_pages):
            page = self._cache.find(key + tag)
            found.append(-1 if page is None else page)
            run.append(0 if page is None else run[-1] + 1)
        return found, run

    def _keys(self, sequence: Sequence, num_pages: int) -> Iterator[bytes]:
        """Yield the keys of the first ``num_pages`` full pages, computing missing ones."""
        keys = sequence.page_keys
        for index in range(num_pages):
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], self._content(sequence, index)))
            yield keys[index + 1]

    def _first_seen(self, window: KVWindow | None, num_pages: int) -> int:
        """Return the first page that the token after ``num_pages`` full pages sees."""
        return 0 if window is None else window.first_page(num_pages * self._page_size)

    def _content(self, sequence: Sequence, index: int, num_tokens: int | None = None) -> bytes:
        """Return the packed tokens of page ``index``, without those from position ``num_tokens`` on if it is given."""
        start = index * self._page_size
        end = start + self._page_size
        return pack_tokens(sequence.token_ids[start : end if num_tokens is None else min(end, num_tokens)])
