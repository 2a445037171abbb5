"""What the processes of a group do at start: a second one compiles nothing, and each reads only its own weights."""

import json
from pathlib import Path

import pytest

from checkpoints.convert import convert
from tests.group_driver import num_compiled, num_read, outcomes_of_group
from tests.jaxserve.group.test_group_meshes import SETTINGS, SHAPES
from tests.random_checkpoint import LLAMA, write_checkpoint_with_tokenizer
from tests.server_process import PROGRAMS_CACHE

pytestmark = pytest.mark.slow


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint_with_tokenizer(model, SHAPES["llama"], seed=7)
    arguments = {"model": str(model), **SETTINGS, "mesh": "tensor=4", "compilation_cache_dir": str(tmp_path / "cache")}
    found = []
    for start in ("first", "second"):
        directory = tmp_path / start
        directory.mkdir()
        found.append(outcomes_of_group(arguments, 2, directory))
        for rank in range(2):
            wanted, compiled = num_compiled(directory, rank)
            assert wanted > 5 and compiled == (wanted if start == "first" else 0)
    assert found[0] == found[1]
    folders = sorted(folder.name for folder in tmp_path.glob("cache/*/*") if folder.is_dir())
    assert folders == ["process-0-of-2", "process-1-of-2"]


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("mesh", ["stage=2", "tensor=2", "stage=2,tensor=2"])
def test_each_process_reads_its_own_weights(mesh: str, format: str, tmp_path: Path) -> None:
    """The model has 16 times as many bytes as a process may read in vain."""
    model = tmp_path / "model"
    model.mkdir()
    config = {
        **LLAMA,
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "max_position_embeddings": 128,
    }
    write_checkpoint_with_tokenizer(model, {**config, "num_hidden_layers": 2}, seed=7)
    if format == "orbax":
        convert(model, tmp_path / "converted", format)
        model = tmp_path / "converted"
    arguments = {"model": str(model), **SETTINGS, "mesh": mesh}
    arguments["compilation_cache_dir"] = str(PROGRAMS_CACHE)
    outcomes_of_group(arguments, 2, tmp_path)
    shards = json.loads((tmp_path / "shards").read_text())
    assert sum(shards) > 16 << 20
    for rank, size in enumerate(shards):
        assert 0.5 * size < num_read(tmp_path, rank) <= size + (1 << 20)
