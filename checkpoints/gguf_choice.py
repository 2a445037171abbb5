"""Chooses a GGUF file: that of a folder, or that of a tag such as ``Q4_K_M`` among a repository's."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_file import SUFFIX, is_first_part

_PROJECTOR = "mmproj"
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.index.json", "orbax", "manifest.ocdbt")
_MOST_LISTED = 40


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file of a folder without other weights; None if it has none.

    Raises:
        CheckpointError: It has several.
    """
    found = sorted(path for path in directory.glob(f"*{SUFFIX}") if _is_model(path.name))
    if not found or any(next(directory.glob(pattern), None) is not None for pattern in _OTHER_WEIGHTS):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} has {len(found)} GGUF files: pass one of them: {_listed([path.name for path in found])}"
        )
    return found[0]


def tag_patterns(tag: str) -> list[str]:
    """Return patterns of the names of files with a tag, which is a name or its last part before those of splits."""
    ends = ("", "-?????-of-?????")
    cases = sorted({tag, tag.lower(), tag.upper()})
    return [f"{start}{case}{end}{SUFFIX}" for case in cases for end in ends for start in ("", "*[-._/]")]


def choose_tagged(tag: str, names: Collection[str]) -> str | None:
    """Return the name of the one file with a tag, or of its first part; None if there is none.

    Args:
        tag: The tag, in any case.
        names: Names of files, with their folders.

    Raises:
        CheckpointError: Several files have it.
    """
    patterns = tag_patterns(tag)
    found = sorted(
        name
        for name in names
        if _is_model(PurePosixPath(name).name) and any(fnmatchcase(f"/{name}", each) for each in patterns)
    )
    if len(found) > 1:
        raise CheckpointError(f"several GGUF files have the tag {tag}: {_listed(found)}")
    return found[0] if found else None


def describe(names: Collection[str]) -> str:
    """Return the GGUF files among names, for messages; empty if there are none."""
    return _listed(sorted(name for name in names if _is_model(PurePosixPath(name).name)))


def _is_model(name: str) -> bool:
    return is_first_part(name) and _PROJECTOR not in name.lower()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
