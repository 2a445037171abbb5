"""Allocate the state pages of sequences, and keep states of earlier contexts as checkpoints of the prefix cache.

A state page holds the states of all recurrent layers after one context. A running sequence has one, which its rows
update in place; a checkpoint is a state page that no row updates, found by the context that it stands for: the key of
its last full page of tokens, and the tokens after that.

The device runs steps in order, so that a page may be given away while rows of steps in flight still write to it: the
next row of its new sequence replaces what it finds there. A checkpoint may be copied by the plans after the one that
writes it (``settle``), as copies run before a step.
"""

import dataclasses
from collections.abc import Iterator

from jaxserve.scheduling.dropped_contexts import DroppedContexts


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A state of the prefix cache.

    Attributes:
        page: Its state page.
        parent: Key of the last full page of its context.
        content: Packed tokens of its context after that page.
        num_new_tokens: Tokens between the checkpoint before it and this one when it was made: what it saves. Of one
            that is not spare, those that are do not count, as they are dropped before it.
        is_spare: Whether it was made for no better reason than its distance from others. Until its first hit, it is
            dropped before those that are not.
        num_hits: Contexts that went on from it.
        last_used: Clock when it was made or last hit.
    """

    page: int
    parent: bytes
    content: bytes
    num_new_tokens: int
    is_spare: bool
    last_used: int
    num_hits: int = 0

    def value(self, clock: int) -> float:
        """Return what decides which checkpoint is dropped, the least one first."""
        return self.num_new_tokens * (1 + self.num_hits) / (clock - self.last_used + 1)


class StateAllocator:
    """Allocates state pages ``0 .. num_pages - 1`` to running sequences and to checkpoints.

    Attributes:
        dropped: Contexts of the latest checkpoints that were dropped for others.

    Args:
        num_pages: Number of state pages.
        max_running: Most pages that sequences have; the others are for checkpoints, as are those of no sequence.
        keeps_checkpoints: Whether there are checkpoints at all.
    """

    def __init__(self, num_pages: int, max_running: int, keeps_checkpoints: bool = True):
        self.num_pages, self.max_running = num_pages, max_running
        self.keeps_checkpoints = keeps_checkpoints and num_pages > max_running
        self._free = list(range(num_pages - 1, -1, -1))
        self._checkpoints: dict[int, Checkpoint] = {}
        self._spares: dict[int, Checkpoint] = {}  # those that were never hit
        self._after: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._unsettled: set[int] = set()
        self.dropped = DroppedContexts()
        self._clock = 0

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints."""
        return len(self._checkpoints)

    @property
    def num_running(self) -> int:
        """Number of pages that sequences have."""
        return self.num_pages - len(self._free) - len(self._checkpoints)

    @property
    def num_spare(self) -> int:
        """Number of pages that a checkpoint may take without dropping another one, with room for all sequences."""
        return max(0, self.num_pages - self.max_running - len(self._checkpoints))

    def allocate(self) -> int:
        """Allocate a page to a sequence, of which there are at most ``max_running``."""
        self._clock += 1
        if not self._free:
            self._drop_least()
        return self._free.pop()

    def free(self, page: int) -> None:
        """Free the page of a sequence."""
        assert page not in self._checkpoints and page not in self._free, f"state page {page} freed twice"
        self._free.append(page)

    def find(self, parent: bytes, content: bytes) -> Checkpoint | None:
        """Return the checkpoint after ``parent`` with the longest content that ``content`` starts with."""
        found = (
            each
            for own, each in self._after.get(parent, {}).items()
            if content.startswith(own) and each.page not in self._unsettled
        )
        return max(found, key=lambda each: len(each.content), default=None)

    def hit(self, checkpoint: Checkpoint) -> None:
        """Count a context that goes on from a checkpoint."""
        checkpoint.num_hits += 1
        self._spares.pop(checkpoint.page, None)
        checkpoint.last_used = self._clock

    def reserve(self, parent: bytes, content: bytes, num_new_tokens: int, *, is_spare: bool) -> int | None:
        """Make a checkpoint that the step being planned writes, and return its page.

        Args:
            parent: Key of the last full page of its context.
            content: Tokens of its context after that.
            num_new_tokens: As in ``Checkpoint``.
            is_spare: As in ``Checkpoint``.

        Returns:
            The page to write; None if there is such a checkpoint already, or no page for it.
        """
        if not self.keeps_checkpoints or self._is_known(parent, content):
            return None
        if not self.has_room(is_spare=is_spare) or not (self._free or self._drop_least(below_spare=is_spare)):
            return None
        return self._add(Checkpoint(self._free.pop(), parent, content, num_new_tokens, is_spare, self._clock))

    def has_room(self, *, is_spare: bool) -> bool:
        """Return whether ``reserve`` finds a page.

        The checkpoints of the plan that is made cannot be dropped, and sequences need the other pages.
        """
        if len(self._unsettled) >= self.num_pages - self.max_running:
            return False
        return bool(self._free) or any(self._settled(self._spares if is_spare else self._checkpoints))

    def keep(self, page: int, parent: bytes, content: bytes, num_new_tokens: int) -> bool:
        """Make the page of a sequence that has ended a checkpoint; return False, with nothing done, if there is one
        already or none are kept."""
        if not self.keeps_checkpoints or self._is_known(parent, content):
            return False
        self._add(Checkpoint(page, parent, content, num_new_tokens, False, self._clock))
        self._unsettled.discard(page)  # written by steps that are planned, none of which may follow this
        return True

    def checkpoints(self) -> list[tuple[Checkpoint, int]]:
        """Return all checkpoints with their ages, those that would be dropped last first."""
        firm = [each for each in self._checkpoints.values() if each.page not in self._spares]
        firm.sort(key=lambda each: each.value(self._clock), reverse=True)
        return [(each, self._clock - each.last_used) for each in [*firm, *reversed(self._spares.values())]]

    def adopt(self, checkpoint: Checkpoint, age: int) -> int | None:
        """Make a checkpoint like one of another allocator, as long after its last use; call it for the oldest first.

        Returns:
            The page to copy it to; None if there is such a checkpoint already, or no page is free.
        """
        known = checkpoint.content in self._after.get(checkpoint.parent, {})
        if known or not (self.keeps_checkpoints and self._free):
            return None
        own = dataclasses.replace(checkpoint, page=self._free.pop(), last_used=self._clock - age)
        self._add(own)
        if own.num_hits:
            self._spares.pop(own.page, None)
        self._unsettled.discard(own.page)
        return own.page

    def settle(self) -> None:
        """Make the checkpoints so far available; called before a step is planned."""
        self._unsettled.clear()

    def forget(self, parent: bytes, content: bytes) -> None:
        """Remove every checkpoint after ``parent`` whose content is a prefix of ``content``."""
        found = [each for own, each in self._after.get(parent, {}).items() if content.startswith(own)]
        for each in found:
            self._remove(each)

    def reset(self) -> None:
        """Remove all checkpoints."""
        for each in [*self._checkpoints.values()]:
            self._remove(each)
        self.dropped.clear()

    def _is_known(self, parent: bytes, content: bytes) -> bool:
        """Whether there is a checkpoint of a context, which is then as young as a new one."""
        known = self._after.get(parent, {}).get(content)
        if known is not None:
            known.last_used = self._clock
            if known.page in self._spares:
                self._spares[known.page] = self._spares.pop(known.page)
        return known is not None

    def _add(self, checkpoint: Checkpoint) -> int:
        self._checkpoints[checkpoint.page] = checkpoint
        if checkpoint.is_spare:
            self._spares[checkpoint.page] = checkpoint
        self._after.setdefault(checkpoint.parent, {})[checkpoint.content] = checkpoint
        self._unsettled.add(checkpoint.page)
        return checkpoint.page

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.page]
        self._spares.pop(checkpoint.page, None)
        after = self._after[checkpoint.parent]
        del after[checkpoint.content]
        if not after:
            del self._after[checkpoint.parent]
        self._unsettled.discard(checkpoint.page)
        self._free.append(checkpoint.page)

    def _settled(self, checkpoints: dict[int, Checkpoint]) -> Iterator[Checkpoint]:
        """Yield those checkpoints that no step being planned writes."""
        return (each for page, each in checkpoints.items() if page not in self._unsettled)

    def _least(self, below_spare: bool = False) -> Checkpoint | None:
        """Return the least valuable checkpoint that no step being planned writes, if there is one to drop.

        Args:
            below_spare: Whether only one that was made for its distance, and never hit, may be dropped.
        """
        spare = next(self._settled(self._spares), None)  # the oldest: all save about as much
        if spare is not None or below_spare:
            return spare
        return min(self._settled(self._checkpoints), key=lambda each: each.value(self._clock), default=None)

    def _drop_least(self, below_spare: bool = False) -> bool:
        """Drop the least valuable checkpoint, as ``_least`` returns it; return False if there is none."""
        least = self._least(below_spare)
        if least is not None:
            self._remove(least)
            self.dropped.add(least.parent, least.content)
        return least is not None
