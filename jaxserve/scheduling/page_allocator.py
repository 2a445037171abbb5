"""Allocate and free KV pages, with a reference count per page."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduling.dropped_contexts import DroppedContexts
from jaxserve.scheduling.prefix_cache import PageRecord, PrefixCache


class KVWindow(NamedTuple):
    """Sliding window of the layers of a page table.

    Attributes:
        num_tokens: Number of latest tokens that a query sees, itself included.
        page_size: Tokens per page.
        num_step_tokens: Most tokens by which the steps in flight can extend a context.
    """

    num_tokens: int
    page_size: int
    num_step_tokens: int

    def first_page(self, position: int) -> int:
        """Return the index of the first page that a query at a position sees."""
        return max(0, position + 1 - self.num_tokens) // self.page_size

    @property
    def max_pages(self) -> int:
        """The most pages that a context of any length holds."""
        return (self.num_tokens + self.num_step_tokens - 2) // self.page_size + 2


def max_held_pages(num_pages: int, windows: Iterable[KVWindow | None]) -> int:
    """Return the most pages that a context of ``num_pages`` pages holds in page tables with these windows."""
    return sum(num_pages if window is None else min(num_pages, window.max_pages) for window in windows)


class PageAllocator:
    """Allocates pages ``0 .. num_pages - 1``; a page may have several holders.

    A free page whose content is cached stays in the prefix cache until it is reused: free pages that are not cached are
    allocated first, then the least recently used. Every operation costs O(1) per page.

    Args:
        num_pages: Number of pages.
        page_size: Tokens per page.
        keeps_free_pages: Whether a page stays in the prefix cache after its last holder frees it.
    """

    def __init__(self, num_pages: int, page_size: int, keeps_free_pages: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.keeps_free_pages = keeps_free_pages
        self.cache = PrefixCache(page_size)
        self.dropped = DroppedContexts()
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free) + len(self._free_cached)

    @property
    def usage(self) -> float:
        """Fraction of the pages that are held, 0 to 1."""
        return 1.0 - self.num_free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def num_holders(self, page: int) -> int:
        """Return the number of contexts that hold a page."""
        return self._num_holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages; return None, with nothing allocated, if fewer are free."""
        if count > self.num_free:
            return None
        return [self._take_free() for _ in range(count)]

    def allocate_after(self, shared: list[int], count: int) -> list[int] | None:
        """Add a holder to the ``shared`` pages and allocate ``count`` more; return all, or None if too few are free."""
        holders = self._num_holders
        if count + sum(not holders[page] for page in shared) > self.num_free:
            return None
        for page in shared:
            if not holders[page]:
                del self._free_cached[page]
            holders[page] += 1
        return shared + [self._take_free() for _ in range(count)]

    def touch(self, page: int) -> None:
        """Mark a free cached page as the most recently used."""
        if page in self._free_cached:
            self._free_cached.move_to_end(page)

    def free(self, pages: list[int]) -> None:
        """Remove a holder from each page, last page first, so that a context's first pages are reused last."""
        for page in reversed(pages):
            assert self._num_holders[page], f"page {page} freed twice"
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page not in self.cache:
                self._free.append(page)
            elif self.keeps_free_pages:
                self._free_cached[page] = None
            else:
                self.cache.forget(page)
                self._free.append(page)

    @property
    def cached_pages(self) -> list[int]:
        """Free pages in the prefix cache, the least recently used first."""
        return [page for page in self._free_cached if page in self.cache]  # a failed sequence's were removed from it

    def adopt(self, record: PageRecord) -> int | None:
        """Enter the content of another allocator's page as that of a free page, the most recently used one.

        Returns:
            The page to copy it to; None if the content is cached already, or no page is free of cached content.
        """
        if not (self._free and self.keeps_free_pages):
            return None
        page = self._free[-1]
        self.cache.add(page, *record)
        if page not in self.cache:
            return None
        self._free.pop()
        self._free_cached[page] = None
        return page

    def renewed(self) -> "PageAllocator":
        """Return an allocator of as many pages, all free and none cached."""
        return PageAllocator(self.num_pages, self.page_size, self.keeps_free_pages)

    def reset(self) -> None:
        """Clear the prefix cache; held pages stay held."""
        self.cache.reset()
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self.dropped.clear()

    def _take_free(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._free_cached.popitem(last=False)
            if page in self.cache and (key := self.cache.record(page).key):
                self.dropped.add(key)
            self.cache.forget(page)
        self._num_holders[page] = 1
        return page
