"""Tokenizer backend for a sentencepiece `tokenizer.model` without tokenizer.json (Llama 2, Mistral v1, Baichuan).

transformers converts such files heuristically, and silently produces wrong ids for some. So this uses the sentencepiece
library, and splits special tokens off the text itself.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import sentencepiece

from jaxserve.api.errors import ConfigError
from jaxserve.text.text_bounds import sentencepiece_bound
from jaxserve.text.token_pieces import Joining, TokenPieces, join
from jaxserve.text.tokenizer_files import AddedToken, TokenizerSettings

# Protobuf merges concatenated messages, so appending this sets normalizer_spec.add_dummy_prefix = false.
_NO_PREFIX = b"\x1a\x02\x18\x00"
WHITE_SPACE = r"\s*"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")


class SentencePieceBackend:
    """Encodes and decodes with a `SentencePieceProcessor`.

    Args:
      model: Contents of a `tokenizer.model`.
      settings: Added tokens, and whether to add BOS and EOS.
      where: The model's file, for messages.

    Attributes:
      text_bound: How much of a text one token can stand for; None if there is no limit.

    Raises:
      ConfigError: It is not a sentencepiece model.
    """

    def __init__(self, model: bytes, settings: TokenizerSettings, where: str) -> None:
        # The library has no type annotations.
        self._processor: Any = _load(where, model)
        self._settings = settings
        self._continuing: Any = self._processor if settings.has_prefix_per_part else _load(where, model + _NO_PREFIX)
        self._tokens = _special_tokens(self._processor, settings)
        self._ids = {token.content: token_id for token_id, token in self._tokens.items()}
        self._pattern = _pattern(self._tokens.values())
        self.text_bound = sentencepiece_bound(self._processor, self._tokens.values())
        self._special_ids = frozenset(token_id for token_id, token in self._tokens.items() if token.is_special)
        self._pieces = self.make_pieces(False), self.make_pieces(True)
        self._before = [self.bos_id] if settings.adds_bos and self.bos_id is not None else []
        self._after = [self.eos_id] if settings.adds_eos and self.eos_id is not None else []

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(self._processor.get_piece_size(), max(self._tokens, default=0) + 1)

    @property
    def num_ordinary_tokens(self) -> int:
        """Number of tokens, without added ones."""
        return self._processor.get_piece_size()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` removes."""
        return self._special_ids

    @property
    def bos_id(self) -> int | None:
        """Id of the configured BOS token, else that of the model file."""
        return self._named_id("bos_token", self._processor.bos_id())

    @property
    def eos_id(self) -> int | None:
        """Id of the configured EOS token, else that of the model file."""
        return self._named_id("eos_token", self._processor.eos_id())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ids = list(self._before) if add_special_tokens else []
        processor = self._processor
        # The pattern has one group, so every second part is a special token with the white space it strips.
        for index, part in enumerate(self._pattern.split(text) if self._pattern else [text]):
            if index % 2:
                ids.append(self._ids[part] if part in self._ids else self._ids[part.strip()])
                processor = self._continuing
            elif part:
                ids.extend(cast("list[int]", processor.encode(part)))
        return ids + self._after if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of some ids."""
        return join(self._pieces[skip_special_tokens], token_ids)

    def token_to_id(self, token: str) -> int | None:
        """Return a token's id; None if it is not in the vocabulary."""
        if token in self._ids:
            return self._ids[token]
        token_id = int(self._processor.piece_to_id(token))
        return token_id if self._processor.id_to_piece(token_id) == token else None

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as spelled in the vocabulary; None if the id is not in it."""
        if token_id in self._tokens:
            return self._tokens[token_id].content
        return self._processor.id_to_piece(token_id) if token_id < self._processor.get_piece_size() else None

    def make_pieces(self, skip_special_tokens: bool) -> TokenPieces:
        """Create a table of pieces."""
        has_prefix = self._processor.decode_pieces(["▁a"]) == "a"
        return TokenPieces(partial(self._look_up, skip_special_tokens), Joining.CHARACTERS, has_prefix)

    def _named_id(self, name: str, own: int) -> int | None:
        named = self.token_to_id(self._settings.special_tokens.get(name, ""))
        if named is not None:
            return named
        return None if own < 0 else own

    def _look_up(self, skips_special: bool, token_id: int) -> tuple[bytes, bool] | None:
        if token_id in self._tokens:
            is_skipped = skips_special and token_id in self._special_ids
            return None if is_skipped else (self._tokens[token_id].content.encode(), False)
        if not 0 <= token_id < self._processor.get_piece_size():
            return None
        piece: str = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)]), True
        return piece.replace("▁", " ").encode(), False


def read_sentencepiece(path: Path) -> bytes:
    """Return the contents of a `tokenizer.model`.

    Raises:
      ConfigError: It cannot be read, or is in another format.
    """
    try:
        model = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if _TIKTOKEN_LINE.match(model):
        raise ConfigError(
            f"{path} is a tiktoken rank file (Llama 3's original format), not a sentencepiece model, and lacks the "
            "pre-tokenization rules: put the model's tokenizer.json beside it"
        )
    return model


def _load(where: str, model: bytes) -> Any:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not a sentencepiece model: {error}") from error


def _special_tokens(processor: Any, settings: TokenizerSettings) -> dict[int, AddedToken]:
    size: int = processor.get_piece_size()
    found = {
        token_id: AddedToken(processor.id_to_piece(token_id))
        for token_id in range(size)
        if processor.is_control(token_id) or processor.is_unknown(token_id)
    }
    return {**found, **settings.added_tokens}


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Return a pattern of all tokens, longest first so that none matches inside another."""
    parts = [
        f"{WHITE_SPACE if token.strips_left else ''}{re.escape(token.content)}"
        f"{WHITE_SPACE if token.strips_right else ''}"
        for token in sorted(tokens, key=_negative_length)
    ]
    return re.compile(f"({'|'.join(parts)})") if parts else None


def _negative_length(token: AddedToken) -> int:
    return -len(token.content)
