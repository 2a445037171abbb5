"""Which of a directory's checkpoints is opened: the one with the model's tensors, whatever the files are called."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, Listing, convert, open_checkpoint, save_orbax
from checkpoints.choice import has_model, is_adapter

torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")

MODEL: Listing = {"model.embed_tokens.weight": (8, 2), "model.norm.weight": (2,)}
TENSORS = {name: np.full(shape, 7, np.float32) for name, shape in MODEL.items()}
ADAPTER = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": np.zeros((2, 2), np.float32)
    for layer in range(3)
    for side in "AB"
}
HEAD = {"v_head.summary.weight": np.zeros((1, 2), np.float32)}
DRAFT = {"model.embed_tokens.weight": np.zeros((4, 2), np.float32), "model.norm.weight": np.zeros(2, np.float32)}


def to_bin(path: Path) -> None:
    torch.save({name: torch.tensor(array) for name, array in TENSORS.items()}, path / "pytorch_model.bin")


def to_bin_shards(path: Path) -> None:
    shards = {f"pytorch_model-0000{i}-of-00002.bin": name for i, name in enumerate(TENSORS, 1)}
    for file, name in shards.items():
        torch.save({name: torch.tensor(TENSORS[name])}, path / file)
    index = {"weight_map": {name: file for file, name in shards.items()}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def to_bin_shards_without_index(path: Path) -> None:
    to_bin_shards(path)
    (path / "pytorch_model.bin.index.json").unlink()


def to_indexed(path: Path) -> None:
    save_file(TENSORS, path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def to_loose(path: Path) -> None:
    save_file(TENSORS, path / "weights.safetensors")


def to_orbax(path: Path) -> None:
    save_orbax(path / "orbax", {name: jnp.asarray(array) for name, array in TENSORS.items()})


FORMATS: list[Callable[[Path], None]] = [to_bin, to_bin_shards, to_bin_shards_without_index, to_loose]
OTHERS = {
    "adapter_model": ADAPTER,
    "model": ADAPTER,
    "value_head": HEAD,
    "draft": DRAFT,
}


def tensors_of(path: Path, **options: object) -> dict[str, tuple[int, ...]]:
    with open_checkpoint(path, **options) as reader:  # pyright: ignore[reportArgumentType]
        return {name: info.shape for name, info in reader.tensors.items()}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("write", [*FORMATS, to_indexed], ids=lambda write: write.__name__)
def test_what_lies_beside_a_model_is_not_opened(write: Callable[[Path], None], other: str, tmp_path: Path) -> None:
    write(tmp_path)
    save_file(OTHERS[other], tmp_path / f"{other}.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == MODEL
    assert len(os.listdir("/proc/self/fd")) == before, "the others are closed"


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_an_adapter_is_known_without_the_model(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Where nothing says which tensors to look for, as in a conversion."""
    (tmp_path / "source").mkdir()
    write(tmp_path / "source")
    save_file(ADAPTER, tmp_path / "source" / "adapter_model.safetensors")
    (tmp_path / "source" / "adapter_config.json").write_text("{}")
    assert tensors_of(tmp_path / "source") == MODEL
    convert(tmp_path / "source", tmp_path / "new", "safetensors")
    converted = load_file(tmp_path / "new" / "model.safetensors")
    assert converted.keys() == TENSORS.keys() and (converted["model.norm.weight"] == 7).all()
    assert not (tmp_path / "new" / "adapter_config.json").exists(), "no adapter is converted"


def test_orbax_is_chosen_by_its_tensors_too(tmp_path: Path) -> None:
    save_file(ADAPTER, tmp_path / "model.safetensors")
    to_orbax(tmp_path)
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == tensors_of(tmp_path) == MODEL
    (tmp_path / "orbax").rename(tmp_path / "kept")
    save_orbax(tmp_path / "orbax", {"opt_state.count": jnp.zeros(2)})
    to_bin(tmp_path)
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == tensors_of(tmp_path) == MODEL
    (tmp_path / "orbax" / "manifest.ocdbt").write_bytes(b"damaged")
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == MODEL


def test_an_item_of_an_orbax_checkpoint(tmp_path: Path) -> None:
    """Trainers save several items: the one with the weights is read."""
    to_orbax(tmp_path)
    save_orbax(tmp_path / "optimizer", {"opt_state.count": jnp.zeros(2)})
    (tmp_path / "orbax" / "state").rename(tmp_path / "orbax" / "default")
    (tmp_path / "optimizer" / "state").rename(tmp_path / "orbax" / "state")
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == tensors_of(tmp_path) == MODEL


def test_files_without_an_index_are_taken_together(tmp_path: Path) -> None:
    for number, (name, array) in enumerate(TENSORS.items()):
        save_file({name: array}, tmp_path / f"part-{number}.safetensors")
    save_file(HEAD, tmp_path / "value_head.safetensors")
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == MODEL
    assert tensors_of(tmp_path).keys() == {*MODEL, *HEAD}, "nothing says that the head is not the model's"


def test_the_model_that_lacks_the_fewest_is_reported(tmp_path: Path) -> None:
    save_file(HEAD, tmp_path / "value_head.safetensors")
    torch.save({"model.norm.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == {"model.norm.weight": (2,)}


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    save_file(ADAPTER, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has an adapter's tensors only, not a model's; merge the adapter"):
        open_checkpoint(tmp_path, lambda: [MODEL])
    assert tensors_of(tmp_path).keys() == ADAPTER.keys()


def test_damage_is_reported_unless_it_is_beside_the_model(tmp_path: Path) -> None:
    to_bin(tmp_path)
    (tmp_path / "extra.safetensors").write_bytes(b"version https://git-lfs")
    assert tensors_of(tmp_path, listings=lambda: [MODEL]) == MODEL
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path, lambda: [MODEL])


def test_formats_by_name(tmp_path: Path) -> None:
    to_bin(tmp_path)
    with pytest.raises(CheckpointError, match=r"no weights found; looked for model\.safetensors, .* and \*\.safetens"):
        open_checkpoint(tmp_path, load_format="safetensors")
    save_file({**TENSORS, "more": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert "more" not in tensors_of(tmp_path, load_format="pt")
    assert "more" in tensors_of(tmp_path, load_format="safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no weights found; looked for pytorch_model\.bin, "):
        open_checkpoint(tmp_path, load_format="pt")


def test_what_a_directory_holds(tmp_path: Path) -> None:
    assert not has_model(tmp_path)
    save_file(ADAPTER, tmp_path / "adapter_model.safetensors")
    assert not has_model(tmp_path)
    save_file(HEAD, tmp_path / "value_head.safetensors")
    assert not has_model(tmp_path)
    to_loose(tmp_path)
    assert has_model(tmp_path)
    assert is_adapter(["prompt_embeddings"]) and not is_adapter(["model.exploration.weight"])
