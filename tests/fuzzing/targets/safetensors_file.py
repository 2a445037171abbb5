"""Safetensors files: a reader of any bytes reads every tensor, or names the fault."""

import json

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_reader import DTYPES, SafetensorsReader
from checkpoints.tensor_info import whole_index
from tests.fuzzing.files import stored
from tests.fuzzing.target import Target


def run(data: bytes) -> None:
    """Open a file and read all of it."""
    with stored(data) as path:
        try:
            with SafetensorsReader(path) as reader:
                for name, info in reader.tensors.items():
                    assert reader.read(name, whole_index(info.shape)).nbytes == info.num_bytes
        except CheckpointError:
            return


def _file(header: object, num_bytes: int) -> bytes:
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + bytes(num_bytes)


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TARGET = Target(
    run,
    seeds=(
        _file({}, 0),
        _file({"a": _entry("F32", [2, 3], 0, 24), "b": _entry("BF16", [], 24, 26)}, 26),
        _file({"__metadata__": {"format": "pt"}, "q": _entry("I8", [0, 4], 0, 0), "r": _entry("BOOL", [3], 0, 3)}, 3),
    ),
    words=(b'"data_offsets":[', b'"shape":', b'"__metadata__":', b"18446744073709551616", *map(str.encode, DTYPES)),
    packages=("checkpoints",),
)
