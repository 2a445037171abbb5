"""Manage the KV pages of a sequence: look them up in the prefix cache, allocate, cache when full, and free.

The device runs steps in the order they are planned, so a page counts as written once the step that writes it is
planned. Later steps, and later rows of the same step, may read it: a layer writes all its keys and values before it
attends. Page copies run before their step, so their sources must be pages of earlier steps (``PrefixCache.settle``).
In a pipeline, all this holds within each stage, which has the pages of its own layers and runs the plans in order.
Steps in flight for a finished sequence write past the tokens in the cache, because no context shrinks while it runs.

A model may have several page tables (``KVLayout``); a context has pages for the same tokens in each. In a table with a
sliding window, a sequence frees the pages that none of its next tokens can see, and a context is cached if the pages
within the window are. The freed entries of the table are masked, and point to a page of the same sequence so that no
other request's values can be read.

Only tokens known to the host enter the cache, not those that steps in flight may have written after them
(``num_computed`` counts both).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator, max_held_pages
from jaxserve.scheduling.plan import PageCopy, PageGrant
from jaxserve.scheduling.prefix_cache import KEY_BYTES, PageRecord, PartialHit, PrefixCache, pack_tokens
from jaxserve.scheduling.sequence import HeldPages, Sequence
from jaxserve.scheduling.state_allocator import StateAllocator


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
            leading = self._find_leading(sequence, table_tag(0), num_pages)
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


class ContextPages:
    """Allocates the pages of sequences, reusing cached ones, and frees them.

    Args:
        allocator: Allocator of the pages of all page tables.
        windows: Sliding window of each page table; None for full attention.
        shares_parts: Whether a context may begin with a copy of a cached page that is not full.
        num_lookahead: Tokens after those of a row that a drafter on the device takes in.
        num_states: State pages; 0 for a model without recurrent layers. With them, no cached page is used: a context
            cannot go on without the state at its end.

    Attributes:
        cache: Prefix cache lookups and registrations.
        num_lookahead: As given.
        num_queried_tokens: Prompt tokens looked up in the cache, once per sequence.
        num_hit_tokens: Prompt tokens found in the cache.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        windows: Iterable[KVWindow | None] = (None,),
        shares_parts: bool = True,
        num_lookahead: int = 0,
        num_states: int = 0,
    ):
        self.num_lookahead = num_lookahead
        self._states = StateAllocator(num_states) if num_states else None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._allocator, self._shares_parts = allocator, shares_parts
        self._windows = tuple(windows)
        self._has_windows = any(self._windows)
        self._is_plain = self._windows == (None,)
        self.cache = ContextCache(allocator.cache, self._windows)
        self._page_size = allocator.page_size

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens in the cached full pages that ``allocate`` would share; change nothing.

        Returns 0 if the sequence reads no cached pages, or if pages leave the cache when they are freed.
        """
        if not (self._may_read(sequence) and self._allocator.keeps_free_pages):
            return 0
        # A copy, because an error removes the pages of a sequence's own keys: they may be those of other sequences.
        probe = dataclasses.replace(sequence, page_keys=[])
        self.cache.begin(probe)
        num_shared, _ = self.cache.find_shared(probe)
        return num_shared * self._page_size

    def allocate(self, sequence: Sequence) -> list[PageCopy] | None:
        """Allocate pages for all tokens of a waiting sequence, reusing cached ones; leave a token to compute.

        In a table with a window, later pages may be left to ``grow``, once earlier ones are freed.

        Returns:
            Page copies to run before the step; None, with nothing allocated, if too few pages are free.
        """
        self.cache.begin(sequence)
        num_shared, shared, partial = 0, [list[int]() for _ in self._windows], list[PartialHit]()
        if self._may_read(sequence):
            num_shared, shared = self.cache.find_shared(sequence)
            partial = self.cache.find_partial(sequence, num_shared) if self._shares_parts else []
        for hit in partial:  # makes them the last to be evicted, so that none becomes the target of an earlier copy
            self._allocator.touch(hit.page)
        num_pages = self._allocator.pages_for(len(sequence.token_ids))
        if self._is_plain:
            pages = self._allocator.allocate_after(shared[0], num_pages - num_shared)
            tables = None if pages is None else [HeldPages(pages)]
        else:
            tables = self._allocate_tables(num_pages, num_shared, shared)
        if tables is None:
            return None
        if self._states is not None:
            sequence.state_page = self._states.allocate()
        sequence.tables = tables
        sequence.num_pages = min(len(table.pages) for table in tables)
        sequence.num_registered_pages = num_shared
        sequence.num_computed = num_shared * self._page_size + min((hit.num_tokens for hit in partial), default=0)
        if sequence.num_cached_tokens < 0:
            self._count(sequence)
        copies = [PageCopy(hit.page, table.pages[num_shared]) for hit, table in zip(partial, tables, strict=False)]
        return [copy for copy in copies if copy.source != copy.target]

    def _allocate_tables(self, num_pages: int, num_shared: int, shared: list[list[int]]) -> list[HeldPages] | None:
        """Allocate the pages after the shared ones in several page tables, or with a window; None if too few are free.

        Args:
            num_pages: Number of pages for all tokens.
            num_shared: Number of leading pages that are cached.
            shared: Those of them that the next token sees in each table.
        """
        counts = [
            min(num_pages, num_shared - len(pages) + max_held_pages(num_pages, [window])) - num_shared
            for pages, window in zip(shared, self._windows, strict=True)
        ]
        allocated = self._allocator.allocate_after([*itertools.chain(*shared)], sum(counts))
        if allocated is None:
            return None
        new = iter(allocated[len(allocated) - sum(counts) :])
        tables: list[HeldPages] = []
        for pages, count in zip(shared, counts, strict=True):
            num_unseen, held = num_shared - len(pages), [*pages, *itertools.islice(new, count)]
            tables.append(HeldPages([held[0]] * num_unseen + held, num_unseen))
        return tables

    def grow(self, sequence: Sequence) -> bool:
        """Free the pages outside the windows, then add one page to each of the tables that have the fewest.

        Returns:
            False, with no page added, if too few pages are free.
        """
        if self._has_windows:
            self._release_unseen(sequence)
        shortest = [table for table in sequence.tables if len(table.pages) == sequence.num_pages]
        pages = self._allocator.allocate(len(shortest))
        if pages is None:
            return False
        for table, page in zip(shortest, pages, strict=True):
            table.pages.append(page)
        sequence.num_pages += 1
        if sequence.decode_limit:
            self.update_decode_limit(sequence)
        return True

    def grow_to(self, sequence: Sequence, end: int) -> int:
        """Allocate pages for tokens up to position ``end`` while any are free; return the position reached."""
        while sequence.num_pages * self._page_size < end and self.grow(sequence):
            pass
        return min(end, sequence.num_pages * self._page_size)

    def with_lookahead(self, sequence: Sequence, end: int) -> int:
        """Return the position up to which a sequence with tokens up to ``end`` should have pages if any are free."""
        return max(end, min(end + self.num_lookahead, sequence.max_length - 1))

    def grants(self, sequence: Sequence) -> list[PageGrant]:
        """Return the page table updates that the device has not seen: each from the first changed page on."""
        grants: list[PageGrant] = []
        for index, table in enumerate(sequence.tables):
            first, end = table.num_granted, len(table.pages)
            if first < end:
                grants.append(PageGrant(sequence.slot, first, table.pages[first:], index))
                table.num_granted = end
        return grants

    def shrink(self, sequence: Sequence) -> None:
        """Free the pages of a decoding sequence after its known and pending tokens, unless a drafter writes there."""
        if self.num_lookahead:
            return
        num_kept = self._allocator.pages_for(sequence.num_computed + 1)
        for table in sequence.tables:
            if len(table.pages) > num_kept:
                self._allocator.free(table.pages[num_kept:])
                del table.pages[num_kept:]
                table.num_granted = min(table.num_granted, num_kept)
        if num_kept < sequence.num_pages:
            sequence.num_pages = num_kept
            self.update_decode_limit(sequence)

    def update_decode_limit(self, sequence: Sequence) -> None:
        """Update the position up to which a sequence with a computed prompt can decode."""
        sequence.decode_limit = min(sequence.num_pages * self._page_size, sequence.max_length - 1)

    def release(self, sequence: Sequence) -> None:
        """Free all pages of a sequence; their content stays cached until they are reused."""
        if sequence.finish_reason != "error" and self._allocator.keeps_free_pages:
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            self.cache.register(sequence, num_known, with_last=True)
        if self._is_plain:
            for table in sequence.tables:
                self._allocator.free(table.pages)
        else:
            held = ([-1] * table.num_released + table.held for table in sequence.tables)
            pages = itertools.chain.from_iterable(itertools.zip_longest(*held, fillvalue=-1))
            self._allocator.free([page for page in pages if page >= 0])
        if self._states is not None and sequence.state_page >= 0:
            self._states.free(sequence.state_page)
            sequence.state_page = -1
        sequence.tables = []
        sequence.num_pages = 0
        sequence.num_registered_pages = 0
        sequence.num_computed = 0
        sequence.decode_limit = 0

    def _may_read(self, sequence: Sequence) -> bool:
        """Return whether a sequence may use cached pages."""
        return sequence.reads_cache and self._states is None

    def _count(self, sequence: Sequence) -> None:
        """Count the cache hits of a prompt when its sequence is first admitted."""
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        if sequence.reads_cache:
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens

    def _release_unseen(self, sequence: Sequence) -> None:
        """Free the pages outside the windows of every position that may still be computed."""
        for table, window in zip(sequence.tables, self._windows, strict=True):
            if window is None:
                continue
            first = window.first_page(min(sequence.num_computed, len(sequence.token_ids) - 1))
            first = min(first, len(table.pages) - 1)
            if first <= table.num_released:
                continue
            self.cache.register(sequence, first * self._page_size)
            self._allocator.free(table.pages[table.num_released : first])
            table.pages[:first] = [table.pages[first]] * first
            table.num_released, table.num_granted = first, 0
