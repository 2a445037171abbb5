"""Tokenizers for tests: two tiny ones made here, and real ones from the data folder."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

LETTERS = "▁abcdehlo.!?\n<|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Name -> file in the model directory -> file under data/tokenizers, or its text.
REAL: Mapping[str, Mapping[str, str]] = {
    "llama2": {name: f"llama2/{name}" for name in ("tokenizer.json", "tokenizer_config.json")},
    "llama2-model-only": {"tokenizer.model": "llama2/tokenizer.model"},
    "baichuan-7b": {"tokenizer.model": "baichuan-7b/tokenizer.model"},
    "mistral-v1": {"tokenizer.model": "mistral/tokenizer.model.v1"},
    "mistral-v2": {"tokenizer.model": "mistral/tokenizer.model.v2"},
    "mistral-v3": {"tokenizer.model": "mistral/tokenizer.model.v3"},
    "mistral-v7": {"tokenizer.model": "mistral/tokenizer.model.v7"},
    "phi3": {name: f"phi3/{name}" for name in ("tokenizer.json", "tokenizer_config.json")},
    "pythia": {name: f"pythia/{name}" for name in ("tokenizer.json", "tokenizer_config.json")},
    "granite-3.1": {name: f"granite-3.1/{name}" for name in ("tokenizer.json", "tokenizer_config.json")},
    "deepseek-r1": {
        "tokenizer.json": "deepseek-r1/tokenizer.json.gz",
        "tokenizer_config.json": "deepseek-r1/tokenizer_config.json",
    },
    "gpt2": {
        "vocab.json": "gpt2/vocab.json",
        "merges.txt": "gpt2/merges.txt",
        "config.json": '{"model_type": "gpt2"}',
    },
    "qwen": {
        "vocab.json": "qwen/vocab.json",
        "merges.txt": "qwen/merges.txt",
        "tokenizer_config.json": "qwen/qwen3_tokenizer_config.json",
        "added_tokens.json": "qwen/qwen3_added_tokens.json",
    },
    "stories260k-model-only": {"tokenizer.model": "../models/stories260k/tokenizer.model"},
}


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, a few longer ones, one special and one plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "hell", "Ġh", "ÃĤ", "ðŁ"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "h"), ("Ã", "Ĥ"), ("ð", "Ł")]
    made = tokenizers.Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["é ü"])
    return made


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Letters, byte tokens for the rest, BOS and role tokens: Llama 2's form."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁a", "he"]
    merges = [("▁", "a"), ("h", "e")]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-fallback tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    byte_fallback_tokenizer().save(str(directory / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "single_word": False}
    config = {"bos_token": "<s>", "eos_token": eos, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tiny_tokenizers(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers that need no data: "byte-level", "byte-fallback" and "words" (no decoder at all)."""
    byte_level = tmp_path_factory.mktemp("byte_level")
    byte_level_tokenizer().save(str(byte_level / "tokenizer.json"))
    words = tmp_path_factory.mktemp("words")
    word_level = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "ö": 2, "": 3}, unk_token="[UNK]"))
    word_level.save(str(words / "tokenizer.json"))
    return {
        "byte-level": load_tokenizer(byte_level),
        "byte-fallback": load_tokenizer(tiny_directory),
        "words": load_tokenizer(words),
    }


@pytest.fixture(scope="session")
def real_directory(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model directory of a real tokenizer by its name in `REAL`."""
    root = tmp_path_factory.mktemp("real")

    def make(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            directory.mkdir()
            for file, source in REAL[name].items():
                _place(directory / file, source, shared_data / "tokenizers")
        return directory

    return make


@pytest.fixture(scope="session")
def real_tokenizer(real_directory: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Loads a real tokenizer by its name in `REAL`, once a session."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_tokenizer(real_directory(name))
        return loaded[name]

    return load


@pytest.fixture(params=sorted(REAL))
def each_real_tokenizer(
    request: pytest.FixtureRequest, real_tokenizer: Callable[[str], Tokenizer]
) -> tuple[str, Tokenizer]:
    """Every real tokenizer in turn, with its name."""
    return request.param, real_tokenizer(request.param)


def _place(path: Path, source: str, folder: Path) -> None:
    if source.startswith("{"):
        path.write_text(source)
    elif source.endswith(".gz"):
        path.write_bytes(gzip.decompress((folder / source).read_bytes()))
    else:
        shutil.copy(folder / source, path)
