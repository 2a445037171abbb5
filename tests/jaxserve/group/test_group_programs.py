"""Programs that the processes of a group have compiled are not compiled again when it starts again."""

from pathlib import Path

import pytest

from tests.group_driver import num_compiled, outcomes_of_group
from tests.jaxserve.group.test_group_meshes import SETTINGS, SHAPES
from tests.random_checkpoint import write_checkpoint_with_tokenizer

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
