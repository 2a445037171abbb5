"""The scheduler's part that appends sampled tokens to a sequence."""

from typing import NamedTuple

from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.endings import Ending, find_ending
from jaxserve.scheduling.sequence import Sequence


class Growth(NamedTuple):
    """The new tokens that a sequence keeps, and how it finishes with the last of them, if it does."""

    tokens: list[int]
    ending: Ending | None


def append_tokens(sequence: Sequence, tokens: list[int], pages: ContextPages) -> Growth:
    """Append tokens up to the one that finishes the sequence, and enter full pages into the prefix cache."""
    token_ids, stop_ids = sequence.token_ids, sequence.stop_ids
    for count, token in enumerate(tokens, 1):
        token_ids.append(token)
        if len(token_ids) < sequence.next_check and token not in stop_ids:
            continue
        ending = find_ending(sequence, token)
        if ending is not None:
            sequence.error = ending.error
            return Growth(tokens[:count], ending)
        if sequence.slot >= 0:
            pages.cache.register(sequence, len(token_ids) - 1)
        if sequence.constraint is None and sequence.repetition is None:
            sequence.next_check = min(sequence.max_length, pages.cache.page_end(sequence) + 1)
    return Growth(tokens, None)
