"""Builds the tokenizer of a GGUF file from its metadata: a sentencepiece model, or byte-level BPE."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from checkpoints import CheckpointError, is_gguf
from checkpoints.quantized.gguf_file import GgufFiles, Metadata
from jaxserve.api.errors import ConfigError
from jaxserve.text.gguf_splits import SPLITTINGS, Splitting
from jaxserve.text.rank_tokenizer import byte_level
from jaxserve.text.sentencepiece_backend import SentencePieceBackend
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, with_flagged_tokens
from jaxserve.text.tokenizer_files import TokenizerSettings

_PREFIX: Final = "tokenizer.ggml."
_NAMED_IDS: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_NO_MODEL: Final = ("none", "no_vocab")
_TEMPLATE: Final = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def load_model_tokenizer(path: Path, tokenizer_mode: str = "auto") -> Tokenizer:
    """Load the tokenizer of a model: that of a directory, as ``load_tokenizer`` does, or of a GGUF file.

    Raises:
        ConfigError: The tokenizer is missing, invalid or unsupported.
    """
    if not is_gguf(path):
        return load_tokenizer(path, tokenizer_mode)
    if tokenizer_mode == "hf":
        raise ConfigError(f"tokenizer_mode='hf' cannot read the tokenizer of {path}; use 'auto', or pass --tokenizer")
    model, settings = _read(path)
    if isinstance(model, bytes):
        return Tokenizer(path, SentencePieceBackend(model, settings, str(path)), settings)
    return with_flagged_tokens(path, model, settings)


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as the files of a model directory, by name; none if it has no tokenizer.

    Raises:
        ConfigError: As for ``load_model_tokenizer``.
    """
    if not has_tokenizer(path):
        return {}
    model, settings = _read(path)
    templates = [{"name": name, "template": text} for name, text in settings.chat_templates.items()]
    is_fast = not isinstance(model, bytes)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if is_fast else "LlamaTokenizer",
        **settings.config,
        **settings.special_tokens,
        **({"chat_template": templates} if templates else {}),
    }
    name, content = ("tokenizer.json", model.to_str().encode()) if is_fast else ("tokenizer.model", model)
    return {name: content, "tokenizer_config.json": json.dumps(config, indent=2).encode()}


def has_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file has a tokenizer.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        with GgufFiles(path) as files:
            return files.metadata.fields.get(f"{_PREFIX}model", "none") not in _NO_MODEL
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _read(path: Path) -> tuple[bytes | tokenizers.Tokenizer, TokenizerSettings]:
    """Return the tokenizer of a file, a sentencepiece model or one of the library's."""
    try:
        with GgufFiles(path) as files:
            return _build(files.metadata)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _build(metadata: Metadata) -> tuple[bytes | tokenizers.Tokenizer, TokenizerSettings]:
    model = metadata.text(f"{_PREFIX}model")
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.strings(f"{_PREFIX}tokens"))]
    types = metadata.numbers(f"{_PREFIX}token_type", len(tokens))
    types = np.full(len(tokens), _NORMAL) if types is None else np.where(types == 0, _NORMAL, types)
    if not np.isin(types, np.arange(_NORMAL, _BYTE + 1)).all():
        raise metadata.error(f"{_PREFIX}token_type", "expected types from 0 to 6")
    if model == "llama":
        proto = _model_proto(metadata, tokens, _one_unknown(metadata, types).tolist())
        return proto, _settings(metadata, tokens, adds_bos=True)
    if model == "gpt2":
        splitting = _splitting(metadata)
        return _byte_level(metadata, tokens, types, splitting), _settings(metadata, tokens, splitting.adds_bos)
    raise metadata.error(f"{_PREFIX}model", f"{model!r} is not supported; supported: llama, gpt2; pass --tokenizer")


def _settings(metadata: Metadata, tokens: list[str], adds_bos: bool) -> TokenizerSettings:
    special: dict[str, str] = {}
    for name, stored in _NAMED_IDS.items():
        field = f"{_PREFIX}{stored}_token_id"
        token_id = metadata.optional_integer(field)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise metadata.error(field, f"expected one of the {len(tokens)} tokens, got {token_id}")
        special[name] = tokens[token_id]
    adds_bos = metadata.flag(f"{_PREFIX}add_bos_token", adds_bos)
    adds_eos = metadata.flag(f"{_PREFIX}add_eos_token", False)
    templates = {name: text for name, text in metadata.fields.items() if isinstance(text, str)}
    return TokenizerSettings(
        special_tokens=special,
        added_tokens={},
        chat_templates={
            name.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
            for name, text in templates.items()
            if name == _TEMPLATE or name.startswith(f"{_TEMPLATE}.")
        },
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        config={"add_bos_token": adds_bos, "add_eos_token": adds_eos},
    )


def _splitting(metadata: Metadata) -> Splitting:
    field = f"{_PREFIX}pre"
    name = metadata.fields.get(field)
    if not isinstance(name, str) or name not in SPLITTINGS:
        found = "is missing" if name is None else f"{name!r} is not supported"
        raise metadata.error(
            field,
            f"{found}, so that how the tokenizer splits text is unknown; supported: {', '.join(SPLITTINGS)}; pass the "
            "original tokenizer with --tokenizer",
        )
    return SPLITTINGS[name]


def _byte_level(metadata: Metadata, tokens: list[str], types: np.ndarray, splitting: Splitting) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer."""
    field = f"{_PREFIX}merges"
    pairs = [tuple(text.split(" ")) for text in metadata.strings(field)]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(merges) != len(pairs):
        raise metadata.error(field, "expected two tokens with a space between them in each merge")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise metadata.error(f"{_PREFIX}tokens", "a token occurs twice")
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=splitting.ignores_merges)
    except Exception as error:  # the library raises bare Exception
        raise metadata.error(field, f"not a BPE of the tokens: {error}") from error
    fast = byte_level(model, splitting.patterns)
    if splitting.normalizes:
        fast.normalizer = normalizers.NFC()
    fast.add_special_tokens([_added(tokens[index], True) for index in np.flatnonzero(types == _CONTROL)])
    fast.add_tokens([_added(tokens[index], False) for index in np.flatnonzero(types == _USER_DEFINED)])
    return fast


def _added(text: str, is_special: bool) -> AddedToken:
    return AddedToken(text, normalized=False, special=is_special)


def _one_unknown(metadata: Metadata, types: np.ndarray) -> np.ndarray:
    """Return the types with one unknown token, as sentencepiece requires; others become control tokens."""
    unknown = np.flatnonzero(types == _UNKNOWN)
    kept = metadata.integer(f"{_PREFIX}unknown_token_id", int(unknown[0]) if unknown.size else 0)
    return np.where((types == _UNKNOWN) & (np.arange(len(types)) != kept), _CONTROL, types)


def _model_proto(metadata: Metadata, tokens: list[str], types: list[int]) -> bytes:
    """Return a sentencepiece model: the message ``ModelProto`` of its ``sentencepiece_model.proto``."""
    scores = metadata.numbers(f"{_PREFIX}scores", len(tokens))
    if scores is None:
        raise metadata.error(f"{_PREFIX}scores", "expected the score of each token, but it is missing")
    if not np.isfinite(scores).all():
        raise metadata.error(f"{_PREFIX}scores", "expected finite numbers")
    pieces = (
        _text(1, text) + struct.pack("<Bf", 2 << 3 | 5, score) + _number(3, kind)
        for text, score, kind in zip(tokens, scores.tolist(), types, strict=True)
    )
    trainer = _number(3, 2) + _number(35, _BYTE in types)  # BPE, and bytes for what has no token
    normalizer = (
        _text(1, "identity")
        + _number(3, metadata.flag(f"{_PREFIX}add_space_prefix", True))
        + _number(4, metadata.flag(f"{_PREFIX}remove_extra_whitespaces", False))
        + _number(5, True)
    )
    return b"".join((*_messages(1, pieces), *_messages(2, [trainer]), *_messages(3, [normalizer])))


def _messages(field: int, messages: Iterable[bytes]) -> Iterable[bytes]:
    key = _varint(field << 3 | 2)
    return (key + _varint(len(message)) + message for message in messages)


def _text(field: int, text: str) -> bytes:
    data = text.encode()
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest first; all but the last have their top bit set."""
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)
