"""A number in all and by name, such as the bytes that the requests of each caller take."""

import collections
from collections.abc import Collection


class Tally:
    """Adds up a number, in all and by name.

    Attributes:
        total: The number in all.
    """

    def __init__(self):
        self.total = 0
        self._by_name: collections.Counter[str] = collections.Counter()

    def __getitem__(self, name: str) -> int:
        """Return the number of a name; 0 if it has none."""
        return self._by_name[name]

    @property
    def names(self) -> Collection[str]:
        """The names that have some."""
        return self._by_name.keys()

    def add(self, name: str, number: int) -> None:
        """Add to the number of a name, or take off it if ``number`` is negative."""
        self.total += number
        self._by_name[name] += number
        if not self._by_name[name]:
            del self._by_name[name]
