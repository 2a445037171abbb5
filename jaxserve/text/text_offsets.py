"""Where tokens begin in the text that they make, counted in characters."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.text.token_pieces import Joining, TextJoiner, TokenPieces
from jaxserve.text.tokenizer import Tokenizer

_MAX_ADDED = 8
"""Most special tokens that a tokenizer adds before a text."""


class TokenPlace(NamedTuple):
    """Where a token begins in a text.

    Attributes:
      offset: Number of characters before the token; for a token that continues a character, before that character.
      stripped_bytes: The token's bytes without the leading space that the text lacks; None if it lacks none.
    """

    offset: int
    stripped_bytes: bytes | None = None


class TextOffsets:
    """Finds the place of each token of one sequence.

    Args:
      pieces: Pieces of the tokenizer, with or without special tokens like the text itself.
      prompt_token_ids: The prompt that the sequence continues; its text is not counted.
    """

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._joiner = TextJoiner(pieces, prompt_token_ids)
        self._may_strip = self._joiner.strips_space
        self._num_joined = 0

    @property
    def end(self) -> int:
        """Number of characters that the tokens so far have completed."""
        return self._num_joined + len(self._joiner.tentative())

    def add(self, token_id: int) -> TokenPlace:
        """Add the next token; return its place."""
        offset = self.end
        self._num_joined += len(self._joiner.feed(token_id))
        text = self._pieces[token_id]
        if text:  # an incomplete character before it becomes U+FFFD only now
            offset = max(offset, self._num_joined - len(text))
        raw = self._pieces.raw(token_id) if text is None else text.encode()
        is_first, self._may_strip = self._may_strip and bool(raw), self._may_strip and not raw
        keeps_space = text is None and self._pieces.joining is Joining.CHARACTERS
        return TokenPlace(offset, raw[1:] if is_first and raw.startswith(b" ") and not keeps_space else None)


def prompt_offsets(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> list[int]:
    """Return the offset of each token of a prompt.

    Args:
      tokenizer: The tokenizer.
      text: The prompt as the user wrote it, which lacks the special tokens that the tokenizer adds; None: the decoded
        tokens, special ones included.
      token_ids: The prompt's tokens.
    """
    offsets = TextOffsets(tokenizer.pieces(skip_special_tokens=False))
    own = [] if text is None else tokenizer.encode(text, add_special_tokens=False)
    num_added = len(token_ids) - len(own)
    firsts = range(min(num_added, _MAX_ADDED) + 1)
    first = next((first for first in firsts if list(token_ids[first : first + len(own)]) == own), None)
    if text is None or first is None:
        return [offsets.add(token_id).offset for token_id in token_ids]
    found = [min(offsets.add(token_id).offset, len(text)) for token_id in own]
    if tokenizer.decode(own, skip_special_tokens=False) != text:  # a normalizer has changed it
        starts = tokenizer.starts(text) or found
        found = [_with_space(tokenizer, text, *one) for one in zip(own, starts, strict=True)]
    return [0] * first + found + [len(text)] * (num_added - first)


def _with_space(tokenizer: Tokenizer, text: str, token_id: int, start: int) -> int:
    """Return the start of a token, moved to the space before it if that belongs to the token."""
    has_space = tokenizer.token_text(token_id).startswith(" ") and text[start - 1 : start] == " "
    return start - 1 if has_space and text[start : start + 1] != " " else start
