"""Converts a checkpoint between formats, a few tensors in memory at a time."""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.choice import Listings, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.hub import CONFIG_PATTERNS
from checkpoints.loader import SOURCE_DTYPES
from checkpoints.orbax_io import ORBAX_FOLDER, save_orbax_streamed
from checkpoints.quantized.export import ExportReader
from checkpoints.quantized.gguf import Gguf
from checkpoints.quantized.gguf_stored import BlocksReader, section_of
from checkpoints.quantized.reader import quantized_in
from checkpoints.quantized.settings import OWN_FILES, SECTIONS
from checkpoints.reader import CheckpointReader
from checkpoints.safetensors_writer import save_safetensors
from checkpoints.tensor_info import TensorInfo, whole_index

FORMATS = ("orbax", "safetensors")
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
GROUP_BYTES = 512 << 20
_COPIED_PATTERNS = (*CONFIG_PATTERNS, "LICENSE*", "NOTICE*")


def convert(
    source: str | Path,
    destination: str | Path,
    format: str,
    dtype: str | None = None,
    listings: Listings | None = None,
    files: Mapping[str, bytes] | None = None,
    quantization: tuple[str, Collection[str]] | None = None,
) -> None:
    """Write a checkpoint in another format, with its configuration and tokenizer files.

    The destination appears when everything is written. `orbax` puts the weights into the folder `orbax`.
    The weights of a quantized source are written as they are stored, codes and scales; with a `dtype` as the floats
    that they stand for, rounded to it.
    Peak host memory: the largest tensor for safetensors; about three times the larger of 512 MiB and the largest tensor
    for Orbax, which copies what it saves.

    Args:
        source: directory or file of the checkpoint, in any format that `open_checkpoint` reads.
        destination: a directory that does not exist or is empty.
        format: `orbax` or `safetensors`.
        dtype: `float32`, `float16` or `bfloat16` for all floating-point tensors; None keeps what is stored.
        listings: forms in which the source may have the model's tensors, as for `open_checkpoint`.
        files: contents of the configuration and tokenizer files by name; None copies those of the source's directory.
        quantization: how matrices are quantized, one of `on_load.METHODS`, and their names; they are written in the
            format compressed-tensors. None: as they are.

    Raises:
        CheckpointError: unknown format or dtype, a destination that is not empty or cannot be written, a source that
            cannot be read, a quantized source with `quantization`, which only safetensors can have.
    """
    source, destination = Path(source), Path(destination)
    if format not in FORMATS:
        raise CheckpointError(f"unknown format {format!r}; supported: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"unsupported dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(
            f"{destination}: is not an empty directory; pass a path that does not exist, or an empty directory"
        )
    with open_checkpoint(source, listings) as reader:
        quantized = quantized_in(reader)
        own, section = reader, None
        if quantized is not None and dtype is None and quantization is None:
            own = quantized.stored
            if isinstance(quantized.format, Gguf):
                own, section = BlocksReader(quantized.stored, quantized.format), section_of(quantized.format)
            else:
                files = _files_of(source)  # which describe what is stored
        if quantization is not None:
            if quantized is not None or format != "safetensors":
                what = (
                    f"{source} is quantized already" if quantized is not None else "only safetensors can be quantized"
                )
                raise CheckpointError(f"quantization={quantization[0]!r}: {what}")
            own = ExportReader(reader, *quantization)
            section = own.section()
        try:
            with _scratch_folder(destination) as scratch:
                copied = _files_of(source) if files is None else files
                if dtype is not None:  # what is written is not quantized
                    copied = {name: content for name, content in copied.items() if name not in OWN_FILES}
                _write_files(source, copied, scratch, dtype, section)
                _write(own, scratch, format, None if dtype is None else DTYPES[dtype])
                scratch.rename(destination)
        except OSError as error:
            raise CheckpointError(f"{source} cannot be converted to {destination}: {error}") from error


@contextmanager
def _scratch_folder(destination: Path) -> Iterator[Path]:
    """Yield a new folder beside the destination, which is removed if the block fails."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        scratch.chmod(0o755)
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write(reader: CheckpointReader, folder: Path, format: str, dtype: np.dtype | None) -> None:
    plain = reader.plain if isinstance(reader, ExportReader) else set(reader.tensors)
    infos = {
        name: TensorInfo(info.shape, _new_dtype(info.dtype, dtype) if name in plain else info.dtype)
        for name, info in reader.tensors.items()
    }

    def source(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore"):
                array = reader.read(name, whole_index(infos[name].shape))
                return array.astype(infos[name].dtype, copy=False)

        return read

    if format == "safetensors":
        save_safetensors(folder, [(name, info, source(name)) for name, info in infos.items()])
    else:
        save_orbax_streamed(folder / ORBAX_FOLDER, _groups(infos, source))


def _groups(
    infos: Mapping[str, TensorInfo], source: Callable[[str], Callable[[], np.ndarray]]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield tensors by name, about 512 MiB at a time, as NumPy arrays: JAX would narrow 64-bit types."""
    group: dict[str, np.ndarray] = {}
    group_bytes = 0
    for name, info in infos.items():
        if group and group_bytes + info.num_bytes > GROUP_BYTES:
            yield group
            group, group_bytes = {}, 0
        group[name] = source(name)()
        group_bytes += info.num_bytes
    if group:
        yield group


def _new_dtype(stored: np.dtype, wanted: np.dtype | None) -> np.dtype:
    return wanted if wanted is not None and stored in SOURCE_DTYPES else stored


def _files_of(source: Path) -> dict[str, bytes]:
    """Return the contents of the configuration and tokenizer files in a directory."""
    if not source.is_dir():
        return {}
    found = {file.name: file for pattern in _COPIED_PATTERNS for file in source.glob(pattern)}
    # An adapter's tensors are not converted, and its configuration alone would point at another model.
    left = (".safetensors.index.json", ".bin.index.json", "adapter_config.json")
    return {name: file.read_bytes() for name, file in found.items() if file.is_file() and not name.endswith(left)}


def _write_files(
    source: Path, files: Mapping[str, bytes], folder: Path, dtype: str | None, section: Mapping[str, Any] | None
) -> None:
    for name, content in files.items():
        if name == "config.json" and (dtype is not None or section is not None):
            content = _with_dtype(source / name, content, dtype, section).encode()
        (folder / name).write_bytes(content)


def _with_dtype(file: Path, content: bytes, dtype: str | None, own: Mapping[str, Any] | None) -> str:
    """Return the text of a config.json with `dtype` set, or `torch_dtype` where the file has it, and quantized as `own`
    says."""
    try:
        config: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got a {type(config).__name__}")
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    inner = config.get("text_config")
    for outer in (config, inner if isinstance(inner, dict) else {}):
        for section in SECTIONS:  # what is written is not quantized
            outer.pop(section, None)
    if own is not None:
        config["quantization_config"] = own
    return json.dumps(config, indent=2) + "\n"
