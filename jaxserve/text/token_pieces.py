"""The text of single tokens, and how to join it incrementally.

Decoding tokens one by one is not exact: byte-level tokens hold parts of characters, sentencepiece vocabularies spell
rare characters as runs of byte tokens, and some decoders drop a leading space. `TokenPieces` has the piece of each id;
`TextJoiner` joins pieces one at a time, with the same result as decoding all ids at once.
"""

import codecs
import enum
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"


class Joining(enum.Enum):
    """How invalid UTF-8 is replaced."""

    LOSSY = "byte-level BPE: one U+FFFD for each maximal invalid part"
    WHOLE_RUNS = "`ByteFallback` of tokenizers: one U+FFFD for each byte of a run of byte tokens with an invalid byte"
    CHARACTERS = "sentencepiece: one U+FFFD for each invalid byte"


class TokenPieces(dict[int, str | None]):
    """Maps token ids to text, or to None if only `raw` has the piece; filled on first access.

    An id without text (a skipped special token, or outside the vocabulary) maps to "".

    Args:
      look_up: Returns the bytes of an id's piece and whether it is a byte token; None for an id without text.
      joining: How invalid bytes are replaced.
      strips_leading_space: Whether one leading space of the text is dropped.
    """

    def __init__(
        self, look_up: Callable[[int], tuple[bytes, bool] | None], joining: Joining, strips_leading_space: bool
    ) -> None:
        super().__init__()
        self.joining = joining
        self.strips_leading_space = strips_leading_space
        self._look_up = look_up
        self._raw: dict[int, bytes] = {}

    def __missing__(self, token_id: int) -> str | None:
        """Look up an id on first access."""
        found = self._look_up(token_id)
        text: str | None = ""
        if found is not None:
            raw, is_byte = found
            text = None if is_byte else _valid_text(raw)
            if text is None:
                self._raw[token_id] = raw
        self[token_id] = text
        return text

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of an id whose text is None."""
        return self._raw[token_id]

    def shown(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for parts of characters."""
        text = self[token_id]
        return self.raw(token_id).decode(errors="replace") if text is None else text


def _valid_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class _CharacterJoiner:
    """Joins byte pieces; returns each character with its last byte."""

    def __init__(self, errors: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def feed(self, raw: bytes) -> str:
        """Add bytes; return the text that later bytes cannot change."""
        return self._decoder.decode(raw)

    def end(self) -> str:
        """End the run of byte pieces; return the text of its incomplete rest."""
        return self._decoder.decode(b"", final=True)

    def tentative(self) -> str:
        """Return the complete characters held back; "" if a byte was invalid."""
        return ""

    def is_open(self) -> bool:
        """Whether `end` may return text."""
        return bool(self._decoder.getstate()[0])


class _RunJoiner:
    """Joins byte pieces; holds a run back until it ends, because an invalid byte changes all of it.

    Same methods as `_CharacterJoiner`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._text = ""
        self._num_bytes = 0
        self._is_broken = False

    def feed(self, raw: bytes) -> str:
        self._num_bytes += len(raw)
        if self._is_broken:
            return REPLACEMENT * len(raw)
        try:
            self._text += self._decoder.decode(raw)
        except UnicodeDecodeError:
            self._is_broken = True
            return REPLACEMENT * self._num_bytes
        return ""

    def end(self) -> str:
        text = "" if self._is_broken else self._text
        if not self._is_broken and self._decoder.getstate()[0]:
            text = REPLACEMENT * self._num_bytes
        self._decoder.reset()
        self._text, self._num_bytes, self._is_broken = "", 0, False
        return text

    def tentative(self) -> str:
        return "" if self._is_broken else self._text

    def is_open(self) -> bool:
        return self._num_bytes > 0


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: return one U+FFFD per byte of an invalid part, as sentencepiece does."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


ONE_PER_BYTE = "jaxserve.one_per_byte"
codecs.register_error(ONE_PER_BYTE, _one_per_byte)


def _byte_joiner(joining: Joining) -> _CharacterJoiner | _RunJoiner:
    if joining is Joining.WHOLE_RUNS:
        return _RunJoiner()
    return _CharacterJoiner("replace" if joining is Joining.LOSSY else ONE_PER_BYTE)


class TextJoiner:
    """Joins the pieces of one sequence.

    Args:
      pieces: Pieces of the tokenizer.
      prompt_token_ids: The prompt that the sequence continues: a leading space is kept, and an incomplete character of
        the prompt is completed. Empty for a text of its own.

    While `is_busy` is False, the text of a piece can be appended without calling `feed`.
    """

    __slots__ = ("_bytes", "_pieces", "_strips", "is_busy")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._bytes: _CharacterJoiner | _RunJoiner | None = None
        self._strips = self.is_busy = False
        if prompt_token_ids and pieces[prompt_token_ids[-1]]:
            return  # the prompt ends in text
        is_start, tail = _prompt_end(pieces, prompt_token_ids)
        if is_start or tail:
            self._begin(is_start, tail)

    @property
    def strips_space(self) -> bool:
        """Whether the text has not begun yet and will lose one leading space."""
        return self._strips

    def feed(self, token_id: int) -> str:
        """Add the next id; return the text that later ids cannot change."""
        text = self._pieces[token_id]
        if text == "":
            return ""
        if text is None:
            out = self._own_bytes().feed(self._pieces.raw(token_id))
            if self._pieces.joining is Joining.CHARACTERS:
                self._strips = False
        else:
            out = text if self._bytes is None else self._bytes.end() + text
        if self._strips and out:
            self._strips = False
            out = out.removeprefix(" ")
        self._set_busy()
        return out

    def tentative(self) -> str:
        """Return the text held back because a later byte token might turn it into U+FFFD."""
        text = "" if self._bytes is None else self._bytes.tentative()
        return text.removeprefix(" ") if self._strips else text

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        if self._bytes is None:
            return ""
        text = self._bytes.end()
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(" ")
        self.is_busy = self._strips
        return text

    def _begin(self, is_start: bool, tail: bytes) -> None:
        """Begin after a prompt without text, or after one that ends in ``tail``, bytes of characters."""
        self._strips = is_start and self._pieces.strips_leading_space
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        open_bytes, _ = decoder.getstate()
        if open_bytes:
            self._own_bytes().feed(open_bytes)
        self._set_busy()

    def _own_bytes(self) -> _CharacterJoiner | _RunJoiner:
        """Return what joins byte pieces, which most sequences never need."""
        if self._bytes is None:
            self._bytes = _byte_joiner(self._pieces.joining)
        return self._bytes

    def _set_busy(self) -> None:
        self.is_busy = self._strips or (self._bytes is not None and self._bytes.is_open())


def join(pieces: TokenPieces, token_ids: Iterable[int]) -> str:
    """Return the text of all ids."""
    joiner = TextJoiner(pieces)
    parts = [joiner.feed(token_id) for token_id in token_ids]
    return "".join(parts) + joiner.finish()


def _prompt_end(pieces: TokenPieces, token_ids: Sequence[int]) -> tuple[bool, bytes]:
    """Return whether the ids have no text, and the bytes of at most four byte tokens at their end."""
    tail: list[bytes] = []
    for token_id in reversed(token_ids):
        text = pieces[token_id]
        if text is None:
            tail.append(pieces.raw(token_id))
        if text or len(tail) == 4:
            return False, b"".join(reversed(tail))
    return not tail, b"".join(reversed(tail))
