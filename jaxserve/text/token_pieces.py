"""The text of single tokens, and how neighbouring tokens join: what incremental decoding needs to be exact.

Decoding a token alone is not enough. Byte-level tokens hold parts of characters; sentencepiece vocabularies spell rare
characters as runs of byte tokens; some decoders drop the space that begins a text. `TokenPieces` holds the piece of
each id, `TextJoiner` puts pieces together one at a time so that the sum equals the decode of all ids at once.
"""

import codecs
import enum
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"


class Joining(enum.Enum):
    """The replacement of bytes that are not valid UTF-8."""

    LOSSY = "byte-level BPE: each longest invalid part becomes one U+FFFD"
    WHOLE_RUNS = "`ByteFallback` of tokenizers: one bad byte turns its whole run of byte tokens into one U+FFFD a byte"
    CHARACTERS = "sentencepiece: each invalid byte of a run becomes one U+FFFD"


class TokenPieces(dict[int, str | None]):
    """Token id -> its text, or None where only `raw` has it; filled as ids are first seen.

    An id that has no place in the text (skipped as special, or outside the vocabulary) maps to "".

    Args:
      look_up: Gives the bytes of an id's piece and whether it is a byte token; None for an id without a place.
      joining: How bytes join.
      strips_leading_space: Whether one space that begins the text is dropped.
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
        """Looks a new id up."""
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
        """Returns the bytes of an id whose text is None."""
        return self._raw[token_id]

    def shown(self, token_id: int) -> str:
        """Returns the text of one token by itself, with U+FFFD for parts of characters."""
        text = self[token_id]
        return self.raw(token_id).decode(errors="replace") if text is None else text


def _valid_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class _CharacterJoiner:
    """Joins byte pieces; gives out each character when its last byte has come."""

    def __init__(self, errors: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def feed(self, raw: bytes) -> str:
        """Takes more bytes; returns the text that later bytes cannot change."""
        return self._decoder.decode(raw)

    def end(self) -> str:
        """Ends the run: the next piece is text, or nothing follows. Returns what was still open."""
        return self._decoder.decode(b"", final=True)

    def tentative(self) -> str:
        """Returns the whole characters that are still kept back, if nothing bad has come; else ""."""
        return ""

    def is_open(self) -> bool:
        """Whether `end` matters."""
        return bool(self._decoder.getstate()[0])


class _RunJoiner:
    """Joins byte pieces; keeps a run until it ends, since only then it is known whether all of it is valid.

    Its methods are those of `_CharacterJoiner`.
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


def _one_a_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: one U+FFFD for each byte of an invalid part, as sentencepiece does."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


ONE_A_BYTE = "jaxserve.one_a_byte"
codecs.register_error(ONE_A_BYTE, _one_a_byte)


def _byte_joiner(joining: Joining) -> _CharacterJoiner | _RunJoiner:
    if joining is Joining.WHOLE_RUNS:
        return _RunJoiner()
    return _CharacterJoiner("replace" if joining is Joining.LOSSY else ONE_A_BYTE)


class TextJoiner:
    """Joins the pieces of one sequence.

    Args:
      pieces: The tokenizer's.
      prompt_token_ids: What the sequence continues. The text then begins where the prompt's ends: a leading space
        stays, and a character that the prompt left open is completed. () for a text of its own.

    `is_busy` is False while a piece with text may be appended as it is, without calling `feed`.
    """

    __slots__ = ("_bytes", "_pieces", "_strips", "is_busy")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._bytes = _byte_joiner(pieces.joining)
        is_start, open_bytes = _end_of(pieces, prompt_token_ids)
        self._strips = is_start and pieces.strips_leading_space
        if open_bytes:
            self._bytes.feed(open_bytes)
        self.is_busy = self._strips or self._bytes.is_open()

    def feed(self, token_id: int) -> str:
        """Takes the next id; returns the text that later ids cannot change."""
        text = self._pieces[token_id]
        if text == "":
            return ""
        if text is None:
            out = self._bytes.feed(self._pieces.raw(token_id))
            if self._pieces.joining is Joining.CHARACTERS:
                self._strips = False
        else:
            out = self._bytes.end() + text
        if self._strips and out:
            self._strips = False
            out = out.removeprefix(" ")
        self.is_busy = self._strips or self._bytes.is_open()
        return out

    def tentative(self) -> str:
        """Returns text that the ids so far spell but that a later byte token might still turn into U+FFFD."""
        text = self._bytes.tentative()
        return text.removeprefix(" ") if self._strips else text

    def finish(self) -> str:
        """Returns what was held back; an unfinished character becomes U+FFFD."""
        text = self._bytes.end()
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(" ")
        self.is_busy = self._strips
        return text


def join(pieces: TokenPieces, token_ids: Iterable[int]) -> str:
    """Returns the text of all ids."""
    joiner = TextJoiner(pieces)
    parts = [joiner.feed(token_id) for token_id in token_ids]
    return "".join(parts) + joiner.finish()


def _end_of(pieces: TokenPieces, token_ids: Sequence[int]) -> tuple[bool, bytes]:
    """Returns whether the ids spell nothing, and the bytes of the character that they leave unfinished."""
    tail: list[bytes] = []
    for token_id in reversed(token_ids):
        text = pieces[token_id]
        if text is None:
            tail.append(pieces.raw(token_id))
        if text or len(tail) == 4:
            break
    else:
        if not tail:
            return True, b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(reversed(tail)))
    return False, decoder.getstate()[0]
