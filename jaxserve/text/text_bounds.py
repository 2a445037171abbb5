"""Find out how much of a text one token of a tokenizer can stand for."""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers

from jaxserve.api.text_bound import TextBound
from jaxserve.text.tokenizer_files import AddedToken

_COMPOSED: Final = 9
"""Bytes of a text that one byte stands for after Unicode's NFC, at most: it decomposes the text, after which a byte
stands for 3 at most (U+212A, the Kelvin sign, becomes K), and composes it, which again makes one of 3 at most (Hangul).
"""
_NORMALIZERS: Final[Mapping[str, int]] = MappingProxyType({"Prepend": 1, "NFC": _COMPOSED, "NFD": 3})
"""How many bytes of a text one byte stands for after each normalizer, at most; others may remove any number."""
_ALL_BYTES: Final = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000))))
"""A text with every byte that UTF-8 has: some vocabularies lack the others."""
_SPLITS: Final = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"))
"""Pre-tokenizers that remove nothing, unless their ``behavior`` says so."""


def fast_bound(tokenizer: tokenizers.Tokenizer) -> TextBound | None:
    """Return the bound of a tokenizer of the library ``tokenizers``; None if a token may stand for any length of text.

    That is the case if its normalizer or pre-tokenizer may remove text, or its model may not know a character.

    Args:
        tokenizer: The tokenizer, which does not truncate.
    """
    shrinks = _shrinking(_steps(tokenizer.normalizer, "normalizers"))
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    if shrinks is None or not all(
        step["type"] in _SPLITS and step.get("behavior") not in ("Removed", "removed") for step in splits
    ):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    if not _knows_all(tokenizer.model, vocabulary, is_byte_level):
        return None
    # At byte level a character of a token stands for a byte.
    ordinary = max(map(len, vocabulary)) if is_byte_level else _longest_bytes(vocabulary)
    added = [*tokenizer.get_added_tokens_decoder().values()]
    contents = [token.content for token in added]
    if tokenizer.normalizer is not None:
        contents += [tokenizer.normalizer.normalize_str(token.content) for token in added if token.normalized]
    longest = max(ordinary, _longest_bytes(contents))
    return TextBound(longest * shrinks, not any(token.lstrip or token.rstrip for token in added))


def sentencepiece_bound(processor: Any, added: Iterable[AddedToken]) -> TextBound | None:
    """Return the bound of a sentencepiece model; None if a token may stand for any length of text.

    Args:
        processor: The library's ``SentencePieceProcessor``.
        added: The tokens that are split off a text before.
    """
    messages: Any = sentencepiece_model_pb2  # has no types
    described = messages.ModelProto.FromString(processor.serialized_model_proto())
    normalizer, knows_all = described.normalizer_spec, described.trainer_spec.byte_fallback
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not knows_all:
        return None
    tokens = [*added]
    longest = _longest_bytes([*(piece.piece for piece in described.pieces), *(token.content for token in tokens)])
    return TextBound(longest, not any(token.strips_left or token.strips_right for token in tokens))


def _longest_bytes(texts: Iterable[str]) -> int:
    """Return the length of the longest of some texts in UTF-8; 1 if there are none."""
    return max((len(text.encode("utf-8", "surrogatepass")) for text in texts), default=1) or 1


def _shrinking(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many bytes of a text one byte stands for after normalizers, at most; None if there is no limit."""
    shrinks = 1
    for step in steps:
        if step["type"] == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            makes_space = any(map(str.isspace, content))
            if pattern is None or makes_space or len(content.encode()) < len(pattern.encode()):
                return None
        elif step["type"] in _NORMALIZERS:
            shrinks *= _NORMALIZERS[step["type"]]
        else:
            return None
    return shrinks


def _knows_all(model: models.Model, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Whether a model has tokens for every character; others drop unknown ones, or make one token of many."""
    if not isinstance(model, models.BPE):
        return False
    if is_byte_level:
        ((characters, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(_ALL_BYTES)
        return vocabulary.keys() >= {*characters}
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the description of a normalizer or pre-tokenizer as a flat list of steps."""
    return [] if part is None else _flat(json.loads(part.__getstate__()), key)


def _flat(described: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if described["type"] != "Sequence":
        return [described]
    return [step for each in cast("list[dict[str, Any]]", described[key]) for step in _flat(each, key)]
