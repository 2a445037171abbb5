"""Log-probabilities as arrays, without an object for each: how the engine keeps those of prompts, and how all cross the
socket between a server's engine process and front end."""

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

from jaxserve.api.logprobs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs


@dataclass(slots=True)
class PackedLogprobs(AbstractSequence[dict[int, Logprob]]):
    """The log-probabilities of many positions, without an object for each; read like a list with a dict per position.

    Only reading makes ``Logprob`` objects, all at once. An empty dict stands for None.

    Attributes:
        lengths: int32: number of entries of each position.
        token_ids: int32: of all entries, like the following.
        logprobs: float32.
        ranks: int32; 0 stands for None.
        text_lengths: int32: bytes of each text in ``texts``; -1 stands for None.
        texts: In UTF-8.
        raw_lengths: int32: bytes of each token in ``raws``; -1 stands for None.
        raws: Tokens' own bytes where they are not their texts.
        offsets: int32; -1 stands for None.
    """

    lengths: bytes | bytearray
    token_ids: bytes | bytearray
    logprobs: bytes | bytearray
    ranks: bytes | bytearray
    text_lengths: bytes | bytearray
    texts: bytes | bytearray
    raw_lengths: bytes | bytearray
    raws: bytes | bytearray
    offsets: bytes | bytearray

    @classmethod
    def of(cls, positions: SampleLogprobs | PromptLogprobs) -> "PackedLogprobs":
        """Pack the log-probabilities of positions.

        Raises:
            ValueError: A text is not valid Unicode.
        """
        flat = positions if isinstance(positions, FlatLogprobs) else FlatLogprobs.of(positions)
        texts = [None if text is None else text.encode() for text in flat.decoded_tokens]
        return cls(
            lengths=_ints(end - start for start, end in zip(flat.start_indices, flat.end_indices, strict=True)),
            token_ids=_ints(flat.token_ids),
            logprobs=array("f", flat.logprobs).tobytes(),
            ranks=_ints(rank or 0 for rank in flat.ranks),
            text_lengths=_ints(-1 if text is None else len(text) for text in texts),
            texts=b"".join(filter(None, texts)),
            raw_lengths=_ints(-1 if raw is None else len(raw) for raw in flat.token_bytes),
            raws=b"".join(filter(None, flat.token_bytes)),
            offsets=_ints(-1 if offset is None else offset for offset in flat.text_offsets),
        )

    @classmethod
    def empty(cls) -> "PackedLogprobs":
        """Return one without positions, to be extended."""
        return cls(*(bytearray() for _ in cls.__slots__))

    @property
    def num_entries(self) -> int:
        """Number of entries of all positions."""
        return len(self.token_ids) // 4

    def extend(self, other: "PackedLogprobs") -> None:
        """Add the next positions, at the cost of these."""
        for name in self.__slots__:
            held = getattr(self, name)
            if not isinstance(held, bytearray):
                setattr(self, name, held := bytearray(held))
            held += getattr(other, name)

    def add_empty(self, num_positions: int) -> None:
        """Add positions without entries."""
        lengths = bytearray(self.lengths)
        lengths += bytes(4 * num_positions)
        self.lengths = lengths

    def parts(self, num_positions: int) -> Iterator[FlatLogprobs]:
        """Yield the log-probabilities of this many positions at a time, as lists."""
        lengths = _list("i", self.lengths)
        entry = text = raw = 0
        for first in range(0, len(lengths), num_positions):
            own = lengths[first : first + num_positions]
            entries = slice(4 * entry, 4 * (entry := entry + sum(own)))
            text_lengths, raw_lengths = self.text_lengths[entries], self.raw_lengths[entries]
            texts = slice(text, text := text + _total(text_lengths))
            raws = slice(raw, raw := raw + _total(raw_lengths))
            yield PackedLogprobs(
                lengths=_ints(own),
                token_ids=self.token_ids[entries],
                logprobs=self.logprobs[entries],
                ranks=self.ranks[entries],
                text_lengths=text_lengths,
                texts=self.texts[texts],
                raw_lengths=raw_lengths,
                raws=self.raws[raws],
                offsets=self.offsets[entries],
            ).unpacked()

    def unpacked(self) -> FlatLogprobs:
        """Return the log-probabilities as lists."""
        ends = list(accumulate(_list("i", self.lengths), initial=0))
        raws = _cut(self.raws, self.raw_lengths)
        return FlatLogprobs(
            start_indices=ends[:-1],
            end_indices=ends[1:],
            token_ids=_list("i", self.token_ids),
            logprobs=_list("f", self.logprobs),
            ranks=[rank or None for rank in _list("i", self.ranks)],
            decoded_tokens=[None if text is None else text.decode() for text in _cut(self.texts, self.text_lengths)],
            token_bytes=list(raws),
            text_offsets=[None if offset < 0 else offset for offset in _list("i", self.offsets)],
        )

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.lengths) // 4

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        """One position, or several."""
        return self.unpacked()[index]

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        """Return each position as a dict."""
        return iter(self.unpacked())


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def _list(kind: str, packed: bytes | bytearray) -> list[Any]:
    values = array(kind)
    values.frombytes(packed)
    return values.tolist()


def _cut(joined: bytes | bytearray, lengths: bytes | bytearray) -> Iterator[bytes | None]:
    """Yield the parts of joined bytes; None for those of length -1."""
    sizes = _list("i", lengths)
    ends = accumulate((max(size, 0) for size in sizes), initial=0)
    for size, (start, end) in zip(sizes, pairwise(ends), strict=True):
        yield None if size < 0 else bytes(joined[start:end])


def _total(lengths: bytes | bytearray) -> int:
    """Return the sum of lengths, of which -1 stands for None."""
    return sum(max(length, 0) for length in _list("i", lengths))
