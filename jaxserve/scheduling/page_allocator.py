"""The owner of the KV pages: who holds how many, which are free, and which a sliding window still sees."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduling.prefix_cache import PrefixCache


class KVWindow(NamedTuple):
    """What no layer of a page table looks beyond.

    Attributes:
        num_tokens: Latest tokens that a query sees, itself included.
        page_size: Tokens per page.
        num_step_tokens: Most tokens by which the steps that are not complete can extend a context.
    """

    num_tokens: int
    page_size: int
    num_step_tokens: int

    def first_page(self, position: int) -> int:
        """The first page of a context that a query at a position sees, and so do those after it."""
        return max(0, position + 1 - self.num_tokens) // self.page_size

    @property
    def max_pages(self) -> int:
        """Pages that a context of any length holds at most."""
        return (self.num_tokens + self.num_step_tokens - 2) // self.page_size + 2


def most_pages(num_pages: int, windows: Iterable[KVWindow | None]) -> int:
    """Pages that a context holds at most which is ``num_pages`` pages long, in page tables with these windows."""
    return sum(num_pages if window is None else min(num_pages, window.max_pages) for window in windows)


class PageAllocator:
    """Hands out pages ``0 .. num_pages - 1`` of ``page_size`` tokens; a page may have several holders.

    A page without holders whose content is known stays findable until it is needed: pages of unknown content are handed
    out first, then the one that was freed or used longest ago. Every operation costs O(1) a page.

    Args:
        num_pages: Pages there are.
        page_size: Tokens per page.
        keeps_free_pages: False forgets a page's content when its last holder frees it.
    """

    def __init__(self, num_pages: int, page_size: int, keeps_free_pages: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.keeps_free_pages = keeps_free_pages
        self.cache = PrefixCache(page_size)
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free) + len(self._free_cached)

    @property
    def usage(self) -> float:
        """Held share of the pages, in 0..1."""
        return 1.0 - self.num_free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.page_size)

    def num_holders(self, page: int) -> int:
        """How many contexts a page is part of."""
        return self._num_holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages without a known content, or None, and nothing taken, where fewer are free."""
        if count > self.num_free:
            return None
        return [self._take_free() for _ in range(count)]

    def allocate_behind(self, shared: list[int], count: int) -> list[int] | None:
        """Allocate pages after cached ones, which get one more holder; return all of them."""
        holders = self._num_holders
        if count + sum(not holders[page] for page in shared) > self.num_free:
            return None
        for page in shared:
            if not holders[page]:
                del self._free_cached[page]
            holders[page] += 1
        return shared + [self._take_free() for _ in range(count)]

    def touch(self, page: int) -> None:
        """Notes that a page was of use, so that it is kept for longer."""
        if page in self._free_cached:
            self._free_cached.move_to_end(page)

    def free(self, pages: list[int]) -> None:
        """Takes a holder from each page, the last first, so that a context's first pages are the last to be reused."""
        for page in reversed(pages):
            assert self._num_holders[page], f"page {page} freed twice"
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if self.keeps_free_pages and page in self.cache:
                self._free_cached[page] = None
            else:
                self.cache.forget(page)
                self._free.append(page)

    def reset(self) -> None:
        """Forget the content of every page, also of held ones."""
        self.cache.reset()
        self._free.extend(self._free_cached)
        self._free_cached.clear()

    def _take_free(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._free_cached.popitem(last=False)
            self.cache.forget(page)
        self._num_holders[page] = 1
        return page
