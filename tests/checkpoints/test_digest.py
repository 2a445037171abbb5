"""The digest of a model's files: what changes it, and what a wrong one says."""

import hashlib
import shutil
from pathlib import Path

import pytest

from checkpoints.digest import check_model_digest, model_digest
from checkpoints.errors import CheckpointError
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.device.build import find_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIRECTORY, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__")))


def test_it_is_that_of_a_list_of_sums(model: Path) -> None:
    files = sorted(file for file in model.iterdir() if file.suffix in (".json", ".safetensors"))
    listed = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    assert model_digest(model) == f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_each_file_that_is_read_counts(model: Path, name: str) -> None:
    before = model_digest(model)
    (model / "notes.txt").write_text("not read")
    assert model_digest(model) == before
    with (model / name).open("ab") as file:
        file.write(b" ")
    assert model_digest(model) != before


def test_an_engine_checks_it_before_it_reads_the_model(model: Path) -> None:
    digest = model_digest(model)
    assert find_model(EngineConfig(model=str(model), model_digest=digest)) == model
    (model / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"model_digest: expected {digest} for the files of .*, got sha256:"):
        find_model(EngineConfig(model=str(model), model_digest=digest))


def test_a_gguf_file_has_one_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    listed = f"{hashlib.sha256(b'GGUF').hexdigest()}  model.gguf\n"
    check_model_digest(path, f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}")


@pytest.mark.parametrize("digest", ["", "abc", "sha256:12", "md5:" + "0" * 64])
def test_what_is_no_digest_is_refused(digest: str) -> None:
    with pytest.raises(ConfigError, match="model_digest: expected sha256: and 64 hexadecimal digits"):
        EngineConfig(model="demo", model_digest=digest)
