"""Pages of a sequence's context: found in the prefix cache, allocated, cached when they fill up, and freed.

Which steps have written what: the device runs steps in the order they are planned in. So a page counts as written once
the step that writes it is planned, and a step that is planned later, or whose rows are planned later in the same step,
may read it: a layer writes all its keys and values before it attends. Copies alone run before a step, so their sources
are pages of steps planned before (``PrefixCache.settle``). A context only ever grows: steps in flight of a sequence
that has finished write after the tokens that the cache knows of.

A model may have several page tables (``KVLayout``); a context has pages in each, for the same tokens. Where the layers
of a table have a sliding window, a sequence frees the pages there that none of its next tokens sees, and a cached
context is one whose pages within the window are there. What the table has in place of the others is masked, and still a
page of the sequence's own: no other request's values come near.

Only tokens that are final enter the cache: those that the host knows. What steps in flight may have written after them
(``num_computed`` counts it) does not; and a rollback takes out of the cache what it drops.
"""

import itertools
from collections.abc import Iterable, Iterator

from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator, most_pages
from jaxserve.scheduling.plan import PageCopy, PageGrant
from jaxserve.scheduling.prefix_cache import PartialHit, PrefixCache, pack_tokens
from jaxserve.scheduling.sequence import HeldPages, Sequence


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


class ContextPages:
    """The scheduler's part that moves pages between an allocator, its cache and sequences, and notes them there.

    Args:
        allocator: Of the pages of all page tables.
        windows: For each page table, what its layers see; None for all.

    Attributes:
        cache: What is known of contexts.
        num_queried_tokens: Prompt tokens looked for in the cache, once a sequence.
        num_hit_tokens: Those of them found.
    """

    def __init__(self, allocator: PageAllocator, windows: Iterable[KVWindow | None] = (None,)):
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._allocator = allocator
        self._windows = tuple(windows)
        self._has_windows = any(self._windows)
        self.cache = ContextCache(allocator.cache, self._windows)
        self._page_size = allocator.page_size

    def most_pages(self, num_tokens: int) -> int:
        """Pages that a context of ``num_tokens`` tokens holds at most."""
        return most_pages(self._allocator.pages_for(num_tokens), self._windows)

    def take(self, sequence: Sequence) -> list[PageCopy] | None:
        """Gives a waiting sequence pages for its tokens, cached ones where there are; its last token is computed.

        They are for all its tokens, but where a window will give pages back for those at the end.

        Returns:
            What is copied before the step, a page of each table or none; None, and nothing taken, where too few pages
            are free.
        """
        allocator = self._allocator
        self.cache.begin(sequence)
        num_shared, shared, partial = 0, [list[int]() for _ in self._windows], list[PartialHit]()
        if sequence.reads_cache:
            num_shared, shared = self.cache.find_shared(sequence)
            partial = self.cache.find_partial(sequence, num_shared)
        for hit in partial:  # in this order they are the last to be taken: none is an earlier table's target
            allocator.touch(hit.page)
        num_pages = allocator.pages_for(len(sequence.token_ids))
        counts = [
            min(num_pages, num_shared - len(pages) + most_pages(num_pages, [window])) - num_shared
            for pages, window in zip(shared, self._windows, strict=True)
        ]
        taken = allocator.allocate_behind([*itertools.chain(*shared)], sum(counts))
        if taken is None:
            return None
        new = iter(taken[len(taken) - sum(counts) :])
        sequence.tables = []
        for pages, count in zip(shared, counts, strict=True):
            num_unseen, held = num_shared - len(pages), [*pages, *itertools.islice(new, count)]
            sequence.tables.append(HeldPages([held[0]] * num_unseen + held, num_unseen))
        sequence.num_pages = min(len(table.pages) for table in sequence.tables)
        sequence.num_registered_pages = num_shared
        num_copied = min((hit.num_tokens for hit in partial), default=0)
        sequence.num_computed = num_shared * self._page_size + num_copied
        self._count(sequence)
        pairs = zip(partial, sequence.tables, strict=False)
        copies = [PageCopy(hit.page, table.pages[num_shared]) for hit, table in pairs]
        return [copy for copy in copies if copy.source != copy.target]

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence one more page in each table, but where it has more than in others; takes those out of sight.

        Returns:
            False, and nothing given, where too few pages are free.
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
        if sequence.decodes_until:
            self.note_room(sequence)
        return True

    def reach(self, sequence: Sequence, end: int) -> int:
        """Gives a sequence pages for its tokens up to position ``end``, as far as there are; returns how far."""
        while sequence.num_pages * self._page_size < end and self.grow(sequence):
            pass
        return min(end, sequence.num_pages * self._page_size)

    def grants(self, sequence: Sequence) -> list[PageGrant]:
        """What a plan has to tell the device: the pages that changed, and all pages after them."""
        grants: list[PageGrant] = []
        for index, table in enumerate(sequence.tables):
            first, end = table.num_granted, len(table.pages)
            if first < end:
                grants.append(PageGrant(sequence.slot, first, table.pages[first:], index))
                table.num_granted = end
        return grants

    def shrink(self, sequence: Sequence) -> None:
        """Free the pages of a decoding sequence past its tokens, known and pending."""
        num_kept = self._allocator.pages_for(sequence.num_computed + 1)
        for table in sequence.tables:
            self._allocator.free(table.pages[num_kept:])
            del table.pages[num_kept:]
            table.num_granted = min(table.num_granted, num_kept)
        sequence.num_pages = min(sequence.num_pages, num_kept)
        self.note_room(sequence)

    def note_room(self, sequence: Sequence) -> None:
        """Notes how far a sequence whose prompt is computed can decode."""
        sequence.decodes_until = min(sequence.num_pages * self._page_size, sequence.max_length - 1)

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's pages, if it has any; what it computed stays in the cache while they are not needed."""
        if sequence.finish_reason != "error" and self._allocator.keeps_free_pages:
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            self.cache.register(sequence, num_known, with_last=True)
        held = ([-1] * table.num_released + table.held for table in sequence.tables)
        pages = itertools.chain.from_iterable(itertools.zip_longest(*held, fillvalue=-1))
        self._allocator.free([page for page in pages if page >= 0])
        sequence.tables = []
        sequence.num_pages = 0
        sequence.num_registered_pages = 0
        sequence.num_computed = 0
        sequence.decodes_until = 0

    def cut(self, sequence: Sequence, length: int) -> None:
        """Drop a sequence's tokens from position ``length`` on, and take the pages that hold any out of the cache."""
        self.cache.forget(sequence, length)
        del sequence.token_ids[length:]
        del sequence.page_keys[1 + length // self._page_size :]
        sequence.next_check = 0

    def _count(self, sequence: Sequence) -> None:
        """Notes how much of a prompt was found when its sequence first got pages."""
        if sequence.num_cached_tokens >= 0:
            return
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        if sequence.reads_cache:
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens

    def _release_unseen(self, sequence: Sequence) -> None:
        """Take the pages that no token of a sequence sees from the first on whose place may still change."""
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
