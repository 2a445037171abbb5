"""The folder in which JAX keeps compiled programs: its size, its permissions, and that its entries are whole.

JAX writes an entry in place and never replaces one, so that an entry cut by a full disk or a killed process would be
read in vain at each start. Entries are therefore checked before JAX reads them: by their checksum beside them, or, if
they are new, by decompressing them. Those that fail are removed, so that their programs are compiled and kept again.
"""

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed  # the public module does not show its state

from jaxserve.layers.cpu import cpu_key
from sharding.mesh import Device

logger = logging.getLogger(__name__)

_ENTRY, _USED, _SUM = "-cache", "-atime", "-sha256"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE_BYTES = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def use_compilation_cache(directory: str | None, device: Device, max_bytes: int = 0) -> Path | None:
    """Enable JAX's persistent compilation cache for this process, unless it is already configured.

    On GPUs the cache includes XLA's autotuning results. It can be copied to another machine with the same device and
    versions.

    Args:
        directory: Cache directory; None for the user's cache directory, empty for no cache.
        device: Target device; each kind has its own subdirectory, and so has each process of a JAX job.
        max_bytes: Largest size of the subdirectory; those entries go first that were not used for longest. 0: no limit.

    Returns:
        The subdirectory, for ``check_entries`` once programs are compiled; None if nothing was enabled.
    """
    if directory == "" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    if directory is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        directory = os.path.join(home, "jaxserve", "xla")
    kind = cpu_key() if device.platform == "cpu" else re.sub(r"\W+", "-", device.device_kind)
    folder = Path(directory) / kind
    if not _make_private(folder):
        return None
    if jax.process_count() > 1:
        folder /= f"process-{jax.process_index()}-of-{jax.process_count()}"
        if not _make_private(folder):
            return None
        _let_this_process_write()
    check_entries(folder)
    is_bounded = max_bytes and (os.access(folder, os.W_OK) or not folder.exists())
    jax.config.update("jax_compilation_cache_max_size", max_bytes if is_bounded else -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _let_this_process_write() -> None:
    """Let JAX write programs in every process of a job, each to its own folder.

    JAX writes in process 0 alone, so that processes do not write one entry at the same time. Yet on CPUs the key of a
    program depends on the process, and a pipeline stage has programs that process 0 does not compile. Each process
    keeps what it has compiled itself: programs are native code, and none is taken from another host or process. Now
    that the devices are known, JAX reads this number only to choose which process writes programs or sends them.
    """
    jax.config.update("jax_share_binary_between_hosts", False)
    distributed.global_state.process_id = 0


def check_entries(folder: Path) -> None:
    """Remove entries that are cut or were replaced from outside, and write the checksums of new ones.

    A folder that cannot be read or written is left as it is: JAX then warns and compiles.
    """
    removed = 0
    try:
        for entry in sorted(folder.glob(f"*{_ENTRY}")):
            key = entry.name.removesuffix(_ENTRY)
            checksum, used = folder / f"{key}{_SUM}", folder / f"{key}{_USED}"
            if _is_good(entry, key, checksum):
                if not used.exists():  # JAX needs it in a folder of limited size
                    used.write_bytes(int(entry.stat().st_mtime_ns).to_bytes(8, "little"))
                continue
            removed += 1
            for path in (entry, used, checksum):
                path.unlink(missing_ok=True)
        for checksum in folder.glob(f"*{_SUM}"):
            if not (folder / f"{checksum.name.removesuffix(_SUM)}{_ENTRY}").exists():
                checksum.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the compiled programs in %s cannot be checked: %s", folder, error.strerror or error)
    if removed:
        logger.warning(
            "removed %d compiled programs from %s that were cut or changed, by a full disk or a killed process; they "
            "are compiled again when they are needed next",
            *(removed, folder),
        )


def _make_private(folder: Path) -> bool:
    """Create a folder that only its owner can use; return False if others can write to it.

    Who can write programs there can run any code here.
    """
    try:
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    except OSError:  # a file system that is full or read-only: JAX warns
        return True
    state = folder.stat()
    if state.st_uid == os.geteuid():
        folder.chmod(stat.S_IRWXU)
    elif state.st_mode & _OTHERS_WRITE:
        logger.warning("compilation_cache_dir: %s belongs to another user and others can write to it: not used", folder)
        return False
    return True


def _is_good(entry: Path, key: str, checksum: Path) -> bool:
    """Return whether an entry has its checksum, or has none yet and is whole; then its checksum is written.

    An entry is read only if its size or time has changed since its checksum was written.
    """
    state = entry.stat()
    stated = f"{state.st_size} {state.st_mtime_ns}"
    known = checksum.read_text("ascii", "replace").split(" ", 1) if checksum.exists() else []
    if known[1:] == [stated]:
        return True
    digest = hashlib.sha256(key.encode())
    with entry.open("rb") as file:
        for piece in _pieces(file.read):
            digest.update(piece)
    if known[:1] != [digest.hexdigest()] and (known or not _is_whole(entry)):
        return False
    checksum.write_text(f"{digest.hexdigest()} {stated}")
    return True


def _is_whole(entry: Path) -> bool:
    """Return whether an entry decompresses to its end, by the library that JAX uses."""
    with entry.open("rb") as file:
        magic = file.read(len(_ZSTD_MAGIC))
        file.seek(0)
        stream = _zstd_stream() if magic == _ZSTD_MAGIC else zlib.decompressobj()
        if stream is None:
            return False
        try:
            for piece in _pieces(file.read):
                stream.decompress(piece)
        except Exception:  # each library has its own error for damaged content
            return False
    return stream.eof


def _zstd_stream() -> Any:
    """Return a stream of the library for Zstandard that JAX uses; None if there is none."""
    if importlib.util.find_spec("compression") is not None:  # Python 3.14
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    if importlib.util.find_spec("zstandard") is not None:
        return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
    return None


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(_PIECE_BYTES):
        yield piece
