"""Text files as their formats define them, which is not how Python's text mode reads them.

A byte order mark is no part of the text, and only ``\\n`` and ``\\r\\n`` end a line. Python's text mode ends
lines at ``\\r`` too, and ``str.splitlines`` at form feeds and Unicode's separators: all may be part of a prompt.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.api.errors import ConfigError

_LINE_END = re.compile("\r?\n")
_UNICODE_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def decode_text(raw: bytes, name: str) -> str:
    """Decode UTF-8 with or without a byte order mark.

    Args:
        raw: The bytes.
        name: What they are, for the message.

    Raises:
        ConfigError: They are not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            found = "UTF-16"
        else:
            line = raw.count(b"\n", 0, error.start) + 1
            found = f"the byte 0x{raw[error.start]:02x} in line {line}"
        raise ConfigError(f"{name}: expected UTF-8, got {found}; save it as UTF-8") from error


@contextlib.contextmanager
def file_errors(option: str, path: str | Path, verb: str = "written") -> Iterator[None]:
    """Say which option names a file that cannot be read or written.

    Args:
        option: The option, such as ``--svg``.
        path: The file.
        verb: What is done with it, such as ``read``.

    Raises:
        ConfigError: The block raised OSError or ValueError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{option}: {path} cannot be {verb}: {reason or error}") from error


def read_text(option: str, path: str | Path) -> str:
    """Return the text of a file that an option names.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    return decode_text(read_bytes(option, path), f"{option} {path}")


def read_bytes(option: str, path: str | Path) -> bytes:
    """Return the bytes of a file that an option names.

    Raises:
        ConfigError: It cannot be read.
    """
    with file_errors(option, path, "read"):
        return Path(path).read_bytes()


def write_text(option: str, path: str | Path, text: str) -> None:
    """Write the file that an option names.

    Raises:
        ConfigError: It cannot be written.
    """
    with file_errors(option, path):
        Path(path).write_text(text, encoding="utf-8", newline="")


def check_output_file(option: str, path: str | Path) -> None:
    """Check that the file that an option names can be written, before long work.

    Raises:
        ConfigError: It cannot be written.
    """
    with file_errors(option, path):
        is_new = not Path(path).exists()
        with Path(path).open("ab"):
            pass
        if is_new:
            Path(path).unlink()


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends."""
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def escape_line_ends(encoded: str) -> str:
    """Return JSON text without Unicode's own line ends, at which some readers of lines split it."""
    if encoded.isascii():
        return encoded
    return _UNICODE_LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def json_line(value: Any, encoding: str | None) -> str:
    """Return a value as one line of JSON, for a stream with this encoding."""
    is_unicode = encoding is not None and codecs.lookup(encoding).name.startswith("utf")
    return escape_line_ends(json.dumps(value, ensure_ascii=not is_unicode))
