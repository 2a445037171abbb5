"""Manage the recurrent states of a sequence: find a checkpoint to go on from, say where to keep states, and free them.

A context can go on from a checkpoint only where the cache has the keys and values of all its tokens too, and then uses
the cached pages up to there: those after it are computed again, into pages of its own, so that no page of others is
written. States are kept where they are likely to be needed: before the part of a prompt that templates put before the
answer, which the next turn of a conversation does not repeat; where a prompt leaves a cached one, as others may too; at
the end of a context, whose state then is the checkpoint; and by distance, while there is room, also while a context
decodes.
"""

from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import PageCopy, SchedulerLimits, StateSnapshot
from jaxserve.scheduling.prefix_cache import TOKEN_BYTES, pack_tokens
from jaxserve.scheduling.sequence import Sequence, WantedState
from jaxserve.scheduling.state_allocator import Checkpoint, StateAllocator

_GENERATION_PROMPT = 16  # tokens before an answer, of a prompt that does not say how many
_DISTANCE = 256
_PLENTY = 4  # free pages for checkpoints, times the pages of a prompt, from which each of its pages gets one


class ContextStates:
    """The states of sequences.

    Args:
        allocator: Allocator of the state pages.
        page_size: Tokens of a page of keys and values.
        has_drafts: Whether rows have drafts, so that a sequence has a second page.
        is_small: Whether a state takes no more memory than a page, so that each page gets one.
        is_aligned: Whether a context can go on after full pages only, so that no other states are kept.
    """

    def __init__(
        self,
        allocator: StateAllocator,
        page_size: int,
        has_drafts: bool = False,
        is_small: bool = False,
        is_aligned: bool = False,
    ):
        self.allocator, self._unit = allocator, page_size if is_aligned else 1
        self._page_size, self._has_drafts = page_size, has_drafts
        self._distance = page_size if is_small else -(-_DISTANCE // page_size) * page_size

    def find(self, sequence: Sequence, num_common: int) -> tuple[Checkpoint, int] | None:
        """Return the deepest checkpoint to go on from, and its length; at least one token is left to compute.

        Args:
            sequence: A waiting sequence, whose page keys are known up to the page of token ``num_common``.
            num_common: Tokens whose keys and values are cached.
        """
        end = min(num_common, len(sequence.token_ids) - 1)
        for index in range(end // self._page_size, -1, -1):
            found = self.allocator.find(sequence.page_keys[index], self._content(sequence, index, end))
            if found is not None:
                return found, index * self._page_size + len(found.content) // TOKEN_BYTES
        return None

    def begin(self, sequence: Sequence, hit: tuple[Checkpoint, int] | None, num_common: int) -> None:
        """Give a sequence that is admitted a state page, to which the state of a checkpoint is copied, and choose where
        to keep states of it."""
        start, sequence.state_source = 0, -1
        if hit is not None:
            self.allocator.hit(hit[0])
            sequence.state_source, start = hit[0].page, hit[1]
        sequence.state_page, sequence.last_state = self.allocator.allocate(), start
        if self._has_drafts:
            sequence.draft_page, sequence.draft_length = self.allocator.allocate(), 0
        sequence.wanted_states = self._wanted(sequence, start, num_common)

    def snapshots(self, sequence: Sequence, row: int, start: int, end: int) -> list[StateSnapshot]:
        """Return the states to keep from within a row of tokens from ``start`` to ``end``."""
        found, wanted = list[StateSnapshot](), sequence.wanted_states
        while wanted and wanted[0].length <= end:
            length, is_spare, num_new_tokens = wanted.pop(0)
            page = self.allocator.reserve(*self._key(sequence, length), num_new_tokens, is_spare=is_spare)
            sequence.last_state = sequence.last_state if is_spare else length
            if page is not None:
                found.append(StateSnapshot(row, length - start, page))
        return found

    def is_due(self, sequence: Sequence) -> bool:
        """Return whether the state of a decoding sequence is to be kept as it is before the next row."""
        length = sequence.num_computed
        is_right = length <= len(sequence.token_ids) and sequence.restart < 0
        return self.allocator.keeps_checkpoints and not length % self._distance and is_right

    def keep_running(self, sequence: Sequence) -> list[PageCopy]:
        """Return the copy of a decoding sequence's state to a checkpoint, unless there is one or no room for it.

        The steps that are planned have all tokens of the state, and the host knows them.
        """
        key = self._key(sequence, sequence.num_computed)
        page = self.allocator.reserve(*key, self._distance, is_spare=True)
        return [] if page is None else [PageCopy(sequence.state_page, page)]

    def was_dropped(self, sequence: Sequence, start: int, end: int) -> bool:
        """Return whether a checkpoint between two lengths of a sequence's context was dropped for others."""
        pages = range(start // self._page_size, end // self._page_size + 1)
        dropped, keys = self.allocator.dropped, sequence.page_keys
        return any(dropped.has(keys[index], self._content(sequence, index, end)) for index in pages)

    def release(self, sequence: Sequence) -> None:
        """Free the state page of a sequence; where the state is that of known tokens, it becomes a checkpoint.

        A state has all tokens of the steps that are planned, among them those in flight. With drafts that were or may
        be rejected, that of the tokens before them counts.
        """
        page, length, other = sequence.state_page, sequence.num_computed, sequence.draft_page
        if page < 0:
            return
        if sequence.restart >= 0 or (sequence.draft_length and length > len(sequence.token_ids)):
            page, length, other = other, sequence.draft_length, page
        if other >= 0:
            self.allocator.free(other)
        sequence.state_page, sequence.state_source, sequence.wanted_states = -1, -1, []
        sequence.draft_page, sequence.draft_length, sequence.restart = -1, 0, -1
        is_kept = sequence.finish_reason != "error" and 0 < length <= len(sequence.token_ids)
        is_kept = is_kept and not length % self._unit
        if is_kept and len(sequence.page_keys) > length // self._page_size:
            if self.allocator.keep(page, *self._key(sequence, length), length - sequence.last_state):
                return
        self.allocator.free(page)

    def forget(self, sequence: Sequence, first_page: int) -> None:
        """Remove the checkpoints of a sequence's own tokens from a page on."""
        for index in range(first_page, len(sequence.page_keys)):
            content = self._content(sequence, index, len(sequence.token_ids))
            self.allocator.forget(sequence.page_keys[index], content)

    def _wanted(self, sequence: Sequence, start: int, num_common: int) -> list[WantedState]:
        """Return the states to keep of the prompt, or of all tokens of a sequence that was preempted."""
        if not self.allocator.keeps_checkpoints:
            return []
        last, prompt, ending = len(sequence.token_ids) - 1, sequence.num_prompt_tokens, sequence.num_generation_tokens
        ending = max(1, _GENERATION_PROMPT if ending < 0 else ending)  # the same prompt has a token to compute
        lengths = [prompt - ending, num_common, *([prompt - 1] if sequence.followers else [])]
        lengths = [length // self._unit * self._unit for length in lengths]
        wanted = {length: False for length in lengths if start < length <= last}
        num_pages = last // self._page_size
        is_plenty = self.allocator.num_spare >= _PLENTY * num_pages
        distance = self._page_size if is_plenty else self._distance
        for length in range((start // distance + 1) * distance, last + 1, distance):
            wanted.setdefault(length, True)
        states, before, before_firm = list[WantedState](), start, start
        for length, is_spare in sorted(wanted.items()):
            states.append(WantedState(length, is_spare, length - (before if is_spare else before_firm)))
            before, before_firm = length, before_firm if is_spare else length
        return states

    def _key(self, sequence: Sequence, length: int) -> tuple[bytes, bytes]:
        """Return the key of the last full page of a sequence's first tokens, and the tokens after it."""
        index = length // self._page_size
        return sequence.page_keys[index], self._content(sequence, index, length)

    def _content(self, sequence: Sequence, index: int, end: int) -> bytes:
        start = index * self._page_size
        return pack_tokens(sequence.token_ids[start : min(start + self._page_size, end)])


def context_states(limits: SchedulerLimits, allocator: PageAllocator) -> ContextStates | None:
    """Return the states of a scheduler's sequences; None for a model without recurrent layers."""
    if not limits.num_states:
        return None
    has_drafts = limits.max_draft_tokens > 0
    states = StateAllocator(limits.num_states, limits.max_num_seqs * (1 + has_drafts), allocator.keeps_free_pages)
    is_aligned = not limits.shares_parts
    return ContextStates(states, allocator.page_size, has_drafts, limits.has_small_states, is_aligned)
