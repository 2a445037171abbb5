"""Pages of a sequence's context: found in the prefix cache, taken, noted there when they fill up, given back.

Which steps have written what: the device runs steps in the order they are planned in. So a page counts as written once
the step that writes it is planned, and a step that is planned later, or whose rows are planned later in the same step,
may read it: a layer writes all its keys and values before it attends. Copies alone run before a step, so their sources
are pages of steps planned before (``PrefixCache.settle``). A context only ever grows: steps in flight of a sequence
that has ended write behind the tokens that the cache knows of.

Where all layers have a sliding window, a sequence gives back the pages that none of its next tokens sees, and a cached
context is one whose pages within the window are there. What the page table has in place of the others is masked, and
still a page of the sequence's own: no other request's values come near.

Only tokens that are final enter the cache: those that the host knows. What steps in flight may have written after them
(``num_computed`` counts it) does not; and a rollback takes out of the cache what it drops.
"""

from jaxserve.engine.kv_window import KVWindow
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import PageCopy
from jaxserve.engine.prefix_cache import PartialHit, pack_tokens
from jaxserve.engine.sequence import Sequence


class ContextPages:
    """The scheduler's part that moves pages between an allocator, its cache and sequences, and notes them there.

    Attributes:
        num_queried_tokens: Prompt tokens looked for in the cache, once a sequence.
        num_hit_tokens: Those of them found.
    """

    def __init__(self, allocator: PageAllocator, window: KVWindow | None = None):
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._allocator = allocator
        self._window = window
        self._cache = allocator.cache
        self._page_size = allocator.page_size

    def most_pages(self, num_tokens: int) -> int:
        """Pages that a context of ``num_tokens`` tokens holds at most."""
        num_pages = self._allocator.pages_for(num_tokens)
        return num_pages if self._window is None else min(num_pages, self._window.max_pages)

    def take(self, sequence: Sequence) -> list[PageCopy] | None:
        """Gives a waiting sequence pages for its tokens, cached ones where there are; its last token is computed.

        They are for all its tokens, but where a window will give pages back for those at the end.

        Returns:
            What is copied before the step, one page or none; None, and nothing taken, where too few pages are free.
        """
        allocator = self._allocator
        root = self._cache.root_key(sequence.cache_root)
        if sequence.page_keys[:1] != [root]:
            sequence.page_keys = [root]
        num_shared, shared = self._find_shared(sequence) if sequence.reads_cache else (0, [])
        partial = self._find_partial(sequence, num_shared) if sequence.reads_cache else None
        if partial is not None:
            allocator.touch(partial.page)
        num_unseen = num_shared - len(shared)
        end = min(allocator.pages_for(len(sequence.token_ids)), num_unseen + self.most_pages(len(sequence.token_ids)))
        pages = allocator.allocate_behind(shared, end - num_shared)
        if pages is None:
            return None
        num_copied = 0 if partial is None else partial.num_tokens
        sequence.pages = [pages[0]] * num_unseen + pages
        sequence.num_released_pages = num_unseen
        sequence.num_registered_pages = num_shared
        sequence.num_computed = num_shared * self._page_size + num_copied
        self._count(sequence)
        if partial is None or partial.page == sequence.pages[num_shared]:
            return []
        return [PageCopy(partial.page, sequence.pages[num_shared])]

    def grow(self, sequence: Sequence) -> int | None:
        """Gives a sequence one more page, and takes those out of sight.

        Returns:
            The index of the first page that is another than before; None where no page is free.
        """
        num_released = sequence.num_released_pages
        self._release_unseen(sequence)
        pages = self._allocator.allocate(1)
        if pages is None:
            return None
        sequence.pages += pages
        if sequence.decodes_until:
            self.note_room(sequence)
        return len(sequence.pages) - 1 if sequence.num_released_pages == num_released else 0

    def reach(self, sequence: Sequence, end: int) -> tuple[int, int | None]:
        """Gives a sequence pages for its tokens up to position ``end``, as far as there are.

        Returns:
            The position up to which it has pages, ``end`` at most; and the index of the first page that is another
            than before, None where all are the same.
        """
        first: int | None = None
        while len(sequence.pages) * self._page_size < end:
            changed = self.grow(sequence)
            if changed is None:
                break
            first = changed if first is None else min(first, changed)
        return min(end, len(sequence.pages) * self._page_size), first

    def shrink(self, sequence: Sequence) -> None:
        """Free the pages of a decoding sequence past its tokens, known and pending."""
        num_kept = self._allocator.pages_for(sequence.num_computed + 1)
        if num_kept < len(sequence.pages):
            self._allocator.free(sequence.pages[num_kept:])
            del sequence.pages[num_kept:]
            self.note_room(sequence)

    def note_room(self, sequence: Sequence) -> None:
        """Notes how far a sequence whose prompt is computed can decode."""
        sequence.decodes_until = min(len(sequence.pages) * self._page_size, sequence.max_length - 1)

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
            self._cache.add(sequence.pages[index], keys[index], content, keys[index + 1])
            sequence.num_registered_pages = index + 1
        if with_last and num_left and num_full >= sequence.num_released_pages:
            content = self._content(sequence, num_full, num_tokens)
            self._cache.add(sequence.pages[num_full], keys[num_full], content)

    def page_end(self, sequence: Sequence) -> int:
        """Return the length at which the next page of a sequence is full."""
        return (sequence.num_registered_pages + 1) * self._page_size

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's pages, if it has any; what it computed stays in the cache while they are not needed."""
        if sequence.finish_reason != "error" and self._allocator.keeps_free_pages:
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            self.register(sequence, num_known, with_last=True)
        self._allocator.free(sequence.pages[sequence.num_released_pages :])
        sequence.pages = []
        sequence.num_released_pages = 0
        sequence.num_registered_pages = 0
        sequence.num_computed = 0
        sequence.decodes_until = 0

    def cut(self, sequence: Sequence, length: int) -> None:
        """Drop a sequence's tokens from position ``length`` on, and take the pages that hold any out of the cache."""
        self.forget(sequence, length)
        del sequence.token_ids[length:]
        del sequence.page_keys[1 + length // self._page_size :]
        sequence.next_check = 0

    def forget(self, sequence: Sequence, start: int = 0) -> None:
        """Take out of the cache what a sequence computed from position ``start`` on, after the pages found at first."""
        first = max(sequence.num_cached_tokens, start) // self._page_size
        for index in range(first, len(sequence.page_keys)):
            self._cache.forget_context(sequence.page_keys[index], self._content(sequence, index))

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
        if self._window is None:
            return
        first = self._window.first_page(min(sequence.num_computed, len(sequence.token_ids) - 1))
        first = min(first, len(sequence.pages) - 1)
        if first <= sequence.num_released_pages:
            return
        self.register(sequence, first * self._page_size)
        self._allocator.free(sequence.pages[sequence.num_released_pages : first])
        sequence.pages[:first] = [sequence.pages[first]] * first
        sequence.num_released_pages = first

    def _find_shared(self, sequence: Sequence) -> tuple[int, list[int]]:
        """The number of cached pages that a sequence's context begins with, and those that its next token sees.

        They leave at least one token to compute.
        """
        keys, found, num_shared, num_in_row = sequence.page_keys, list[int](), 0, 0
        for index in range((len(sequence.token_ids) - 1) // self._page_size):
            if len(keys) == index + 1:
                keys.append(self._cache.key(keys[index], self._content(sequence, index)))
            page = self._cache.find(keys[index + 1])
            if page is None and self._window is None:
                break
            found.append(-1 if page is None else page)
            num_in_row = 0 if page is None else num_in_row + 1
            if index + 1 - self._first_seen(index + 1) <= num_in_row:
                num_shared = index + 1
        return num_shared, found[self._first_seen(num_shared) : num_shared]

    def _first_seen(self, num_pages: int) -> int:
        """The first page that is seen by the token behind ``num_pages`` full pages."""
        return 0 if self._window is None else self._window.first_page(num_pages * self._page_size)

    def _find_partial(self, sequence: Sequence, num_shared: int) -> PartialHit | None:
        """A page to copy behind the shared ones."""
        content = self._content(sequence, num_shared, len(sequence.token_ids) - 1)
        return self._cache.find_partial(sequence.page_keys[num_shared], content)

    def _content(self, sequence: Sequence, index: int, num_tokens: int | None = None) -> bytes:
        """Tokens of a context's page, of the first ``num_tokens`` or of all."""
        start = index * self._page_size
        end = start + self._page_size
        return pack_tokens(sequence.token_ids[start : end if num_tokens is None else min(end, num_tokens)])
