"""Tokenizers from tokens by rank: the ids of published cases, of tiktoken, and what is wrong with a file."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.text.gguf_splits import SPLITTINGS
from jaxserve.text.tokenizer import load_tokenizer

PATTERN = SPLITTINGS["llama3"].patterns[0]
TEXTS = ("", " ", "Hello  world", "naïve 😀 東京", "aaaaaaa baaab", "x = 1234567\n\n\treturn x", "l'été don't I'LL")


def ranks_of(path: Path) -> list[bytes]:
    pairs = [line.split() for line in path.read_bytes().splitlines()]
    return [base64.b64decode(text) for text, _ in pairs]


def tekken(ranks: list[bytes], num_special: int = 8, **config: Any) -> dict[str, Any]:
    """The fields of a tekken.json; the last three tokens are beyond the size that it names."""
    return {
        "config": {
            "pattern": PATTERN,
            "default_vocab_size": len(ranks) - 3 + num_special,
            "default_num_special_tokens": num_special,
            **config,
        },
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(ranks)],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True}
            for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
        ],
    }


SMALL = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"aa", b"z1", b"z2", b"z3"]


def test_the_published_cases_of_a_large_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    ranks = ranks_of(shared_data / "tokenizers" / "llama3" / "tokenizer.model")
    fields = tekken(ranks, 1000, default_vocab_size=len(ranks) + 1000)
    (tmp_path / "tekken.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    cases = json.loads((shared_data / "tokenizers/expected/llama3.json").read_text())["cases"]
    for case in cases:
        found = tokenizer.encode(case["text"], add_special_tokens=False)
        assert [token - 1000 for token in found] == case["ids"], case["text"]
        assert tokenizer.decode(found) == case["text"]


def test_special_tokens_come_first_and_a_prompt_begins_with_bos(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(SMALL)))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello w") == [1, 8 + SMALL.index(b"hello"), 8 + SMALL.index(b" w")]
    assert tokenizer.encode("[INST]a[/INST]", add_special_tokens=False) == [3, 8 + 97, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("z1", add_special_tokens=False) == [8 + ord("z"), 8 + ord("1")], "beyond the vocabulary"


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(SMALL)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    special = {str(len(SMALL) + 1): {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    tokenizer = load_tokenizer(tmp_path)
    pattern = SPLITTINGS["llama3"].patterns[0]  # splits these texts as Kimi's does
    oracle = tiktoken.Encoding(
        "small", pat_str=pattern, mergeable_ranks={t: i for i, t in enumerate(SMALL)}, special_tokens={}
    )
    for text in ("hello hell", "aaaaaaa", " wz1 z2z3", "Ünïcode"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [len(SMALL) + 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": 3}, "expected config as an object, got int"),
        ({"vocab": [{"token_bytes": "?"}]}, "expected the bytes of a token in base64, got '\\?'"),
        ({"vocab": []}, "the byte 0x00 is no token"),
        ({"special_tokens": [{"rank": 0, "token_str": "hello"}]}, "the special token 'hello' is a token of text too"),
    ],
)
def test_what_is_wrong_with_a_tekken_file_is_said(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({**tekken(SMALL), **change}))
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_a_tiktoken_file_has_ranks_in_order(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 1\n")
    with pytest.raises(ConfigError, match="expected the ranks 0 to 0 in order"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ==\n")
    with pytest.raises(ConfigError, match="expected lines of a token in base64 and its rank"):
        load_tokenizer(tmp_path)
