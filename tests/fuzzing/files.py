"""Bytes as a file, in memory where the system has such a folder."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def stored(data: bytes) -> Iterator[Path]:
    """Give the path of a file with these bytes while the block runs."""
    with tempfile.NamedTemporaryFile(dir=_MEMORY if _MEMORY.is_dir() else None, prefix="jaxserve-fuzz-") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)
