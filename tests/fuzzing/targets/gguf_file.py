"""GGUF files: a reader of any bytes reads every tensor and text, or names the fault."""

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_file import GgufFile
from checkpoints.quantized.gguf_header import Strings
from checkpoints.tensor_info import whole_index
from tests.fuzzing.files import stored
from tests.fuzzing.target import Target
from tests.gguf_files import Blocks, gguf_bytes, plain


def run(data: bytes) -> None:
    """Open a file and read all of it."""
    with stored(data) as path:
        try:
            with GgufFile(path) as file:
                for name, info in file.tensors.items():
                    assert file.read(name, whole_index(info.shape)).nbytes == info.num_bytes
                for value in file.metadata.fields.values():
                    if isinstance(value, Strings):
                        list(value)
        except CheckpointError:
            return


_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "base": 10000.0,
    "negative": -5,
    "yes": True,
    "scores": np.array([0.5, -1.5], np.float32),
    "tokens": ["a", "", "käse"],
}
_TENSORS = {
    "m": plain(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "v": plain(np.ones(5, np.float16)),
    "q": Blocks((2, 32), 8, bytes(range(68))),
}

TARGET = Target(
    run,
    seeds=(gguf_bytes({}, {}), gguf_bytes(_METADATA, {}), gguf_bytes(_METADATA, _TENSORS)),
    words=(b"GGUF", b"general.alignment", b"split.count", b"\3\0\0\0", b"\x09\0\0\0", b"\x08\0\0\0"),
    packages=("checkpoints",),
)
