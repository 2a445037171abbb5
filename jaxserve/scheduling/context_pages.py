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

import collections
import dataclasses
import itertools
from collections.abc import Iterable

from jaxserve.scheduling.context_cache import ContextCache
from jaxserve.scheduling.context_states import ContextStates
from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator, max_held_pages
from jaxserve.scheduling.plan import PageCopy, PageGrant
from jaxserve.scheduling.prefix_cache import PartialHit
from jaxserve.scheduling.sequence import HeldPages, Sequence
from jaxserve.scheduling.state_allocator import Checkpoint

MISS_REASONS = ("first_seen", "no_checkpoint", "evicted", "new_salt", "not_read")
"""Why a prompt is not in the prefix cache: no earlier one goes on like it; no state of recurrent layers after what they
share was kept; what it shares was dropped for others; no earlier request had its salt; its request may not use the
cache."""
_MOST_SALTS = 4096


class ContextPages:
    """Allocates the pages of sequences, reusing cached ones, and frees them.

    Args:
        allocator: Allocator of the pages of all page tables.
        windows: Sliding window of each page table; None for full attention.
        shares_parts: Whether a context may begin with a copy of a cached page that is not full.
        num_lookahead: Tokens after those of a row that a drafter on the device takes in.
        states: States of sequences; None for a model without recurrent layers. With them, a context can begin with
            cached pages up to a checkpoint of its state only.

    Attributes:
        cache: Prefix cache lookups and registrations.
        num_lookahead: As given.
        num_queried_tokens: Prompt tokens looked up in the cache, once per sequence.
        num_hit_tokens: Prompt tokens found in the cache.
        misses: Prompts of which not all but the last token was found, by reason.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        windows: Iterable[KVWindow | None] = (None,),
        shares_parts: bool = True,
        num_lookahead: int = 0,
        states: ContextStates | None = None,
    ):
        self.num_lookahead = num_lookahead
        self.states = states
        if states is not None:
            allocator.cache.min_shared_tokens = 1  # a checkpoint may be anywhere in a page
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.misses = collections.Counter[str]()
        self._salts: dict[bytes, None] = {}
        self._allocator, self._shares_parts = allocator, shares_parts
        self._windows = tuple(windows)
        self._has_windows = any(self._windows)
        self._is_plain = self._windows == (None,)
        self.cache = ContextCache(allocator.cache, self._windows)
        self._page_size = allocator.page_size

    @property
    def num_states(self) -> int:
        """Number of states of recurrent layers that the prefix cache keeps."""
        return 0 if self.states is None else self.states.allocator.num_checkpoints

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that ``allocate`` would find in cached full pages or, with states of recurrent
        layers, at a checkpoint; change nothing.

        Returns 0 if the sequence reads no cached pages, or if pages leave the cache when they are freed.
        """
        if not (sequence.reads_cache and self._allocator.keeps_free_pages):
            return 0
        # A copy, because an error removes the pages of a sequence's own keys: they may be those of other sequences.
        probe = dataclasses.replace(sequence, page_keys=[])
        self.cache.begin(probe)
        num_shared, _ = self.cache.find_shared(probe)
        if self.states is None:
            return num_shared * self._page_size
        partial = self.cache.find_partial(probe, num_shared) if self._shares_parts else []
        num_common = num_shared * self._page_size + _num_copied(partial)
        hit, _ = self._find_state(self.states, probe, num_common)
        return 0 if hit is None else hit[1]

    def allocate(self, sequence: Sequence) -> list[PageCopy] | None:
        """Allocate pages for all tokens of a waiting sequence, reusing cached ones; leave a token to compute.

        In a table with a window, later pages may be left to ``grow``, once earlier ones are freed.

        Returns:
            Page copies to run before the step; None, with nothing allocated, if too few pages are free.
        """
        self.cache.begin(sequence)
        num_shared, shared, partial = 0, [list[int]() for _ in self._windows], list[PartialHit]()
        if sequence.reads_cache:
            num_shared, shared = self.cache.find_shared(sequence)
            partial = self.cache.find_partial(sequence, num_shared) if self._shares_parts else []
        num_common, state = num_shared * self._page_size + _num_copied(partial), None
        if self.states is not None:
            state, partial = self._find_state(self.states, sequence, num_common)
            num_shared = 0 if state is None else state[1] // self._page_size
            shared = [pages[:num_shared] for pages in shared]
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
        if self.states is not None:
            self.states.begin(sequence, state, num_common)
        sequence.tables = tables
        sequence.num_pages = min(len(table.pages) for table in tables)
        sequence.num_registered_pages = num_shared
        sequence.num_computed = num_shared * self._page_size + _num_copied(partial)
        if sequence.num_cached_tokens < 0:
            self._count(sequence, num_common)
        copies = [PageCopy(hit.page, table.pages[num_shared]) for hit, table in zip(partial, tables, strict=False)]
        return [copy for copy in copies if copy.source != copy.target]

    def _find_state(
        self, states: ContextStates, sequence: Sequence, num_common: int
    ) -> tuple[tuple[Checkpoint, int] | None, list[PartialHit]]:
        """Return the deepest checkpoint to go on from, with its length, and the pages to copy if it is inside a page.

        A page is copied before the step, so that it must be one of an earlier step, though a shared one need not be.
        """
        while (found := states.find(sequence, num_common)) is not None:
            num_pages, num_left = divmod(found[1], self._page_size)
            hits = self.cache.find_partial(sequence, num_pages) if num_left and self._shares_parts else []
            if not num_left or (hits and all(hit.num_tokens >= num_left for hit in hits)):
                return found, [PartialHit(hit.page, num_left) for hit in hits]
            num_common = found[1] - 1
        return None, []

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

    def states_on_the_way(self, sequence: Sequence) -> list[PageCopy]:
        """Return the copy that keeps the state of a decoding sequence before its next row, if it is due."""
        if self.states is None or not self.states.is_due(sequence):
            return []
        self.cache.register(sequence, sequence.num_computed)
        return self.states.keep_running(sequence)

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
        if self.states is not None:
            self.states.release(sequence)
        sequence.tables = []
        sequence.num_pages = 0
        sequence.num_registered_pages = 0
        sequence.num_computed = 0
        sequence.decode_limit = 0

    def forget(self, sequence: Sequence) -> None:
        """Remove the pages and the states that a sequence computed itself from the cache."""
        self.cache.forget(sequence)
        if self.states is not None:
            self.states.forget(sequence, max(sequence.num_cached_tokens, 0) // self._page_size)

    def reset_cache(self) -> None:
        """Remove all pages and states from the cache; those of running sequences stay theirs."""
        self._allocator.reset()
        if self.states is not None:
            self.states.allocator.reset()

    def continue_counts(self, other: "ContextPages") -> None:
        """Continue the counters of other pages, which these replace."""
        self.num_queried_tokens += other.num_queried_tokens
        self.num_hit_tokens += other.num_hit_tokens
        self.misses.update(other.misses)

    def settle(self) -> None:
        """Make what earlier plans have cached available; called before a step is planned."""
        if self._allocator.cache.unsettled:
            self._allocator.cache.settle()
        if self.states is not None:
            self.states.allocator.settle()

    def _count(self, sequence: Sequence, num_common: int) -> None:
        """Count the cache hits of a prompt when its sequence is first admitted.

        Args:
            sequence: The sequence.
            num_common: Tokens whose keys and values the cache has.
        """
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        sequence.num_shared_tokens = min(num_common, sequence.num_prompt_tokens)
        if sequence.num_cached_tokens < sequence.num_prompt_tokens - 1:
            sequence.miss_reason = self._miss_reason(sequence)
            self.misses[sequence.miss_reason] += 1
        if sequence.request.cache_salt is not None and sequence.page_keys[0] not in self._salts:
            self._salts[sequence.page_keys[0]] = None
            if len(self._salts) > _MOST_SALTS:
                del self._salts[next(iter(self._salts))]
        if sequence.reads_cache:
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens

    def _miss_reason(self, sequence: Sequence) -> str:
        """Return why not all of a prompt but its last token is cached."""
        if not sequence.reads_cache:
            return "not_read"
        num_cached, num_shared = sequence.num_cached_tokens, sequence.num_shared_tokens
        if num_shared > num_cached:
            was_kept = self.states is not None and self.states.was_dropped(sequence, num_cached, num_shared)
            return "evicted" if was_kept else "no_checkpoint"
        following = sequence.page_keys[num_shared // self._page_size + 1 :][:1]
        if following and self._allocator.dropped.has(*following):
            return "evicted"
        is_new = sequence.request.cache_salt is not None and sequence.page_keys[0] not in self._salts
        return "new_salt" if is_new else "first_seen"

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


def _num_copied(partial: list[PartialHit]) -> int:
    """Return the tokens that copies of pages, one for each table, have in common with a context."""
    return min((each.num_tokens for each in partial), default=0)
