"""Look up how texts went on after earlier occurrences of their last tokens: in Python, and with the native library.

Both find the same. The native library takes all rows of a step in one call.
"""

import ctypes
import dataclasses
from array import array
from typing import NamedTuple

from jaxserve.scheduling.proposers.token_index import LONGEST_MATCH, TokenIndex


@dataclasses.dataclass(frozen=True)
class Rules:
    """How far a continuation goes.

    Attributes:
        depth: Longest match that counts.
        least: Share of all occurrences that must go on with a token.
        lengths: Most drafts after a match of each length, up to the depth.
    """

    depth: int
    least: float
    lengths: list[int]


class Row(NamedTuple):
    """A text whose continuation is looked up.

    Attributes:
        own: Its own index.
        offset: What its tokens are raised by in all indexes.
        new: Its tokens that the index does not know yet.
        num_in_flight: Number of tokens that steps in flight sample: drafts come after these.
    """

    own: TokenIndex
    offset: int
    new: list[int]
    num_in_flight: int


class PlainSearch:
    """Searches in Python.

    Args:
        rules: How far a continuation goes.
        past: The index of past outputs.
    """

    def __init__(self, rules: Rules, past: TokenIndex):
        self._rules, self._past = rules, past

    def continuations(self, rows: list[Row]) -> list[list[int]]:
        """Write the new tokens of each row, and return its most promising continuation; empty if there is none."""
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: Row) -> list[int]:
        rules, own, past = self._rules, row.own, self._past
        cursor = past.follow(own.cursor, [token + row.offset for token in row.new])
        if row.new:
            own.write(own.end, row.new, row.offset)
        end, best, best_score, best_match = own.end, list[int](), 0.0, 0
        length = min(end, max(rules.depth, LONGEST_MATCH))
        context = own.following(end - length, length)
        in_past = past.places(context, cursor)
        own.cursor = in_past[0][0] if in_past[0] else 0
        for index, (places, match) in ((own, own.places(context)), (past, in_past)):
            count = rules.lengths[min(match, rules.depth)]
            if count:
                most = row.num_in_flight + count
                options = [index.following(place, min(most, end - place) if index is own else most) for place in places]
                drafts, score = _follow(options, most, row.num_in_flight, rules.least)
                if (score, match) >= (best_score, best_match):
                    best, best_score, best_match = drafts, score, match
        return [value - row.offset for value in best]


class NativeSearch:
    """Searches with the native library.

    Args:
        rules: How far a continuation goes.
        past: The index of past outputs.
        library: The native library.
    """

    def __init__(self, rules: Rules, past: TokenIndex, library: ctypes.CDLL):
        self._library = library
        self._lengths, self._past = array("i", rules.lengths), past
        self._rules = _Rules(rules.depth, rules.least, self._lengths.buffer_info()[0])
        self._rules_address = ctypes.addressof(self._rules)
        self._most = max(rules.lengths)

    def continuations(self, rows: list[Row]) -> list[list[int]]:
        """Write the new tokens of each row, and return its most promising continuation; empty if there is none."""
        fields, new_tokens, most = list[int](), list[int](), self._most * len(rows)
        for own, offset, new, num_in_flight in rows:
            fields += own.address, offset, len(new), num_in_flight
            new_tokens += new
            most += num_in_flight
        columns, tokens, drafts = array("q", fields), array("i", new_tokens), array("i", bytes(8 * most))
        address, *others = (each.buffer_info()[0] for each in (columns, tokens, drafts))
        self._library.jaxserve_propose(self._rules_address, self._past.address, address, len(rows), *others)
        counts = columns[2::4]
        values, found, start = drafts[: sum(counts)].tolist(), list[list[int]](), 0
        for count in counts:
            found.append(values[start : start + count])
            start += count
        return found


class _Rules(ctypes.Structure):
    """The layout of ``Rules`` in ``native/token_index.c``."""

    _fields_ = [("depth", ctypes.c_int64), ("least", ctypes.c_double), ("lengths", ctypes.c_void_p)]


def _follow(options: list[list[int]], most: int, num_known: int, least: float) -> tuple[list[int], float]:
    """Return the most frequent continuation, and its expected number of right tokens.

    It ends where its share of all options falls below ``least``. The first ``num_known`` tokens do not count. Where an
    option ends, it goes on with the continuation.
    """
    total, found, num_right = len(options), list[int](), 0
    for place in range(most):
        column = [option[place] if place < len(option) else found[place - len(option)] for option in options]
        token = max(column, key=column.count)
        options = [option for option, here in zip(options, column, strict=True) if here == token]
        if not token or len(options) / total < least:
            break
        if place >= num_known:
            num_right += len(options)
        found.append(token)
    return found, num_right / total
