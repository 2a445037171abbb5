"""Owner of the KV pages: which are free. Plain integers; knows nothing about requests or devices."""


class PageAllocator:
    """Hands out pages ``0 .. num_pages - 1`` of ``page_size`` tokens."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Held share of the pages, in 0..1."""
        return 1.0 - len(self._free) / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None, and nothing taken, where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: list[int]) -> None:
        """Takes pages back, the last first, so that a context's first pages are the last to be reused."""
        for page in reversed(pages):
            assert not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = 1
        self._free.extend(reversed(pages))
