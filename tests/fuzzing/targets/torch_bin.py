"""PyTorch's ``.bin`` files: a reader of any bytes reads every tensor, or names the fault; it runs no pickle."""

import io
import zipfile

from checkpoints.errors import CheckpointError
from checkpoints.tensor_info import whole_index
from checkpoints.torch_reader import TorchReader
from tests.fuzzing.files import stored
from tests.fuzzing.target import Target
from tests.fuzzing.targets.torch_pickle import PICKLES


def run(data: bytes) -> None:
    """Open a file and read its tensors, up to a MiB: views may repeat an element any number of times."""
    with stored(data) as path:
        try:
            with TorchReader(path) as reader:
                for name, info in reader.tensors.items():
                    if info.num_bytes <= 1 << 20:
                        assert reader.read(name, whole_index(info.shape)).nbytes == info.num_bytes
        except CheckpointError:
            return


def _archive(pickled: bytes, method: int) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as file:
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("data/0", bytes(24))):
            file.writestr(zipfile.ZipInfo(f"m/{name}"), content, method)
    return written.getvalue()


TARGET = Target(
    run,
    seeds=tuple(_archive(each, method) for each in PICKLES for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)),
    words=(b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"m/data.pkl", b"m/data/0", b"m/byteorder"),
    packages=("checkpoints", "zipfile"),
)
