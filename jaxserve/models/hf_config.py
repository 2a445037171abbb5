"""Reads Hugging Face's ``config.json`` as plain JSON: no code of the checkpoint or of transformers runs.

All problems of a file are collected and reported in one error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from checkpoints import CheckpointError, is_gguf
from checkpoints.quantized.on_load import METHODS as ON_LOAD
from checkpoints.quantized.on_load import SHORT_NAMES
from checkpoints.quantized.registry import format_for, method_of
from checkpoints.quantized.settings import read_settings, settings_of
from jaxserve.api.errors import ConfigError, UnsupportedModelError

_METHOD_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("awq_marlin", "auto_awq"), "awq"),
    **dict.fromkeys(("gptq_marlin", "auto_gptq"), "gptq"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_mixed"), "modelopt"),
    **dict.fromkeys(("inc", "intel/auto-round"), "auto-round"),
    "gpt_oss_mxfp4": "mxfp4",
}
"""Methods by vLLM's other names for them."""
_MAX_INTEGER: Final = 2**31 - 1
_MAX_NUMBER: Final = 1e30


def read_config_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: The file is absent, unreadable, not JSON, or not an object.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; expected a model directory in Hugging Face's form, with a config.json"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON text in UTF-8: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


class ConfigFields:
    """Typed access to the fields of one JSON object; a missing or invalid field is recorded and replaced by a default.

    The caller reads all fields and then calls :meth:`raise_problems`; what it built before is usable only if that
    returns. null counts as missing unless a method says otherwise.
    """

    def __init__(self, raw: Mapping[str, Any], path: str, prefix: str = "", problems: list[str] | None = None) -> None:
        """Wrap ``raw``.

        Args:
            raw: The object.
            path: File of the object, for messages.
            prefix: Prepended to field names in messages (``rope_scaling.``).
            problems: List to record problems in; a new one by default.
        """
        self.raw = raw
        self.path = path
        self._prefix = prefix
        self._problems: list[str] = [] if problems is None else problems

    def raise_problems(self) -> None:
        """Raise one ConfigError that lists every recorded problem; return if there is none."""
        if self._problems:
            raise ConfigError("\n  ".join([f"{self.path} cannot be used:", *self._problems]))

    def note(self, field: str, problem: str) -> None:
        """Record a problem of a field, once."""
        text = f"{self._prefix}{field}: {problem}"
        if text not in self._problems:
            self._problems.append(text)

    def is_given(self, field: str) -> bool:
        """Return whether the field is there and not null."""
        return self.raw.get(field) is not None

    def with_aliases(self, names: Mapping[str, str]) -> "ConfigFields":
        """Return the same fields, with values under other names for those that are missing; problems are shared.

        Args:
            names: From the other name of a field to its name here.
        """
        aliases = {name: self.raw[other] for other, name in names.items() if other in self.raw}
        return ConfigFields({**aliases, **self.raw}, self.path, self._prefix, self._problems)

    def with_defaults(self, values: Mapping[str, Any]) -> "ConfigFields":
        """Return the same fields, with values for those that are missing or null; problems are shared."""
        given = {name: value for name, value in self.raw.items() if value is not None}
        return ConfigFields({**self.raw, **values, **given}, self.path, self._prefix, self._problems)

    def with_missing(self, values: Mapping[str, Any]) -> "ConfigFields":
        """Return the same fields, with values for those that are missing, not for null; problems are shared."""
        return ConfigFields({**values, **self.raw}, self.path, self._prefix, self._problems)

    def replaced(self, values: Mapping[str, Any]) -> "ConfigFields":
        """Return the same fields, with other values for some; problems are shared."""
        return ConfigFields({**self.raw, **values}, self.path, self._prefix, self._problems)

    def nested(self, field: str) -> "ConfigFields":
        """Return the object in a field, or an empty one; its problems are recorded in this object's list."""
        value = self.raw.get(field)
        if value is not None and not isinstance(value, dict):
            self._reject(field, "an object")
        inner: dict[str, Any] = value if isinstance(value, dict) else {}
        return ConfigFields(inner, self.path, f"{self._prefix}{field}.", self._problems)

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """Return an integer from ``minimum`` to ``maximum``; ``default`` if missing, or a problem if that is None."""
        value = self.raw.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        self._reject(field, f"an integer from {minimum} to {maximum}")
        return minimum

    def nullable_integer(self, field: str, absent: int | None, *, minimum: int = 1) -> int | None:
        """Return an integer; None if the field is null, ``absent`` if it is missing."""
        if field not in self.raw:
            return absent
        return None if self.raw[field] is None else self.integer(field, minimum=minimum)

    def number(self, field: str, default: float | None = None, *, is_zero_allowed: bool = False) -> float:
        """Return a number above 0 (up to 1e30); ``default`` if missing, or a problem if that is None."""
        value = self.raw.get(field)
        if value is None and default is not None:
            return default
        if _holds_number(value) and (value > 0 or (is_zero_allowed and value == 0)):
            return float(value)
        self._reject(field, "a number of at least 0" if is_zero_allowed else "a number above 0")
        return 1.0

    def nullable_number(self, field: str, absent: float | None) -> float | None:
        """Return a number above 0; None if the field is null, ``absent`` if it is missing."""
        if field not in self.raw:
            return absent
        return None if self.raw[field] is None else self.number(field)

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean; ``default`` if missing."""
        value = self.raw.get(field)
        if isinstance(value, bool):
            return value
        if value is not None:
            self._reject(field, "true or false")
        return default

    def text(self, field: str, default: str) -> str:
        """Return a string."""
        value = self.raw.get(field)
        if isinstance(value, str):
            return value
        if value is not None:
            self._reject(field, "a string")
        return default

    def numbers(self, field: str, count: int) -> tuple[float, ...]:
        """Return exactly ``count`` numbers above 0."""
        value = self.raw.get(field)
        if isinstance(value, list) and len(value) == count and all(_holds_number(each) and each > 0 for each in value):
            return tuple(float(each) for each in value)
        self._reject(field, f"a list of {count} numbers above 0")
        return (1.0,) * count

    def items(self, field: str) -> tuple[object, ...] | None:
        """Return the members of a list; None if the field is missing."""
        value = self.raw.get(field)
        if isinstance(value, list):
            return tuple(value)
        if value is not None:
            self._reject(field, "a list")
        return None

    def token_ids(self, field: str, absent: tuple[int, ...]) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty if the field is null, ``absent`` if it is missing."""
        value = self.raw.get(field, list(absent))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= _MAX_INTEGER for each in ids):
            return tuple(ids)
        self._reject(field, "a token id, a list of token ids, or null")
        return ()

    def _reject(self, field: str, expected: str) -> None:
        value = self.raw.get(field)
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        self.note(field, f"expected {expected}, " + ("but it is missing" if value is None else f"got {shown}"))


def check_quantization(fields: ConfigFields) -> None:
    """Raise UnsupportedModelError, naming the method, if the weights are quantized in a way that is not supported.

    Sections without effect (empty, or bitsandbytes with both loads off) are accepted.
    """
    try:
        settings = settings_of(fields.raw, fields.path)
        if settings is not None:
            format_for(settings)
    except CheckpointError as error:
        raise UnsupportedModelError(str(error)) from error


def check_quantized_with(method: str, directory: Path) -> None:
    """Raise ConfigError unless the weights of a model are quantized with a method, in vLLM's names."""
    try:
        settings = None if is_gguf(directory) else read_settings(directory)
        stored = "gguf" if is_gguf(directory) else None if settings is None else method_of(settings)
    except CheckpointError as error:
        raise UnsupportedModelError(str(error)) from error
    if stored is None:
        if method in ON_LOAD or method in SHORT_NAMES:
            return
        raise ConfigError(
            f"quantization={method!r}: the weights in {directory} are not quantized; expected a way to quantize them "
            f"while they are loaded: {', '.join((*SHORT_NAMES, *ON_LOAD))}"
        )
    if method in ON_LOAD:
        raise ConfigError(
            f"quantization={method!r} quantizes float weights, but those in {directory} are quantized with {stored} "
            "already; leave quantization out"
        )
    if _METHOD_NAMES.get(method, method) != _METHOD_NAMES.get(stored, stored):
        raise ConfigError(f"quantization={method!r}: the weights in {directory} are quantized with {stored}")


def _holds_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_NUMBER <= value <= _MAX_NUMBER
