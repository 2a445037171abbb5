"""Weights that the formats' own tools have quantized are read as these tools decode them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import open_checkpoint
from checkpoints.tensor_info import whole_index

torch = pytest.importorskip("torch", reason="needs torch")
save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file

SHAPE = (48, 256)


def weight() -> Any:
    """A matrix to quantize."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def read(folder: Path, tensors: dict[str, Any], section: dict[str, Any]) -> np.ndarray:
    """What is read from a checkpoint of these tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    with open_checkpoint(folder) as reader:
        return reader.read("m.weight", whole_index(SHAPE))


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(kind: str, is_double: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    packed, state = functional.quantize_4bit(weight(), blocksize=64, quant_type=kind, compress_statistics=is_double)
    tensors = {"m.weight": packed, **{f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    np.testing.assert_array_equal(found, functional.dequantize_4bit(packed, state).numpy())


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    numbers, largest, _ = functional.int8_vectorwise_quant(weight().half())
    tensors = {"m.weight": numbers, "m.SCB": largest.float(), "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    expected = functional.int8_vectorwise_dequant(numbers, largest.float()).numpy()
    np.testing.assert_allclose(found, expected, rtol=3e-7)  # the tool multiplies with a rounded 1 / 127


def module(name: str) -> Any:
    """A module of compressed-tensors."""
    return pytest.importorskip(f"compressed_tensors.{name}", reason="needs compressed-tensors")


def section_of(args: Any) -> dict[str, Any]:
    """The section of a config.json for one group of modules with these arguments."""
    groups = {"group_0": {"weights": args.model_dump(mode="json")}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_integers_of_compressed_tensors(bits: int, is_symmetric: bool, tmp_path: Path) -> None:
    quantization = module("quantization")
    settings = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group", "group_size": 32}
    args = quantization.QuantizationArgs(**settings)
    groups = weight().reshape(SHAPE[0], -1, 32)
    scales, zeros = module("quantization.utils").calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight(), "weight_scale": scales} | ({} if is_symmetric else {"weight_zero_point": zeros})
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    stored = module("compressors").BaseCompressor.load_from_registry("pack-quantized").compress(state, scheme)
    found = read(tmp_path, {f"m.{name}": part for name, part in stored.items()}, section_of(args))
    expected = module("quantization.lifecycle.forward").fake_quantize(weight(), scales, zeros, args)
    np.testing.assert_array_equal(found, expected.numpy())


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    quantization = module("quantization")
    settings = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    args = quantization.QuantizationArgs(**settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    scales = 2 ** torch.floor(torch.log2(weight().reshape(SHAPE[0], -1, 32).abs().amax(-1) / 4))
    compressor = module("compressors").BaseCompressor.load_from_registry("mxfp4-pack-quantized")
    stored = compressor.compress({"weight": weight(), "weight_scale": scales}, scheme)
    found = read(tmp_path, {f"m.{name}": part for name, part in stored.items()}, section_of(args))
    np.testing.assert_array_equal(found, compressor.decompress(dict(stored), scheme)["weight"].float().numpy())
