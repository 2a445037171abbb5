"""Quantizes float weights and shows them as compressed-tensors stores them, which vLLM and others read."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.on_load import METHODS, Made, Method, OnLoadReader
from checkpoints.quantized.records import SPANS, Kept
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Index, TensorInfo, index_bounds

_PER_WORD: Final = 8
_ZERO: Final = 8
_CODES: Final = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}


class ExportReader(BaseReader):
    """Shows some float matrices of a checkpoint as the tensors of compressed-tensors.

    Attributes:
        method: How they are quantized.

    Args:
        reader: The checkpoint; closed with this reader.
        method: One of ``on_load.METHODS``.
        names: The matrices, each ``….weight``.

    Raises:
        CheckpointError: The method is unknown, or nothing can be quantized.
    """

    def __init__(self, reader: CheckpointReader, method: str, names: Collection[str]) -> None:
        if method not in METHODS:
            raise CheckpointError(f"unknown quantization {method!r}; supported: {', '.join(METHODS)}")
        self.method: Method = METHODS[method]
        chosen = {
            name: reader.tensors[name]
            for name in names
            if name.endswith(".weight") and name in reader.tensors and len(reader.tensors[name].shape) == 2
        }
        # One section tells one size of groups.
        records = self.method.records(math.gcd(*(info.shape[1] for info in chosen.values())))
        made = {
            name: Made(self.method, Kept(records, SPANS[-1]))
            for name, info in chosen.items()
            if info.shape[1] % SPANS[-1] == 0
        }
        if not made:
            raise CheckpointError("the checkpoint has no matrix that can be quantized")
        self._reader, self._made = OnLoadReader(reader, made), made
        tensors = {name: info for name, info in reader.tensors.items() if name not in made}
        self.tensors: Mapping[str, TensorInfo] = tensors | {
            stored: info for name in made for stored, info in self._stored(name, chosen[name].shape).items()
        }

    def _stored(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
        """Return the tensors that stand for a matrix."""
        rows, columns = shape
        group = self._made[name].kept.records.group or columns
        if self.method.values == "uint4":
            return {
                f"{name}_packed": TensorInfo((rows, columns // _PER_WORD), np.dtype(np.int32)),
                f"{name}_scale": TensorInfo((rows, columns // group), np.dtype(ml_dtypes.bfloat16)),
                f"{name}_shape": TensorInfo((2,), np.dtype(np.int64)),
            }
        size = self.method.rows
        grid = (1,) if size == 0 else (-(-rows // size), columns // group)
        return {
            name: TensorInfo(shape, _CODES[self.method.values]),
            f"{name}_scale": TensorInfo(grid, np.dtype(np.float32)),
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array; a quantized one is read as a whole."""
        matrix = next((each for each in (name, name.rpartition("_")[0]) if each in self._made), None)
        if matrix is None:
            return self._reader.inner.read(name, index)
        bounds = index_bounds(index, self.tensors[name].shape)
        return self._whole(name, matrix)[tuple(slice(*each) for each in bounds)]

    def _whole(self, name: str, matrix: str) -> np.ndarray:
        shape = self._reader.inner.tensors[matrix].shape
        if name == f"{matrix}_shape":
            return np.array(shape, np.int64)
        codes, scales = self._reader.codes_and_scales(matrix)
        if name == f"{matrix}_scale":
            size, info = self.method.rows, self.tensors[name]
            chosen = scales if size == 1 else scales[:1, :1] if size == 0 else scales[::size]
            return chosen.reshape(info.shape).astype(info.dtype)
        if self.method.values != "uint4":
            return codes.view(_CODES[self.method.values])
        words = (codes.view(np.uint8) + np.uint8(_ZERO)).astype(np.uint32).reshape(shape[0], -1, _PER_WORD)
        shifts = 4 * np.arange(_PER_WORD, dtype=np.uint32)
        return np.bitwise_or.reduce(words << shifts, axis=2).view(np.int32)

    def section(self) -> dict[str, Any]:
        """Return the section ``quantization_config`` of config.json."""
        method = self.method
        is_float, group = method.values == "float8_e4m3fn", next(iter(self._made.values())).kept.records.group
        bits = 4 if method.values == "uint4" else 8
        strategy = "block" if method.rows > 1 else "group" if group else "channel" if method.rows else "tensor"
        weights = _scheme(bits, is_float, strategy, False, group_size=group if strategy == "group" else None)
        if strategy == "block":
            weights["block_structure"] = [method.rows, group]
        inputs = _scheme(8, False, "token", True) if method.rounds_activations else None
        kept = (name.removesuffix(".weight") for name, info in self.tensors.items() if len(info.shape) == 2)
        quantized = {name.removesuffix(".weight") for name in self._made}
        ignored = {each for each in kept if each not in quantized and f"{each}.weight" in self.tensors} | {"lm_head"}
        name = {"uint4": "pack-quantized", "int8": "int-quantized"}.get(method.values, "float-quantized")
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "ignore": sorted(each for each in ignored if "embed" not in each),
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": name}
            },
        }

    @property
    def plain(self) -> set[str]:
        """Names of the tensors that are as the checkpoint has them."""
        return {
            name for name, info in self._reader.inner.tensors.items() if name in self.tensors and name not in self._made
        }

    def close(self) -> None:
        """Close the checkpoint."""
        self._reader.close()


def _scheme(
    bits: int, is_float: bool, strategy: str, is_dynamic: bool, group_size: int | None = None
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": is_dynamic,
        "group_size": group_size,
    }
