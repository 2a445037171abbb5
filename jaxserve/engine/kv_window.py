"""Pages that a sliding window still sees, where every layer of a model has one: the others are given back."""

from collections.abc import Iterable
from typing import NamedTuple


class KVWindow(NamedTuple):
    """What no layer looks beyond.

    Attributes:
        num_tokens: Latest tokens that a query sees, itself included.
        page_size: Tokens a page.
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


def longest_window(windows: Iterable[int | None]) -> int | None:
    """The longest of the layers' windows; None where a layer sees all tokens."""
    found = list(windows)
    known = [window for window in found if window is not None]
    return max(known) if len(known) == len(found) else None
