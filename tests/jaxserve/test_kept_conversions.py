"""Quantized checkpoints in another container: codes and scales stay as they are stored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import CheckpointError, convert, open_checkpoint
from checkpoints.quantized.reader import quantized_in
from checkpoints.tensor_info import whole_index
from jaxserve import LLM
from jaxserve.cli import main
from tests.checkpoints.quantized.test_gguf_blocks import decode as decoded
from tests.gguf_files import Blocks, write_gguf
from tests.gguf_models import metadata_of, random_store, to_gguf
from tests.jaxserve.test_gguf_models import BASE, FAMILIES
from tests.jaxserve.test_quantized_checkpoints import DENSE, write, write_gpt_oss
from tests.jaxserve.test_stored_weights import COMMON, STORED, generated, marked
from tests.quantized_cases import CASES
from tests.random_checkpoint import write_checkpoint

SMALL = {**DENSE, "num_hidden_layers": 1}


def converted(source: Path, destination: Path, format: str) -> Path:
    main(["convert", str(source), str(destination), "--format", format])
    return destination


def check_same_answers(source: Path, destination: Path, **settings: Any) -> None:
    """Bit for bit."""
    outputs = []
    for path in (source, destination):
        with LLM(str(path), warm_up=False, **COMMON, **STORED, **settings) as llm:
            outputs.append(generated(llm))
    for one, other in zip(*outputs, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("case", marked(CASES, ("gptq act-order", "nf4 double", "compressed-tensors nvfp4")))
def test_each_format_keeps_what_it_stores(case: str, format: str, tmp_path: Path) -> None:
    _, quantized = write(tmp_path, SMALL, CASES[case])
    kept = converted(quantized, tmp_path / "kept", format)
    with open_checkpoint(kept) as reader, open_checkpoint(quantized) as expected:
        found, before = quantized_in(reader), quantized_in(expected)
        assert found is not None and before is not None
        assert (
            found.stored.tensors.keys()
            == before.stored.tensors.keys()
            > before.tensors.keys() - before.quantized.keys()
        )
        for name, info in before.stored.tensors.items():
            box = whole_index(info.shape)
            assert found.stored.tensors[name].dtype == info.dtype
            assert found.stored.read(name, box).tobytes() == before.stored.read(name, box).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("case", ["awq", "gptq act-order", "compressed-tensors nvfp4", "fp8 blocks, ragged"])
def test_answers_of_what_is_kept_are_the_same(case: str, format: str, tmp_path: Path) -> None:
    _, quantized = write(tmp_path, SMALL, CASES[case])
    check_same_answers(quantized, converted(quantized, tmp_path / "kept", format))


KINDS = {"Q4_K": ("Q4_K", 12, 256, 144), "Q6_K": ("Q6_K", 14, 256, 210), "NVFP4": ("NVFP4", 40, 64, 36)}


def write_blocks(
    folder: Path, kinds: dict[str, tuple[str, int, int, int]], architecture: str = "llama", **fields: Any
) -> Path:
    config = {**BASE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, **fields}
    write_checkpoint(folder, config, seed=3)
    tensors, _ = to_gguf(architecture, config, load_file(folder / "model.safetensors"), random_store(kinds, decoded))
    if "attn_v" in kinds:
        tensors["blk.0.attn_v.scale"] = Blocks((1,), 0, np.float32(0.75).tobytes())
    return write_gguf(folder / "model.gguf", metadata_of(architecture, config), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_factors_of_blocks_are_kept(format: str, tmp_path: Path) -> None:
    path = write_blocks(tmp_path, {"attn_v": KINDS["NVFP4"], "": KINDS["NVFP4"]})
    kept = converted(path, tmp_path / "kept", format)
    check_same_answers(path, kept)
    with open_checkpoint(kept) as reader:
        assert reader.tensors.keys() == open_checkpoint(path).tensors.keys()


@pytest.mark.slow
def test_matrices_that_the_file_has_in_other_pieces_are_assembled(tmp_path: Path) -> None:
    """Queries, keys and values are apart in the file, and one matrix in Hugging Face's checkpoints."""
    changes, _, architecture = FAMILIES["baichuan"]
    path = write_blocks(tmp_path, {"": KINDS["Q4_K"]}, architecture, **{**changes, "head_dim": 64})
    kept = converted(path, tmp_path / "kept", "safetensors")
    with open_checkpoint(kept) as found, open_checkpoint(path) as expected:
        assert found.tensors == expected.tensors
        for name, info in expected.tensors.items():
            box = whole_index(info.shape)
            np.testing.assert_array_equal(found.read(name, box), expected.read(name, box))


@pytest.mark.parametrize("format", marked(["safetensors", "orbax"], ("safetensors",)))
def test_blocks_of_gguf_files_are_kept(format: str, tmp_path: Path) -> None:
    """Types are mixed in one projection, whose rows of queries and keys are interleaved in the file."""
    path = write_blocks(tmp_path, {"v_proj": KINDS["Q6_K"], "": KINDS["Q4_K"]})
    kept = converted(path, tmp_path / "kept", format)
    section = json.loads((kept / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "gguf" and section["types"].keys() == {"Q6_K", "Q4_K"}
    assert section["types"]["Q6_K"] == ["model.layers.0.self_attn.v_proj.weight"]
    check_same_answers(path, kept)
    again = converted(kept, tmp_path / "again", "safetensors")
    check_same_answers(kept, again)


def test_unknown_types_of_blocks_are_refused(tmp_path: Path) -> None:
    kept = converted(write_blocks(tmp_path, {"": KINDS["Q4_K"]}), tmp_path / "kept", "safetensors")
    config = json.loads((kept / "config.json").read_text())
    config["quantization_config"]["types"] = {"Q9_K": ["x"]}
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="types: 'Q9_K' is not supported; supported: Q4_0"):
        open_checkpoint(kept)


@pytest.mark.slow
def test_openai_s_names_are_kept(tmp_path: Path) -> None:
    _, quantized, _ = write_gpt_oss(tmp_path)
    check_same_answers(quantized, converted(quantized, tmp_path / "kept", "safetensors"), max_model_len=64)


def test_a_file_about_quantization_is_not_copied_beside_floats(tmp_path: Path) -> None:
    _, quantized = write(tmp_path, SMALL, CASES["gptq 4 bits"])
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (quantized / "config.json").write_text(json.dumps(config))
    convert(quantized, tmp_path / "floats", "safetensors", "float32")
    convert(quantized, tmp_path / "kept", "safetensors")
    with open_checkpoint(tmp_path / "floats") as floats, open_checkpoint(tmp_path / "kept") as kept:
        assert quantized_in(floats) is None and quantized_in(kept) is not None
        for name, info in floats.tensors.items():
            box = whole_index(info.shape)
            np.testing.assert_array_equal(floats.read(name, box), kept.read(name, box))
