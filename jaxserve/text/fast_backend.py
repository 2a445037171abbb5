"""Vocabularies in the form of the `tokenizers` library (tokenizer.json)."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tokenizers

from jaxserve.errors import ConfigError
from jaxserve.text.token_pieces import Joining, TokenPieces

_LONG_TEXT = 2048  # in characters: about a millisecond's work


class FastBackend:
    """Encodes and decodes with a `tokenizers.Tokenizer`, whose truncation and padding are switched off.

    Raises:
      ConfigError: The decoder is one whose tokens cannot be joined one at a time.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._to_bytes, self._joining, self._strips_leading_space = _read_decoder(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Ids that have a token, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids left out by `skip_special_tokens`."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a text."""
        if len(text) > _LONG_TEXT:  # a batch of one lets other threads run meanwhile, which a single text does not
            return self.encode_batch([text], add_special_tokens)[0]
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Returns the ids of each text; the library uses several threads."""
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of some ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Returns a token's id, None when the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns a token as the vocabulary spells it, None when it lacks the id."""
        return self._tokenizer.id_to_token(token_id)

    def make_pieces(self, skip_special_tokens: bool) -> TokenPieces:
        """Returns a new table of pieces."""
        special = self._special_tokens() if skip_special_tokens else frozenset[str]()
        return TokenPieces(partial(self._look_up, special), self._joining, self._strips_leading_space)

    def _special_tokens(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def _look_up(self, special: frozenset[str], token_id: int) -> tuple[bytes, bool] | None:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return None if token is None or token in special else self._to_bytes(token)


def _read_decoder(tokenizer: tokenizers.Tokenizer) -> tuple[Callable[[str], tuple[bytes, bool]], Joining, bool]:
    """Returns how a token becomes bytes, how bytes join, and whether a space at the beginning is dropped."""
    if tokenizer.decoder is None:
        # Without a decoder the library puts a space between tokens.
        return _spaced, Joining.LOSSY, True
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = _flattened(described)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level, Joining.LOSSY, False
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    has_bytes, fuses, strips = _popped(steps, "ByteFallback"), _popped(steps, "Fuse"), False
    if fuses and steps and steps[0] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        strips = _popped(steps, "Strip")
    if steps:
        raise ConfigError(
            f"the tokenizer's decoder {described} is not supported: it must be ByteLevel, or a sequence of Replace "
            "(with a string), ByteFallback, Fuse and Strip (of one leading space)"
        )
    return partial(_replaced, replacements, has_bytes), Joining.WHOLE_RUNS, strips


def _flattened(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flattened(outer)]


def _popped(steps: list[dict[str, Any]], kind: str) -> bool:
    if steps and steps[0]["type"] == kind:
        steps.pop(0)
        return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes stand for themselves, the rest for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> tuple[bytes, bool]:
    """A token spelt in the byte alphabet; any other (an added token with a space, say) stands for itself."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token), False
    return token.encode(), False


def _replaced(replacements: Sequence[tuple[str, str]], has_bytes: bool, token: str) -> tuple[bytes, bool]:
    for old, new in replacements:
        token = token.replace(old, new)
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)]), True
        except ValueError:
            pass
    return token.encode(), False


def _spaced(token: str) -> tuple[bytes, bool]:
    return b" " + token.encode(), False
