"""The prefix cache: which page has the keys and values of which tokens, after which context.

A page full of tokens has a key, the SHA-256 of the key before it and of its tokens, so that a key stands for a whole
context. Besides, the contents of pages, full or not, are kept sorted for each key, so that the page that shares most
of the tokens that follow is found for copying. Plain bytes; knows nothing about who holds a page.
"""

import bisect
import hashlib
import struct
from typing import NamedTuple

TOKEN_BYTES = 4


def pack_tokens(token_ids: list[int]) -> bytes:
    """Tokens as the bytes that contents and keys are made of: little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


class PartialHit(NamedTuple):
    """A page whose first ``num_tokens`` tokens are those looked for."""

    page: int
    num_tokens: int


class _Record(NamedTuple):
    """Content of a page: the key before it, its tokens, and its own key if it is full (else empty)."""

    parent: bytes
    content: bytes
    key: bytes


class PrefixCache:
    """Contents of pages of ``page_size`` tokens.

    Attributes:
        page_size: Tokens per page.
        min_shared_tokens: Fewer tokens than these are not worth the copy of a page.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.min_shared_tokens = max(1, page_size // 8)
        self._epoch = 0
        self._records: dict[int, _Record] = {}
        self._page_of: dict[bytes, int] = {}
        self._behind: dict[bytes, list[tuple[bytes, int]]] = {}
        self._unsettled: set[int] = set()

    def __len__(self) -> int:
        """Pages with a known content."""
        return len(self._records)

    def __contains__(self, page: int) -> bool:
        """Whether a page's content is known."""
        return page in self._records

    def root_key(self, name: bytes) -> bytes:
        """The key before the first page of contexts that share under ``name``; it changes with each ``reset``."""
        return hashlib.sha256(struct.pack("<q", self._epoch) + name).digest()

    def key(self, parent: bytes, content: bytes) -> bytes:
        """The key of a full page."""
        return hashlib.sha256(parent + content).digest()

    def find(self, key: bytes) -> int | None:
        """The page with this key."""
        return self._page_of.get(key)

    def find_partial(self, parent: bytes, content: bytes) -> PartialHit | None:
        """Return the page after ``parent`` that shares most of the first tokens of ``content``, if it is worth copying.

        The longest common beginning is with a neighbour in the sorted order, so two pages are looked at.
        """
        entries = self._behind.get(parent)
        if entries is None or len(content) < self.min_shared_tokens * TOKEN_BYTES:
            return None
        place = bisect.bisect_left(entries, (content, -1))
        best: PartialHit | None = None
        for other, page in entries[max(place - 1, 0) : place + 1]:
            num_tokens = _num_common_tokens(other, content)
            if num_tokens >= self.min_shared_tokens and (best is None or num_tokens > best.num_tokens):
                best = PartialHit(page, num_tokens)
        return best

    def add(self, page: int, parent: bytes, content: bytes, key: bytes = b"") -> None:
        """Notes a page's content; a full page has a key. Where another page is known to hold it, that one is kept.

        The page is found by its key at once, and for copying from the next ``settle`` on.
        """
        if key:
            if self._page_of.setdefault(key, page) != page:
                return
        elif len(content) < self.min_shared_tokens * TOKEN_BYTES or self._is_held(parent, content):
            return
        if page in self._records:
            self._take_out(page)
        self._records[page] = _Record(parent, content, key)
        self._unsettled.add(page)

    def settle(self) -> None:
        """From now on pages noted so far may be copied.

        Copies run before the step that is planned, so this is called before planning: then every page noted is
        written by a step before, and none is itself the target of a copy of the same plan.
        """
        for page in self._unsettled:
            parent, content, _ = self._records[page]
            bisect.insort(self._behind.setdefault(parent, []), (content, page))
        self._unsettled.clear()

    def forget(self, page: int) -> None:
        """Forgets a page's content, if it is known."""
        if page in self._records:
            self._take_out(page)
            key = self._records.pop(page).key
            if key:
                del self._page_of[key]

    def forget_context(self, parent: bytes, content: bytes) -> None:
        """Forget every page after ``parent`` whose content is a prefix of ``content``."""
        self.settle()
        pages = [page for other, page in self._behind.get(parent, ()) if content.startswith(other)]
        for page in pages:
            self.forget(page)

    def reset(self) -> None:
        """Forgets everything; contexts that began before never match contexts that begin afterwards."""
        self._epoch += 1
        self._records.clear()
        self._page_of.clear()
        self._behind.clear()
        self._unsettled.clear()

    def _is_held(self, parent: bytes, content: bytes) -> bool:
        """Whether a page that can be copied begins with this content."""
        entries = self._behind.get(parent, [])
        place = bisect.bisect_left(entries, (content, -1))
        return place < len(entries) and entries[place][0].startswith(content)

    def _take_out(self, page: int) -> None:
        """Takes a page out of the sorted order, if it is there yet."""
        if page in self._unsettled:
            self._unsettled.remove(page)
            return
        parent, content, _ = self._records[page]
        entries = self._behind[parent]
        del entries[bisect.bisect_left(entries, (content, page))]
        if not entries:
            del self._behind[parent]


def _num_common_tokens(first: bytes, second: bytes) -> int:
    """Tokens two contents begin with in common."""
    if second.startswith(first) or first.startswith(second):
        return min(len(first), len(second)) // TOKEN_BYTES
    num_same = next(i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return num_same // TOKEN_BYTES
