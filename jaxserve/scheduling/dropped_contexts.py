"""Remember contexts that the prefix cache has dropped, so that a miss can say that it had one."""

import collections

_MOST = 1 << 12


class DroppedContexts:
    """The latest contexts that were dropped, each the key of a page and the tokens after it.

    Args:
        most: Most contexts that are remembered.
    """

    def __init__(self, most: int = _MOST):
        self._most = most
        self._order: collections.deque[bytes] = collections.deque()
        self._contents: dict[bytes, tuple[bytes, ...]] = {}  # tuples of bytes cost the garbage collector nothing

    def add(self, key: bytes, content: bytes = b"") -> None:
        """Remember a context, and forget the oldest one if there are too many."""
        self._order.append(key)
        self._contents[key] = (*self._contents.get(key, ()), content)
        if len(self._order) > self._most:
            self._forget_oldest()

    def has(self, key: bytes, content: bytes = b"") -> bool:
        """Return whether a remembered context after a key has tokens that ``content`` starts with."""
        return any(content.startswith(own) for own in self._contents.get(key, ()))

    def clear(self) -> None:
        """Forget all."""
        self._order.clear()
        self._contents.clear()

    def _forget_oldest(self) -> None:
        key = self._order.popleft()
        _, *left = self._contents.pop(key)
        if left:
            self._contents[key] = tuple(left)
