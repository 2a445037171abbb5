"""Tokenizers of GGUF files: ids equal llama.cpp's and those of the original tokenizers."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.text.gguf_splits import SPLITTINGS
from jaxserve.text.gguf_tokenizer import load_model_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.gguf_files import write_gguf

MARK = "\n__ggml_vocab_test__\n"
OF_LLAMA_CPP = ("deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact", "starcoder")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def check_llama_cpp(tokenizer: Tokenizer, folder: Path, name: str) -> None:
    """Compare with what llama.cpp encodes."""
    stem = folder / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().removesuffix(MARK).split(MARK)
    lines = Path(f"{stem}.out").read_text(encoding="utf-8").splitlines()
    assert len(texts) == len(lines) == 46
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(word) for word in line.split()], text


def check_original(tokenizer: Tokenizer, folder: Path, name: str) -> None:
    """Compare with what the original tokenizer encodes."""
    for case in json.loads((folder / "tokenizers" / "expected" / f"{name}.json").read_text())["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]


@pytest.mark.parametrize("name", OF_LLAMA_CPP)
def test_vocabularies_of_llama_cpp(name: str, shared_data: Path) -> None:
    tokenizer = load_model_tokenizer(shared_data / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf")
    check_llama_cpp(tokenizer, shared_data, name)
    original = {"gpt-2": "gpt2", "llama-spm": "llama2", "phi-3": "phi3"}.get(name)
    if original is not None:
        check_original(tokenizer, shared_data, original)
    text = "It's 1234 times  as good:\n\t🚀 ½ 日本語 end"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    assert decoded == text


def byte_level(vocabulary: dict[str, int], merges: list[str], added: dict[str, int], pre: str) -> dict[str, Any]:
    """Return metadata of a byte-level BPE; added tokens are special if they look like it."""
    by_id = {index: text for text, index in {**vocabulary, **added}.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(max(by_id) + 1)]
    kinds = [(_CONTROL if text.startswith("<") else _USER_DEFINED) if text in added else _NORMAL for text in tokens]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
    }


def from_tokenizer_json(path: Path, pre: str) -> dict[str, Any]:
    """Return the metadata of a tokenizer.json's vocabulary."""
    found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    added = {token["content"]: token["id"] for token in found["added_tokens"]}
    return byte_level(found["model"]["vocab"], merges, added, pre)


def qwen(folder: Path, pre: str) -> dict[str, Any]:
    """Return the metadata of Qwen 2's vocabulary."""
    folder = folder / "tokenizers" / "qwen"
    merges = [line for line in (folder / "merges.txt").read_text().splitlines() if line and not line.startswith("#")]
    vocabulary = json.loads((folder / "vocab.json").read_text())
    return byte_level(vocabulary, merges, json.loads((folder / "qwen3_added_tokens.json").read_text()), pre)


def test_qwen(shared_data: Path, tmp_path: Path) -> None:
    metadata = {**qwen(shared_data, "qwen2"), "tokenizer.ggml.eos_token_id": 151645}
    tokenizer = load_model_tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {}))
    check_llama_cpp(tokenizer, shared_data, "qwen2")
    check_original(tokenizer, shared_data, "qwen")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], tokenizer.eos_token_id) == (151644, 151645, 151645) and tokenizer.decode(ids) == "a"


def test_a_wrong_pattern_is_seen(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_model_tokenizer(write_gguf(tmp_path / "m.gguf", qwen(shared_data, "gpt-2"), {}))
    with pytest.raises(AssertionError):
        check_llama_cpp(tokenizer, shared_data, "qwen2")


@pytest.mark.parametrize(
    ("name", "file", "pre"),
    [
        ("deepseek-r1", "tokenizer.json.gz", "deepseek-v3"),
        ("granite-3.1", "tokenizer.json", "gpt-2"),
    ],
)
def test_originals(name: str, file: str, pre: str, shared_data: Path, tmp_path: Path) -> None:
    metadata = from_tokenizer_json(shared_data / "tokenizers" / name / file, pre)
    check_original(load_model_tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {})), shared_data, name)


def tiny(**fields: Any) -> dict[str, Any]:
    """Return metadata of a small byte-level BPE."""
    tokens = ["<s>", "</s>", "a", "b", "ab", "Ġ", "<tool>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1, 1, 4], np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def test_flags_special_tokens_and_templates(tmp_path: Path) -> None:
    metadata = {
        **tiny(add_bos_token=True, add_eos_token=True),
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ messages[0].content }}{{ eos_token }}",
    }
    tokenizer = load_model_tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {}))
    assert tokenizer.encode("ab a<tool>") == [0, 4, 5, 2, 6, 1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 7)
    assert tokenizer.decode([0, 4, 6, 1]) == "ab<tool>" and tokenizer.all_special_ids == {0, 1}
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat) == [0, 4]
    assert set(tokenizer.chat_templates) == {"default", "tool_use"}
    assert tokenizer.hf("ab a<tool>")["input_ids"] == tokenizer.encode("ab a<tool>")
    assert tokenizer.hf.bos_token == "<s>"
    plain = load_model_tokenizer(write_gguf(tmp_path / "plain.gguf", tiny(), {}))
    assert plain.encode("ab") == [4] and not plain.chat_templates
    by_default = load_model_tokenizer(write_gguf(tmp_path / "llama.gguf", tiny(pre="llama-bpe"), {}))
    assert by_default.encode("ab") == [0, 4]


BAD = {
    "kind": (tiny(model="bert"), "'bert' is not supported; supported: llama, gpt2; pass --tokenizer"),
    "pattern": (tiny(pre="secret"), "'tokenizer.ggml.pre': 'secret' is not supported, so that .* supported: codeshell"),
    "default pattern": (tiny(pre="default"), "'default' is not supported"),
    "no pattern": ({k: v for k, v in tiny().items() if k != "tokenizer.ggml.pre"}, "pre': is missing, so that"),
    "no merges": ({k: v for k, v in tiny().items() if k != "tokenizer.ggml.merges"}, "merges': expected an array of"),
    "merges": (tiny(merges=["ab"]), "expected two tokens with a space between them"),
    "merges of others": (tiny(merges=["x y"]), "not a BPE of the tokens"),
    "special token": (tiny(bos_token_id=7), "bos_token_id': expected one of the 7 tokens, got 7"),
    "twice": (tiny(tokens=["a", "b", "ab", "a", "c", "d", "e"]), "a token occurs twice"),
    "types": (tiny(token_type=np.zeros(3, np.int32)), "token_type': expected an array of 7 numbers, got an array of 3"),
    "type": (tiny(token_type=np.full(7, -1, np.int32)), "token_type': expected types from 0 to 6"),
    "infinite scores": (tiny(model="llama", scores=np.full(7, np.inf, np.float32)), "scores': expected finite numbers"),
    "no unknown token": (
        tiny(model="llama", scores=np.zeros(7, np.float32), token_type=np.ones(7, np.int32)),
        "is not a sentencepiece model",
    ),
    "scores": (tiny(model="llama"), "expected the score of each token, but it is missing"),
    "no tokenizer": ({"general.architecture": "llama"}, "'tokenizer.ggml.model': expected a string, but it is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_named(case: str, tmp_path: Path) -> None:
    metadata, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        load_model_tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {}))


def test_transformers_cannot_read_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer_mode='hf' cannot read the tokenizer of"):
        load_model_tokenizer(write_gguf(tmp_path / "m.gguf", tiny(), {}), "hf")


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_pattern_compiles_and_keeps_the_text(pre: str, tmp_path: Path) -> None:
    alphabet = list(byte_alphabet())
    metadata = tiny(
        pre=pre,
        tokens=alphabet,
        token_type=np.ones(len(alphabet), np.int32),
        merges=[],
        add_bos_token=False,
    )
    tokenizer = load_model_tokenizer(write_gguf(tmp_path / "m.gguf", metadata, {}))
    text = "It's 12345 TIMES  as Führer's\r\n\n\t日本語 ½ end "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def llama3(folder: Path) -> dict[str, Any]:
    """Return the metadata of Llama 3's vocabulary, with the merges that its ranks imply."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    lines = (folder / "tokenizers" / "llama3" / "tokenizer.model").read_bytes().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [merged(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1]
    pairs = [f"{spelt[pair[0]]} {spelt[pair[1]]}" for pair in merges if len(pair) == 2]
    return byte_level({spelt[token]: rank for token, rank in ranks.items()}, pairs, {}, "llama-bpe")


def merged(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """Return the parts that a token is merged from: what tokens before it make of its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [(ranks.get(parts[at] + parts[at + 1], rank), at) for at in range(len(parts) - 1)]
        best, at = min(found)
        if best >= rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


@pytest.mark.slow
def test_llama3(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_model_tokenizer(write_gguf(tmp_path / "m.gguf", llama3(shared_data), {}))
    check_llama_cpp(tokenizer, shared_data, "llama-bpe")
    check_original(tokenizer, shared_data, "llama3")
