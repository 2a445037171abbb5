"""Byte-level BPE from files that list tokens by rank: Mistral's ``tekken.json``, and Kimi's ``tiktoken.model``.

Both have the bytes of each token, of which the one with the lowest rank is made first; merges follow from that. A
``tekken.json`` has the expression that splits text into words, a ``tiktoken.model`` has not: Kimi's is used.
"""

import base64
import binascii
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxserve.api.errors import ConfigError
from jaxserve.text.fast_backend import BYTE_OF
from jaxserve.text.gguf_splits import SPLITTINGS
from jaxserve.text.tokenizer_files import TokenizerSettings, check_text, read_json, wrong_value

TEKKEN: Final = "tekken.json"
TIKTOKEN: Final = "tiktoken.model"
_NUM_SPECIAL: Final = 1000
_MAX_SPECIAL: Final = 1 << 20
_NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_NUM_RESERVED: Final = 256
_CHARACTERS: Final = {byte: character for character, byte in BYTE_OF.items()}


def read_tekken(path: Path, settings: TokenizerSettings) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Return the tokenizer of a ``tekken.json``, and its settings: special tokens by name, and BOS before a prompt.

    Special tokens have the first ids; the ids of the others follow in the order of their ranks.

    Args:
        path: The file.
        settings: Those of the other files of its directory, which take precedence.

    Raises:
        ConfigError: The file is not of this form.
    """
    content = _mapping(read_json(path), path, "an object")
    config = _mapping(content.get("config"), path, "config as an object")
    size, num_special = (config.get(name) for name in ("default_vocab_size", "default_num_special_tokens"))
    num_special = _NUM_SPECIAL if num_special is None else num_special
    pattern, vocabulary = config.get("pattern"), content.get("vocab")
    if not (type(size) is int and type(num_special) is int and 0 <= num_special < size and num_special <= _MAX_SPECIAL):
        raise ConfigError(f"{path}: expected default_vocab_size above default_num_special_tokens, got {size!r}")
    if not (isinstance(pattern, str) and isinstance(vocabulary, list)):
        raise ConfigError(f"{path}: expected a pattern in config, and a list vocab")
    entries = cast("list[Any]", vocabulary)[: size - num_special]
    ranks = [_decoded(_mapping(entry, path, "objects in vocab").get("token_bytes"), path) for entry in entries]
    special = {index: f"<SPECIAL_{index}>" for index in range(num_special)} | _tekken_special(
        content, num_special, path
    )
    fast = _byte_level_bpe(ranks, special, num_special, (pattern,), path)
    named = {name: text for name, text in _NAMED.items() if text in special.values()}
    return fast, dataclasses.replace(
        settings,
        special_tokens={**named, **settings.special_tokens},
        adds_bos=True,
        config={"add_bos_token": True, **settings.config},
    )


def _tekken_special(content: Mapping[str, Any], num_special: int, path: Path) -> dict[int, str]:
    """Return the special tokens that a ``tekken.json`` names, by id."""
    listed = content.get("special_tokens")
    if not isinstance(listed, list | None):
        raise wrong_value(path, "special_tokens", "a list", listed)
    found: dict[int, str] = {}
    for index, entry in enumerate(cast("list[Any]", listed or [])):
        key = f"special_tokens[{index}]"
        rank = _mapping(entry, path, f"{key} as an object").get("rank")
        if type(rank) is not int or not 0 <= rank < num_special:
            raise wrong_value(path, f"{key}.rank", f"a token id below {num_special}", rank)
        found[rank] = check_text(path, f"{key}.token_str", entry.get("token_str"))
    return found


def read_tiktoken(path: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Return the tokenizer of a ``tiktoken.model`` of Kimi, whose special tokens are in tokenizer_config.json.

    Args:
        path: The file.
        settings: Those of the other files of its directory.

    Raises:
        ConfigError: The file is not of this form.
    """
    lines = path.read_bytes().split(b"\n")
    pairs = [line.split() for line in lines if line]
    if not all(len(pair) == 2 and pair[1].isdigit() for pair in pairs):
        raise ConfigError(f"{path}: expected lines of a token in base64 and its rank")
    if [rank.lstrip(b"0") for _, rank in pairs] != [b"%d" % rank if rank else b"" for rank in range(len(pairs))]:
        raise ConfigError(f"{path}: expected the ranks 0 to {len(pairs) - 1} in order")
    ranks = [_decoded(text, path) for text, _ in pairs]
    reserved = {index: f"<|reserved_token_{index}|>" for index in range(len(ranks), len(ranks) + _NUM_RESERVED)}
    named = {index: token.content for index, token in settings.added_tokens.items()}
    return _byte_level_bpe(ranks, {**reserved, **named}, 0, SPLITTINGS["kimi-k2"].patterns, path)


def _mapping(value: Any, path: Path, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected {expected}, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _decoded(text: Any, path: Path) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: expected the bytes of a token in base64, got {text!r:.60}") from error


def _byte_level_bpe(
    ranks: Sequence[bytes], special: Mapping[int, str], first: int, patterns: Iterable[str], path: Path
) -> tokenizers.Tokenizer:
    """Return a tokenizer of tokens by rank.

    Args:
        ranks: Bytes of each token.
        special: Special tokens by id.
        first: Id of the first token.
        patterns: Expressions that split text into words, in order.
        path: Their file, for messages.
    """
    vocabulary = {_text(token): first + rank for rank, token in enumerate(ranks)}
    missing = [byte for byte in range(256) if _CHARACTERS[byte] not in vocabulary]
    if len(vocabulary) != len(ranks) or missing:
        problem = f"the byte {missing[0]:#04x} is no token" if missing else "a token occurs twice"
        raise ConfigError(f"{path}: {problem}")
    taken = [text for text in special.values() if text in vocabulary]
    if taken:
        raise ConfigError(f"{path}: the special token {taken[0]!r} is a token of text too")
    merges = [(_text(left), _text(right)) for left, right in _merges(ranks)]
    vocabulary |= {text: index for index, text in special.items()}
    fast = byte_level(models.BPE(vocabulary, merges, ignore_merges=True), patterns)
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for _, text in sorted(special.items())])
    return fast


def byte_level(model: models.BPE, patterns: Iterable[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of words' bytes, in GPT-2's alphabet; the patterns split text into words, in order."""
    fast = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    fast.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    return fast


def _text(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def _merges(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that make others, those that make the token of the lowest rank first."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    found: list[tuple[bytes, bytes]] = []
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in rank_of and pair[1] in rank_of]
        found += sorted(known, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
    return found
