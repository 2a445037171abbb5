"""Tokenizer backend for the `tokenizers` library (tokenizer.json)."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tokenizers

from jaxserve.api.errors import ConfigError
from jaxserve.text.text_bounds import fast_bound
from jaxserve.text.token_pieces import Joining, TokenPieces

_LONG_TEXT = 2048  # characters; takes about a millisecond


class FastBackend:
    """Encodes and decodes with a `tokenizers.Tokenizer`, after disabling its truncation and padding.

    Attributes:
      text_bound: How much of a text one token can stand for; None if there is no limit.

    Raises:
      ConfigError: Incremental detokenization does not support the tokenizer's decoder.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.text_bound = fast_bound(tokenizer)
        self._to_bytes, self._joining, self._strips_leading_space = _read_decoder(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def num_ordinary_tokens(self) -> int:
        """Number of tokens, without added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` removes."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        if len(text) > _LONG_TEXT:  # encoding a batch releases the GIL, encoding a single text does not
            return self.encode_batch([text], add_special_tokens)[0]
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text; uses several threads."""
        # Without offsets: a quarter of the time, and two thirds of the memory.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def starts(self, text: str) -> list[int]:
        """Return where each token of a text begins in it, without special tokens, whatever the normalizer does.

        Some post-processors leave spaces before words out.
        """
        return [start for start, _ in self._tokenizer.encode(text, add_special_tokens=False).offsets]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of some ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return a token's id; None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as spelled in the vocabulary; None if the id is not in it."""
        return self._tokenizer.id_to_token(token_id)

    def copy(self) -> tokenizers.Tokenizer:
        """Return a copy of the library's tokenizer."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    def make_pieces(self, skip_special_tokens: bool) -> TokenPieces:
        """Create a table of pieces."""
        special = self._special_tokens() if skip_special_tokens else frozenset[str]()
        return TokenPieces(partial(self._look_up, special), self._joining, self._strips_leading_space)

    def _special_tokens(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def _look_up(self, special: frozenset[str], token_id: int) -> tuple[bytes, bool] | None:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return None if token is None or token in special else self._to_bytes(token)


def _read_decoder(tokenizer: tokenizers.Tokenizer) -> tuple[Callable[[str], tuple[bytes, bool]], Joining, bool]:
    """Return how to convert tokens to bytes, how to join the bytes, and whether a leading space is dropped."""
    if tokenizer.decoder is None:
        # Without a decoder, the library joins tokens with spaces.
        return _prefix_space, Joining.LOSSY, True
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = _flatten(described)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level, Joining.LOSSY, False
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    has_bytes, fuses, strips = _pop(steps, "ByteFallback"), _pop(steps, "Fuse"), False
    if fuses and steps and steps[0] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        strips = _pop(steps, "Strip")
    if steps:
        raise ConfigError(
            f"the tokenizer's decoder {described} is not supported: it must be ByteLevel, or a sequence of Replace "
            "(of a string), ByteFallback, Fuse and Strip (of one leading space)"
        )
    return partial(_replace, replacements, has_bytes), Joining.WHOLE_RUNS, strips


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flatten(outer)]


def _pop(steps: list[dict[str, Any]], kind: str) -> bool:
    if steps and steps[0]["type"] == kind:
        steps.pop(0)
        return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that each character of GPT-2's alphabet stands for."""


def _byte_level(token: str) -> tuple[bytes, bool]:
    """Convert a token in the byte alphabet; any other, such as an added token with a space, is plain text."""
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token), False
    return token.encode(), False


def _replace(replacements: Sequence[tuple[str, str]], has_bytes: bool, token: str) -> tuple[bytes, bool]:
    for old, new in replacements:
        token = token.replace(old, new)
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)]), True
        except ValueError:
            pass
    return token.encode(), False


def _prefix_space(token: str) -> tuple[bytes, bool]:
    return b" " + token.encode(), False
