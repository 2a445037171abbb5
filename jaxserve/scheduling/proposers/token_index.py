"""Index where runs of tokens occurred: 32 bytes per token, in arrays.

``pallas_kernels/native/token_index.c`` has the same in C, on the same arrays.
"""

import ctypes
from array import array
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from pallas_kernels import native_library

SIZES = (16, 6, 2)
"""Lengths of the runs that are indexed."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_POWERS = {size: [pow(_MULTIPLIER, power, 1 << 64) for power in range(size, 0, -1)] for size in SIZES}
_MAX_VISITS = 32
_MAX_PLACES = 16
LONGEST_MATCH = 256
"""Longest match by which places are told apart."""
_FEW_TOKENS = 24  # up to which single writes are faster than NumPy


def find_library() -> ctypes.CDLL | None:
    """Return the native library, or None if it cannot run in this process."""
    return declared(native_library.library()) if native_library.unavailable() is None else None


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of a library's functions on indexes; return the library."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.jaxserve_index_write.argtypes = (pointer, number, pointer, number, number)
    library.jaxserve_propose.argtypes = (pointer, pointer, pointer, number, pointer, pointer)
    library.jaxserve_index_write.restype = library.jaxserve_propose.restype = None
    return library


class TokenIndex:
    """A ring of tokens, and for each run of 2, 6 or 16 tokens the places where it occurred, the latest first.

    As in a Lempel-Ziv compressor, the runs of one length are in buckets by a hash; each bucket knows its latest run,
    and each run the one before it in its bucket. Tokens are compared when a run is looked up, so what has been
    overwritten since is never found. A place is the slot after a run.

    Attributes:
        num_slots: Length of the ring, a power of two.
        address: Address of the index for the native library.

    Args:
        num_slots: Length of the ring, a power of two.
        library: The native library, which writes tokens; None: Python does.
    """

    def __init__(self, num_slots: int, library: ctypes.CDLL | None = None):
        self.num_slots, self._library = num_slots, library
        self._shift = 64 - (num_slots.bit_length() - 1)
        self._tokens = np.zeros(num_slots, np.int64)  # zero: no token
        self._earlier = [np.zeros(num_slots, np.int32) for _ in SIZES]  # of a run's last slot: the earlier place, or 0
        self._latest = [np.zeros(num_slots, np.int32) for _ in SIZES]  # of a bucket: the latest place, or 0
        addresses = [each.ctypes.data for each in (self._tokens, *self._earlier, *self._latest)]
        fields = np.array([num_slots, 0, 0, *addresses], np.int64)
        self._fields, self.address = fields.data, fields.ctypes.data
        # Single items of a memoryview are read three times as fast as those of an array.
        self._token = self._tokens.data
        self._links = [
            (size, earlier.data, latest.data)
            for size, earlier, latest in zip(SIZES, self._earlier, self._latest, strict=True)
        ]

    @property
    def end(self) -> int:
        """Slot after the last token written."""
        return self._fields[1]

    @property
    def cursor(self) -> int:
        """Of the index of a text: the place in past outputs that it goes on from; 0: none."""
        return self._fields[2]

    @cursor.setter
    def cursor(self, place: int) -> None:
        self._fields[2] = place

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in (self._tokens, *self._earlier, *self._latest))

    def erase(self, start: int, end: int) -> None:
        """Remove the tokens of some slots."""
        self._tokens[start:end] = 0

    def write(self, start: int, tokens: list[int], offset: int = 0) -> None:
        """Write tokens from a slot on; they go on with what is before, and end before the ring does, with no token.

        Args:
            start: The first slot.
            tokens: The tokens.
            offset: Added to each: the sums are what the index knows, and none is 0.
        """
        if self._library is not None:
            given = array("i", tokens)
            self._library.jaxserve_index_write(self.address, start, given.buffer_info()[0], len(given), offset)
            return
        self._fields[1] = end = start + len(tokens)
        self._tokens[start:end] = np.asarray(tokens, np.int64) + offset
        self._tokens[end] = 0
        if len(tokens) > _FEW_TOKENS:
            for size, earlier, latest in zip(SIZES, self._earlier, self._latest, strict=True):
                self._link_all(max(start, size - 1), size, earlier, latest)
            return
        for place in range(start + 1, end + 1):
            for size, earlier, latest in self._links:
                if place >= size:
                    bucket = self._bucket(self._token[place - size : place].tolist(), size)
                    earlier[place - 1], latest[bucket] = latest[bucket], place

    def following(self, place: int, count: int) -> list[int]:
        """Return at most ``count`` tokens from a place on; 0 ends a text."""
        return self._token[place : place + count].tolist()

    def follow(self, place: int, tokens: list[int]) -> int:
        """Return the place after some tokens that are at a place, and 0 if others are."""
        return place + len(tokens) if place and self.following(place, len(tokens)) == tokens else 0

    def places(self, context: list[int], cursor: int = 0) -> tuple[list[int], int]:
        """Find where the longest known end of a text occurred.

        Args:
            context: The last tokens of a text, as many as may match. If the text is this index's own, its end does not
                count as an occurrence.
            cursor: A place to look at first; 0: none.

        Returns:
            At most 16 places, the latest first after the cursor, and the number of tokens that match there.
        """
        for size, earlier, latest in self._links:
            if len(context) < size:
                continue
            run = context[-size:]
            places = self._visit(latest[self._bucket(run, size)], run, earlier, cursor)
            if places:
                return self._longest(places, size, context)
        return [], 0

    def _bucket(self, run: list[int], size: int) -> int:
        return (sum(map(mul, run, _POWERS[size])) & _WORD) >> self._shift

    def _visit(self, place: int, run: list[int], earlier: Any, cursor: int) -> list[int]:
        """Return the places of a run: the cursor, then those from the latest in the bucket on; not the ring's end."""
        end, age, found = self.end, -1, [cursor] if self._is_here(cursor, run) else []
        for _ in range(_MAX_VISITS):
            previous_age, age = age, (end - place) % self.num_slots
            if not place or age <= previous_age or len(found) == _MAX_PLACES:
                break  # a place that has been overwritten leads anywhere
            if place != cursor and self._is_here(place, run):
                found.append(place)
            place = earlier[place - 1]
        return found

    def _is_here(self, place: int, run: list[int]) -> bool:
        start = place - len(run)
        return place != self.end and start >= 0 and self._token[start:place].tolist() == run

    def _longest(self, places: list[int], size: int, context: list[int]) -> tuple[list[int], int]:
        """Return those of the places where most tokens match, and how many do."""
        token = self._token
        for length in range(size + 1, len(context) + 1):
            expected = context[-length]
            longer = [place for place in places if place >= length and token[place - length] == expected]
            if not longer:
                return places, length - 1
            places = longer
        return places, len(context)

    def _link_all(self, first: int, size: int, earlier: npt.NDArray[np.int32], latest: npt.NDArray[np.int32]) -> None:
        """Link the runs of one length whose last tokens are in the slots from ``first`` to the end."""
        count = self.end - first
        if count <= 0:
            return
        words = self._tokens.view(np.uint64)
        hashes = np.zeros(count, np.uint64)
        for before in range(size - 1, -1, -1):
            hashes = (hashes + words[first - before : self.end - before]) * np.uint64(_MULTIPLIER)
        buckets = hashes >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        ordered, places = buckets[order], (order + first + 1).astype(np.int32)
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        previous = np.concatenate([places[:1], places[:-1]])
        previous[is_first] = latest[ordered[is_first]]
        earlier[places - 1] = previous
        is_last = np.concatenate([is_first[1:], [True]])
        latest[ordered[is_last]] = places[is_last]
