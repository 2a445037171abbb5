"""What clients may know of a tokenizer: its tokenizer_config.json as transformers reads it, without paths."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATH_NAME = re.compile(r".*_(file|path|dir|directory)s?")


def tokenizer_info(config: Mapping[str, Any], directory: Path, **defaults: Any) -> dict[str, Any]:
    """The contents of a tokenizer_config.json, special tokens as plain text.

    Args:
      config: The contents.
      directory: The tokenizer's. What names it is left out, as are names of files.
      **defaults: Values that the file may lack.
    """
    return {**defaults, **_plain(config, str(directory.resolve()))}


def _plain(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_plain(item, directory) for item in value if not _is_path(item, directory)]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("content"), str):  # a token
        return value["content"]
    return {
        name: _plain(item, directory)
        for name, item in value.items()
        if not _PATH_NAME.fullmatch(name) and not _is_path(item, directory)
    }


def _is_path(value: Any, directory: str) -> bool:
    return isinstance(value, str) and directory in value
