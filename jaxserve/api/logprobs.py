"""Log-probabilities in outputs: vLLM's classes and field names (`vllm/logprobs.py`)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary, 2 for the next; None if unknown."""
    decoded_token: str | None = None
    """The text of the token; U+FFFD if it is only part of a character. None with ``detokenize=False``."""
    token_bytes: bytes | None = field(default=None, compare=False, repr=False)
    """What the token adds to the text if that is not ``decoded_token``: a part of a character, or b"" for a token that
    the text leaves out. None: ``decoded_token`` in UTF-8."""
    text_offset: int | None = field(default=None, compare=False, repr=False)
    """Number of characters of the text before the token; None except for the token of the position itself."""


@dataclass(slots=True)
class FlatLogprobs(AbstractSequence[dict[int, Logprob]]):
    """The log-probabilities of many positions in a few long lists, which saves work for the garbage collector.

    Reads like a list with one dict per position; can only grow at the end. An empty dict stands for None.
    """

    start_indices: list[int] = field(default_factory=list[int])
    """Start of each position's entries in the lists below."""
    end_indices: list[int] = field(default_factory=list[int])
    """End of each position's entries."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    ranks: list[int | None] = field(default_factory=list[int | None])
    decoded_tokens: list[str | None] = field(default_factory=list[str | None])
    token_bytes: list[bytes | None] = field(default_factory=list[bytes | None], compare=False)
    text_offsets: list[int | None] = field(default_factory=list[int | None], compare=False)

    @classmethod
    def of(cls, positions: Iterable[Mapping[int, Logprob] | None]) -> "FlatLogprobs":
        """Build one from a dict per position."""
        made = cls()
        made.extend(positions)
        return made

    def append(self, position: Mapping[int, Logprob] | None) -> None:
        """Add the next position."""
        entries = (position or {}).values()
        self.append_fast(
            list(position or ()),
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
            [entry.token_bytes for entry in entries],
            [entry.text_offset for entry in entries],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
        token_bytes: Sequence[bytes | None] = (),
        text_offsets: Sequence[int | None] = (),
    ) -> None:
        """Add the next position without a dict; the arguments have one item for each of its tokens, no token twice."""
        assert len(token_ids) == len(logprobs) == len(ranks) == len(decoded_tokens)
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        unknown = [None] * len(token_ids)
        self.token_bytes.extend(token_bytes or unknown)
        self.text_offsets.extend(text_offsets or unknown)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Add the next positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        """One position as a dict, or several as a copy."""
        if isinstance(index, slice):
            return self._selected(range(*index.indices(len(self))))
        return {token_id: Logprob(*values) for token_id, *values in zip(*self._columns(index), strict=True)}

    def _selected(self, positions: Iterable[int]) -> "FlatLogprobs":
        made = FlatLogprobs()
        for position in positions:
            made.append_fast(*self._columns(position))
        return made

    def _columns(self, position: int) -> tuple[list[Any], ...]:
        """Return the token ids of a position, and then each field of their logprobs."""
        entries = slice(self.start_indices[position], self.end_indices[position])
        columns = (
            self.token_ids,
            self.logprobs,
            self.ranks,
            self.decoded_tokens,
            self.token_bytes,
            self.text_offsets,
        )
        return tuple(column[entries] for column in columns)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        """Return each position as a dict."""
        return map(self.__getitem__, range(len(self)))


SampleLogprobs = FlatLogprobs | list[dict[int, Logprob]]
"""One dict a generated token: token id -> `Logprob`, the k most likely and the sampled one, so k or k + 1 entries."""

PromptLogprobs = FlatLogprobs | list[dict[int, Logprob] | None]
"""One dict a prompt token; None (in `FlatLogprobs` an empty dict) for the first, which nothing predicts."""
