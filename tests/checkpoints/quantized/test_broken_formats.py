"""Break the decoding of quantized weights on purpose: the comparisons that the gate runs must notice each fault.

Each comparison passes as long as nothing is broken, as its own file shows. Wrong patterns that split text are in
``test_gguf_tokenizer``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.quantized import awq, gptq, planes
from checkpoints.quantized.gguf import RenamedReader
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.reader import QuantizedReader
from tests.checkpoints.quantized.test_formats import test_weights_are_what_the_file_stands_for as compare_weights
from tests.checkpoints.quantized.test_gguf import test_rows_of_queries_and_keys_are_put_back as compare_rows
from tests.checkpoints.quantized.test_gguf_blocks import test_blocks_equal_those_of_the_package as compare_blocks

WITH_ZEROS = ("awq", "gptq 4 bits", "gptq act-order", "compressed-tensors 4 bits with zeros")
WITH_SCALES = (
    *WITH_ZEROS,
    *("compressed-tensors int8", "compressed-tensors fp8 blocks", "compressed-tensors mxfp4", "modelopt nvfp4"),
    *("fp8 blocks, ragged", "nf4 double", "nf4, blocks across rows", "bitsandbytes int8", "mlx 4 bits"),
)


def change_planes(monkeypatch: pytest.MonkeyPatch, change: Callable[[Planes], Planes]) -> None:
    """Change all planes that readers decode."""
    boxes = QuantizedReader._boxes

    def changed(self: QuantizedReader, *arguments: Any) -> Iterator[Planes]:
        return map(change, boxes(self, *arguments))

    monkeypatch.setattr(QuantizedReader, "_boxes", changed)


@pytest.mark.parametrize("case", ["compressed-tensors 4 bits", "gptq 4 bits", "mlx 4 bits", "modelopt nvfp4", "nf4"])
def test_swapped_nibbles(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    halve = planes._halve
    monkeypatch.setattr(planes, "_halve", lambda fields, width: halve(fields >> 4 | fields << 4, width))
    with pytest.raises(AssertionError):
        compare_weights(case, tmp_path)


def test_nibbles_of_awq_in_plain_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(awq, "_PLACES", tuple(range(8)))
    with pytest.raises(AssertionError):
        compare_weights("awq", tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_swapped_nibbles_of_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = planes.bit_fields
    monkeypatch.setattr(planes, "bit_fields", lambda data, *sizes: fields(data >> 4 | data << 4, *sizes))
    with pytest.raises(AssertionError):
        compare_blocks(kind)


@pytest.mark.parametrize("case", WITH_SCALES)
def test_scales_of_a_neighbour(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def move(found: Planes) -> Planes:
        axis = int(found.scales.shape[1] > 1)
        return found._replace(scales=np.roll(found.scales, 1, axis))

    change_planes(monkeypatch, move)
    with pytest.raises(AssertionError):
        compare_weights(case, tmp_path)


@pytest.mark.parametrize("case", WITH_ZEROS)
@pytest.mark.parametrize("offset", [-1, 1])
def test_zero_points_off_by_one(case: str, offset: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def shift(found: Planes) -> Planes:
        assert found.zeros is not None
        return found._replace(zeros=found.zeros.astype(np.float32) + offset)

    change_planes(monkeypatch, shift)
    with pytest.raises(AssertionError):
        compare_weights(case, tmp_path)


@pytest.mark.parametrize("case", ["gptq 4 bits", "gptq v2"])
def test_the_other_version_of_gptq(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make = gptq.Gptq.__init__

    def make_other(self: gptq.Gptq, settings: Any) -> None:
        make(self, settings)
        self._stored_zero_offset ^= 1

    monkeypatch.setattr(gptq.Gptq, "__init__", make_other)
    with pytest.raises(AssertionError):
        compare_weights(case, tmp_path)


def test_interleaved_rows_left_interleaved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read_in_order(self: RenamedReader, source: Any, box: Any) -> np.ndarray:
        return self._reader.read(source.stored, box)

    monkeypatch.setattr(RenamedReader, "_read_interleaved", read_in_order)
    with pytest.raises(AssertionError):
        compare_rows(tmp_path)
