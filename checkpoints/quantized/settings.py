"""The quantization section of a checkpoint's configuration: where it stands, and typed access to its fields."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

SECTIONS = ("quantization_config", "quantization", "compression_config")
OWN_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


class Settings:
    """Fields of a quantization section.

    Args:
        fields: The section.
        where: File and section, for messages.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def error(self, message: str) -> CheckpointError:
        """Return an error about the section."""
        return CheckpointError(f"{self.where}: {message}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of these fields that is given, an integer.

        Raises:
            CheckpointError: None is given and there is no default, or it is not an integer.
        """
        value = next((self.fields[name] for name in names if self.fields.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{names[0]}: expected an integer, got {value!r}")
        return value

    def choice(self, name: str, valid: Collection[int], *others: str, default: int | None = None) -> int:
        """Return an integer field that must be one of ``valid``."""
        value = self.integer(name, *others, default=default)
        if value not in valid:
            raise self.error(f"{name}={value} is not supported; supported: {', '.join(map(str, valid))}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name}: expected true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a field of text, in lower case."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{name}: expected a string, got {value!r}")
        return value.lower()

    def sizes(self, name: str) -> tuple[int, int] | None:
        """Return a field of two integers, rows and columns; None if it is missing."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not (
            isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value)
        ):
            raise self.error(f"{name}: expected two integers above 0, got {value!r}")
        return value[0], value[1]

    def nested(self, name: str) -> "Settings":
        """Return the object in a field; an empty one if it is missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name}: expected an object, got {value!r}")
        return Settings(value or {}, f"{self.where}.{name}")


def settings_of(config: Mapping[str, Any], where: str) -> Settings | None:
    """Return the quantization section of the object in a ``config.json``; None if the weights are not quantized.

    A section without effect counts as none: an empty one, or bitsandbytes' with both loads off. OpenAI's own
    configuration of GPT-OSS has none, but its experts are in MXFP4.

    Raises:
        CheckpointError: The section is not an object.
    """
    if is_openai_config(config):
        return Settings({"quant_method": "mxfp4"}, where)
    inner = config.get("text_config")
    for outer in (config, inner if isinstance(inner, Mapping) else {}):
        for name in SECTIONS:
            section = outer.get(name)
            if not section:
                continue
            if not isinstance(section, Mapping):
                raise CheckpointError(f"{where}: {name}: expected an object, got {section!r}")
            settings = Settings(section, f"{where}: {name}")
            if section.get("quant_method") == "bitsandbytes" and not loads_bitsandbytes(section):
                continue
            return settings
    return None


def is_openai_config(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` has the keys of OpenAI's own files of GPT-OSS, not Hugging Face's."""
    return "architectures" not in config and {"experts_per_token", "rope_ntk_alpha"} <= set(config)


def loads_bitsandbytes(section: Mapping[str, Any]) -> int:
    """Return the bits of the weights that a section of bitsandbytes says are stored: 4, 8, or 0 for none."""
    return next((b for b in (4, 8) if section.get(f"load_in_{b}bit", section.get(f"_load_in_{b}bit"))), 0)


def read_settings(directory: Path) -> Settings | None:
    """Return the quantization section of a directory: in its ``config.json``, or in a file of its own beside it.

    Raises:
        CheckpointError: A file is not a JSON object.
    """
    for name in ("config.json", *OWN_FILES):
        path = directory / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{path}: expected a JSON object, got {type(found).__name__}")
        if name == "config.json":
            settings = settings_of(found, str(path))
            if settings is not None:
                return settings
        else:
            return Settings(_own_section(name, found), str(path))
    return None


def _own_section(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a file of its own, with the method that its name implies."""
    if name == "hf_quant_config.json":
        inner = fields.get("quantization")
        return {"quant_method": "modelopt", **(inner if isinstance(inner, Mapping) else fields)}
    default = "awq" if name == "quant_config.json" or "zero_point" in fields or "w_bit" in fields else "gptq"
    return {"quant_method": default, **fields}
