"""The digest of a model's files, which says that they are the ones that somebody has checked."""

import hashlib
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.gguf_choice import is_gguf
from checkpoints.hub import CONFIG_PATTERNS, SAFETENSORS_PATTERNS, TORCH_PATTERNS
from checkpoints.quantized.gguf_file import part_names

PREFIX = "sha256:"
_PATTERNS = (*CONFIG_PATTERNS, *SAFETENSORS_PATTERNS, *TORCH_PATTERNS, "additional_chat_templates/*.jinja")


def model_digest(path: Path) -> str:
    """Return ``sha256:`` and the SHA-256 of a list of files: for each, its own SHA-256, two spaces, and its name.

    The files are those that a model is read from, by name: configuration, tokenizer, templates and weights; of a GGUF
    file, its parts. ``sha256sum`` writes such a list.

    Args:
        path: A directory, or a GGUF file.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if is_gguf(path):
        files = {path.with_name(name).name: path.with_name(name) for name in part_names(path)}
    else:
        files = {file.relative_to(path).as_posix(): file for pattern in _PATTERNS for file in path.glob(pattern)}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        try:
            with file.open("rb") as content:
                own = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
        digest.update(f"{own}  {name}\n".encode())
    return PREFIX + digest.hexdigest()


def check_model_digest(path: Path, expected: str) -> None:
    """Check that a model's files have a digest.

    Raises:
        CheckpointError: They have another.
    """
    found = model_digest(path)
    if found != expected.lower():
        raise CheckpointError(f"model_digest: expected {expected} for the files of {path}, got {found}")
