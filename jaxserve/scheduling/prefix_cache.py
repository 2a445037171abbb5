"""The prefix cache: maps a context to the page that holds the keys and values of its last tokens.

The key of a full page is the SHA-256 of the preceding page's key and the page's tokens, so it identifies the whole
context. For each key, the contents of the pages that follow it, full or not, are also kept sorted, to find the page
that shares the longest prefix and can be copied. The cache knows nothing about the holders of a page.
"""

import bisect
import hashlib
import struct
from typing import NamedTuple

TOKEN_BYTES = 4
KEY_BYTES = hashlib.sha256().digest_size
"""Length of a key without what ``ContextCache`` adds to it."""


def pack_tokens(token_ids: list[int]) -> bytes:
    """Pack tokens as little-endian int32, the form of contents and keys."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


class PartialHit(NamedTuple):
    """A page whose first ``num_tokens`` tokens match."""

    page: int
    num_tokens: int


class PageRecord(NamedTuple):
    """Content of a page: the preceding page's key, its tokens, and its own key (empty unless it is full)."""

    parent: bytes
    content: bytes
    key: bytes


class PrefixCache:
    """Index of the contents of cached pages.

    Attributes:
        page_size: Tokens per page.
        min_shared_tokens: Fewest shared tokens that are worth copying a page.
        unsettled: Pages that ``settle`` makes available.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.min_shared_tokens = max(1, page_size // 8)
        self._epoch = 0
        self._records: dict[int, PageRecord] = {}
        self._page_of: dict[bytes, int] = {}
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        self.unsettled: set[int] = set()

    def __len__(self) -> int:
        """Return the number of cached pages."""
        return len(self._records)

    def __contains__(self, page: int) -> bool:
        """Whether a page is cached."""
        return page in self._records

    def record(self, page: int) -> PageRecord:
        """Return the content of a cached page."""
        return self._records[page]

    def share_roots(self, other: "PrefixCache") -> None:
        """Use the root keys of another cache, so that contexts have the same keys in both; this one must be empty."""
        assert not self._records
        self._epoch = other._epoch

    def root_key(self, name: bytes) -> bytes:
        """Return the key that precedes the first page of all contexts with this ``name``; ``reset`` changes it."""
        return hashlib.sha256(struct.pack("<q", self._epoch) + name).digest()

    def key(self, parent: bytes, content: bytes) -> bytes:
        """Return the key of a full page."""
        return hashlib.sha256(parent + content).digest()

    def find(self, key: bytes) -> int | None:
        """Return the page with this key, or None."""
        return self._page_of.get(key)

    def find_partial(self, parent: bytes, content: bytes) -> PartialHit | None:
        """Return the page after ``parent`` with the longest common prefix with ``content``, if it is worth copying.

        The longest common prefix is with a neighbour in sorted order, so only two pages are compared.
        """
        entries = self._children.get(parent)
        if entries is None or len(content) < self.min_shared_tokens * TOKEN_BYTES:
            return None
        index = bisect.bisect_left(entries, (content, -1))
        best: PartialHit | None = None
        for other, page in entries[max(index - 1, 0) : index + 1]:
            num_tokens = _num_common_tokens(other, content)
            if num_tokens >= self.min_shared_tokens and (best is None or num_tokens > best.num_tokens):
                best = PartialHit(page, num_tokens)
        return best

    def add(self, page: int, parent: bytes, content: bytes, key: bytes = b"") -> None:
        """Add a page's content, with a ``key`` if the page is full. Does nothing if another page has the same content.

        ``find`` returns the page at once, ``find_partial`` from the next ``settle`` on.
        """
        if key:
            if self._page_of.setdefault(key, page) != page:
                return
        elif len(content) < self.min_shared_tokens * TOKEN_BYTES or self._is_cached(parent, content):
            return
        if page in self._records:
            self._remove(page)
        self._records[page] = PageRecord(parent, content, key)
        self.unsettled.add(page)

    def settle(self) -> None:
        """Make the pages added so far available to ``find_partial``.

        Called before a step is planned, because its copies run before the step: every page added so far is written by
        an earlier step, and none is the target of a copy in the same plan.
        """
        for page in self.unsettled:
            parent, content, _ = self._records[page]
            bisect.insort(self._children.setdefault(parent, []), (content, page))
        self.unsettled.clear()

    def forget(self, page: int) -> None:
        """Remove a page, if it is cached."""
        if page in self._records:
            self._remove(page)
            key = self._records.pop(page).key
            if key:
                del self._page_of[key]

    def forget_context(self, parent: bytes, content: bytes) -> None:
        """Remove every page after ``parent`` whose content is a prefix of ``content``."""
        self.settle()
        pages = [page for other, page in self._children.get(parent, ()) if content.startswith(other)]
        for page in pages:
            self.forget(page)

    def reset(self) -> None:
        """Remove all pages. Contexts from before the reset never match later ones, because root keys change."""
        self._epoch += 1
        self._records.clear()
        self._page_of.clear()
        self._children.clear()
        self.unsettled.clear()

    def _is_cached(self, parent: bytes, content: bytes) -> bool:
        """Whether a settled page starts with this content."""
        entries = self._children.get(parent, [])
        index = bisect.bisect_left(entries, (content, -1))
        return index < len(entries) and entries[index][0].startswith(content)

    def _remove(self, page: int) -> None:
        """Remove a page from the sorted contents, or from the unsettled pages."""
        if page in self.unsettled:
            self.unsettled.remove(page)
            return
        parent, content, _ = self._records[page]
        entries = self._children[parent]
        del entries[bisect.bisect_left(entries, (content, page))]
        if not entries:
            del self._children[parent]


def _num_common_tokens(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix in tokens."""
    if second.startswith(first) or first.startswith(second):
        return min(len(first), len(second)) // TOKEN_BYTES
    num_same = next(i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return num_same // TOKEN_BYTES
