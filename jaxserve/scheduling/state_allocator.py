"""Allocate the state pages of sequences: each holds the states of all recurrent layers after one context."""


class StateAllocator:
    """Allocates state pages ``0 .. num_pages - 1``, each to one sequence, whose rows update it in place.

    A page that is freed may be given to another sequence at once, though rows of steps in flight still write to it: the
    device runs steps in order, and the new sequence's first row replaces what it finds there.

    Args:
        num_pages: Number of state pages.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence has."""
        return len(self._free)

    def allocate(self) -> int:
        """Allocate a page; there are as many as slots, so that one is free."""
        return self._free.pop()

    def free(self, page: int) -> None:
        """Free the page of a sequence."""
        assert page not in self._free, f"state page {page} freed twice"
        self._free.append(page)
