"""Reads `pytorch_model.bin` (the zip format of torch 1.6 and later) without torch and without executing its pickle."""

import struct
import zipfile
import zlib

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.file_ranges import RangeFile, StridedLayout, num_spanned
from checkpoints.file_reader import FileReader
from checkpoints.tensor_info import Index, index_bounds
from checkpoints.torch_pickle import TensorRef, read_tensor_table

MAX_PICKLE_BYTES = 256 << 20
MAX_DEFLATE_RATIO = 1032
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 1
_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OSError, struct.error)


class TorchReader(FileReader):
    """Reads one `.bin` file; every tensor is read by byte range, including views and shared storages.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, truncated or in the format before torch 1.6, or its pickle refers to
            anything but tensors and containers.
    """

    def _read_layouts(self) -> dict[str, StridedLayout]:
        self._archive = _Archive(self._file)
        table = read_tensor_table(self._archive.read_pickle(), str(self._file.path))
        self._inflated_keys = {name: tensor.storage.key for name, tensor in table.items()}
        self._storage_bytes: dict[str, int] = {}
        for tensor in table.values():
            storage = tensor.storage
            num_bytes = storage.num_elements * storage.dtype.itemsize
            self._storage_bytes[storage.key] = max(num_bytes, self._storage_bytes.get(storage.key, 0))
        self._last_inflated: tuple[str, np.ndarray] | None = None
        return {name: self._layout(name, tensor) for name, tensor in table.items()}

    def _layout(self, name: str, tensor: TensorRef) -> StridedLayout:
        """Return the tensor's layout in the file, or within its storage when that is compressed."""
        where = f"{self._file.path}: tensor {name!r}"
        storage = tensor.storage
        num_stored = storage.num_elements * storage.dtype.itemsize
        entry = self._archive.storage_entry(storage.key, where)
        if entry.file_size < num_stored:
            raise CheckpointError(
                f"{where}: storage {storage.key!r} holds {entry.file_size} bytes, expected {num_stored}"
            )
        num_needed = (tensor.offset + num_spanned(tensor.shape, tensor.strides)) * tensor.dtype.itemsize
        if num_needed > num_stored:
            raise CheckpointError(
                f"{where}: reaches byte {num_needed} of a storage of {num_stored} bytes "
                f"(offset {tensor.offset}, shape {list(tensor.shape)}, strides {list(tensor.strides)})"
            )
        start = 0 if _is_compressed(entry) else self._archive.data_start(entry, where)
        start += tensor.offset * tensor.dtype.itemsize
        return StridedLayout(start, tensor.dtype, tensor.shape, tensor.strides)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array.

        Args:
            name: the tensor.
            index: one slice of step 1 for each axis.

        Raises:
            CheckpointError: the file has become shorter since it was opened, or cannot be read.
        """
        key = self._inflated_keys[name]
        if not _is_compressed(self._archive.storage_entry(key, name)):
            return super().read(name, index)
        return _box_of(self._inflate(key), self._layouts[name], index)

    def _inflate(self, key: str) -> np.ndarray:
        """Return the bytes of a compressed storage, which torch never writes; the last one is cached."""
        last = self._last_inflated
        if last is None or last[0] != key:
            last = (key, np.frombuffer(self._archive.read_storage(key, self._storage_bytes[key]), np.uint8))
            self._last_inflated = last
        return last[1]

    def close(self) -> None:
        """Close the file."""
        self._last_inflated = None
        super().close()


class _Archive:
    """The directory of a torch zip file: one folder with `data.pkl` and the storages under `data/`."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        if file.read_bytes(0, min(4, file.num_bytes)) != _ZIP_MAGIC:
            raise CheckpointError(
                f"{file.path}: not a torch checkpoint in the zip format of torch 1.6 and later; save an older "
                "checkpoint again with a newer torch, or convert it to safetensors"
            )
        try:
            with zipfile.ZipFile(file.path) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
        except _DAMAGED_ZIP as error:
            raise CheckpointError(f"{file.path}: damaged or truncated zip archive: {error}") from error
        for entry in self._entries.values():
            if entry.flag_bits & _ENCRYPTED or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CheckpointError(
                    f"{file.path}: entry {entry.filename!r} has compression method "
                    f"{entry.compress_type}, expected stored or deflated"
                )
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{file.path}: expected one data.pkl in the archive, found {len(pickles)}")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._entries.get(f"{self._folder}byteorder")
        if order is not None and self._read_entry(order, 64) != b"little":
            raise CheckpointError(f"{file.path}: tensors are in big-endian byte order, which is not supported")

    def read_pickle(self) -> bytes:
        """Return the bytes of `data.pkl`."""
        return self._read_entry(self._entries[f"{self._folder}data.pkl"], MAX_PICKLE_BYTES)

    def storage_entry(self, key: str, where: str) -> zipfile.ZipInfo:
        """Return the archive's entry of a storage."""
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise CheckpointError(f"{where}: storage {key!r} is not in the archive")
        return entry

    def read_storage(self, key: str, num_bytes: int) -> bytes:
        """Return the bytes of a compressed storage, and inflate nothing that follows them.

        The size that its entry declares is checked against deflate's maximum ratio.

        Args:
            key: Key of the storage.
            num_bytes: Size of the storage, at most that of the entry.
        """
        entry = self.storage_entry(key, str(self._file.path))
        return self._read_entry(entry, entry.compress_size * MAX_DEFLATE_RATIO, num_bytes)

    def data_start(self, entry: zipfile.ZipInfo, where: str) -> int:
        """Return the file position of the first byte of an uncompressed entry."""
        header = self._file.read_bytes(entry.header_offset, _LOCAL_HEADER.size)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != _ZIP_MAGIC or start + entry.file_size > self._file.num_bytes:
            raise CheckpointError(f"{where}: entry {entry.filename!r} of the archive reaches outside the file")
        return start

    def _read_entry(self, entry: zipfile.ZipInfo, limit: int, num_bytes: int | None = None) -> bytes:
        """Return an entry's first bytes, or all if ``num_bytes`` is None; it may declare up to ``limit``."""
        if entry.file_size > limit:
            raise CheckpointError(
                f"{self._file.path}: entry {entry.filename!r} of the archive declares {entry.file_size} bytes, "
                f"expected at most {limit}"
            )
        try:
            with zipfile.ZipFile(self._file.path) as archive, archive.open(entry) as stream:
                content = stream.read(entry.file_size if num_bytes is None else num_bytes)
        except (*_DAMAGED_ZIP, RuntimeError) as error:
            raise CheckpointError(f"{self._file.path}: entry {entry.filename!r} is damaged: {error}") from error
        if num_bytes is not None and len(content) < num_bytes:
            raise CheckpointError(
                f"{self._file.path}: entry {entry.filename!r} is damaged: it has {len(content)} bytes, not {num_bytes}"
            )
        return content


def _is_compressed(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type != zipfile.ZIP_STORED


def _box_of(storage: np.ndarray, layout: StridedLayout, index: Index) -> np.ndarray:
    """Return a box of a strided array inside the bytes of its storage."""
    if 0 in layout.shape:
        return np.empty([stop - start for start, stop in index_bounds(index, layout.shape)], layout.dtype)
    itemsize = layout.dtype.itemsize
    byte_strides = [stride * itemsize for stride in layout.strides]
    view = np.ndarray(layout.shape, layout.dtype, storage, layout.start_byte, byte_strides)
    return np.array(view[tuple(index)], order="C")
