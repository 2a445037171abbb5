"""The pickle of a ``.bin`` file: any bytes give a table of tensors, or an error that names the file."""

import pickle
import struct

from checkpoints.errors import CheckpointError
from checkpoints.torch_pickle import read_tensor_table
from tests.fuzzing.target import Target


def run(data: bytes) -> None:
    """Read a table."""
    try:
        read_tensor_table(data, "file")
    except CheckpointError as error:
        assert "file" in str(error)


def _name(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _tensor(shape: tuple[int, int]) -> bytes:
    """Return the opcodes of a float32 tensor, as torch writes them."""
    storage = b"(" + _name("storage") + b"ctorch\nFloatStorage\n" + _name("0") + _name("cpu") + b"K\6tQ"
    numbers = b"".join(pickle.dumps(each, 2)[2:-1] for each in (0, shape, (shape[1], 1)))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89ccollections\nOrderedDict\n)RtR"


_ITEMS = b"}(" + _name("a") + _tensor((2, 3)) + _name("b") + _tensor((3, 2)) + b"u."
PICKLES = (
    b"\x80\2" + _ITEMS,
    b"\x80\2ccollections\nOrderedDict\n)R(" + _name("a") + _tensor((1, 1)) + b"u}" + _name("_metadata") + b"}sb.",
    b"\x80\4\x95" + struct.pack("<Q", len(_ITEMS)) + _ITEMS,
)
"""State dictionaries of one storage of six elements."""

TARGET = Target(
    run,
    seeds=PICKLES,
    words=(
        *(b"ctorch\nHalfStorage\n", b"ctorch._utils\n_rebuild_parameter\n", b"cbuiltins\ngetattr\n", b"\x93", b"\x94"),
        *(b"h\0", b"q\0", b"(", b"t", b"R", b"b", b"u", b"s", b"Q", b"]", b"}", b")", b"e", b"\x8c\1a", b"\x8a\2\0\1"),
    ),
    packages=("checkpoints",),
)
