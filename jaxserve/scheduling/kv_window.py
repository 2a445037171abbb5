"""Pages that a sliding window still sees; a page table whose layers all have one gives the others back."""

from collections.abc import Iterable
from typing import NamedTuple


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
