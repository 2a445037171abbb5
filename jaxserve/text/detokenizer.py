"""Incremental detokenization and stop strings.

The deltas of a sequence concatenate to the decode of all its ids, however they are grouped into pushes. Text that could
still change is held back: incomplete characters, and prefixes of stop strings. The cost of a push does not depend on
the length of the text. The scheduler handles stop token ids and end-of-sequence tokens.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.text.token_pieces import TextJoiner, TokenPieces


class StopVerdict(NamedTuple):
    """A completed stop string, which finishes the sequence."""

    stop_string: str
    num_tokens: int
    """Number of output tokens up to the one that completed the stop string; later ones are dropped."""


@functools.lru_cache(maxsize=32)
def _proper_prefixes(stop: tuple[str, ...]) -> frozenset[str]:
    """Return the proper prefixes of stop strings; cached because the samples of a request share them."""
    return frozenset(string[:length] for string in stop for length in range(1, len(string)))


class Detokenizer:
    """Detokenizes one sequence.

    Args:
      pieces: Result of `Tokenizer.pieces(skip_special_tokens)`.
      stop: Non-empty stop strings. The first to be completed wins; if one character completes several, the longest.
      include_stop_str_in_output: Whether to keep the stop string in the text.
      min_tokens: Ignore stop strings completed within this many first tokens.
      prompt_token_ids: If given, the text continues the prompt's, as in vLLM: a Llama 2 continuation keeps its leading
        space. Otherwise it is the decode of the pushed ids alone.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._pieces = pieces
        self._joiner = TextJoiner(pieces, prompt_token_ids)
        self._parts: list[str] = []
        self._num_taken = 0
        self._num_tokens = 0
        self._stops = _StopSearch(self._joiner, tuple(stop), include_stop_str_in_output, min_tokens) if stop else None

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        if len(self._parts) > 2:
            taken, rest = self._parts[: self._num_taken], self._parts[self._num_taken :]
            self._parts = ["".join(taken), "".join(rest)]
            self._num_taken = 1
        return "".join(self._parts)

    @property
    def num_tokens(self) -> int:
        """Number of pushed tokens, without those after a stop string."""
        return self._num_tokens

    def take(self) -> str:
        """Return the text added since the last `take`."""
        parts = self._parts
        if self._num_taken == len(parts):
            return ""
        delta = "".join(parts[self._num_taken :])
        self._num_taken = len(parts)
        return delta

    def push_tokens(self, token_ids: Sequence[int]) -> StopVerdict | None:
        """Add the next ids; return the verdict if they complete a stop string. `text` and `take` return the text."""
        joiner, stops = self._joiner, self._stops
        for token_id in token_ids:
            text = self._pieces[token_id]
            if text is None or joiner.is_busy:
                text = joiner.feed(token_id)
            self._num_tokens += 1
            if stops is not None:
                text = stops.push(text, self._num_tokens)
            if text:
                self._parts.append(text)
            if stops is not None and stops.verdict is not None:
                return stops.verdict
        return None

    def flush(self) -> str:
        """Finish the sequence: return the text held back, with U+FFFD for an incomplete character."""
        delta = self._joiner.finish() if self._stops is None else self._stops.finish()
        if delta:
            self._parts.append(delta)
        return delta


class _StopSearch:
    """Searches the text of a sequence for stop strings.

    Args:
      joiner: Joins the pieces of the sequence.
      stops: As in `Detokenizer`.
      includes_stop: Whether to keep the stop string in the text.
      min_tokens: As in `Detokenizer`.

    Attributes:
      verdict: The completed stop string.
    """

    def __init__(self, joiner: TextJoiner, stops: tuple[str, ...], includes_stop: bool, min_tokens: int) -> None:
        self._joiner = joiner
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        self._stops = stops
        self._first_characters = frozenset(string[0] for string in stops)
        self._prefixes = _proper_prefixes(stops)
        self._prefix_ends = frozenset(prefix[-1] for prefix in self._prefixes)
        self._max_prefix = max(map(len, self._prefixes), default=0)
        self._held = ""
        self._tentative = ""
        self.verdict: StopVerdict | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """Add the text of token number `num_tokens`; return the text to output, truncated at a match."""
        if self._held or self._tentative or self._joiner.is_busy or not self._first_characters.isdisjoint(text):
            return self._search(text, num_tokens)
        return text

    def finish(self) -> str:
        """Return the text held back, once the sequence has finished."""
        if self.verdict is not None:
            return ""
        held = self._held + self._joiner.finish()
        self._held = self._tentative = ""
        return held

    def _search(self, text: str, num_tokens: int) -> str:
        confirmed = self._held + text
        tentative = self._joiner.tentative() if self._joiner.is_busy else ""
        view = confirmed + tentative
        num_searched = len(self._held)
        if self._tentative and view.startswith(self._tentative, num_searched):
            num_searched += len(self._tentative)
        self._tentative = tentative
        if num_tokens > self._min_tokens:
            found = self._find_stop(view, num_searched)
            if found is not None:
                stop_string, start = found
                self.verdict = StopVerdict(stop_string, num_tokens)
                self._held = self._tentative = ""
                return view[: start + len(stop_string)] if self._includes_stop else view[:start]
        num_printable = min(len(view) - self._num_open(view), len(confirmed))
        self._held = confirmed[num_printable:]
        return confirmed[:num_printable]

    def _find_stop(self, view: str, num_searched: int) -> tuple[str, int] | None:
        """Return the stop string that ends first after the searched part, and its start; None if there is none."""
        best: tuple[int, int, str] | None = None
        for string in self._stops:
            start = view.find(string, max(0, num_searched - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        return None if best is None else (best[2], best[1])

    def _num_open(self, view: str) -> int:
        """Return the length of the longest suffix of `view` that is a prefix of a stop string."""
        if not view or view[-1] not in self._prefix_ends:
            return 0
        for length in range(min(self._max_prefix, len(view)), 0, -1):
            if view[-length:] in self._prefixes:
                return length
        return 0
