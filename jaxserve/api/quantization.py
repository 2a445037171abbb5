"""The keys of ``quantization_config`` and their checks."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.errors import ConfigError

NAME = "quantization_config"
KEYS: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {"weights": ("auto", "stored", "decoded"), "activations": (None, "int8")}
)
"""The values that each key accepts, the default first."""


def check_quantization(config: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return ``quantization_config`` with all its keys.

    Raises:
        ConfigError: An unknown key (the nearest known one is suggested) or value.
    """
    for key, value in (config or {}).items():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(KEYS)}"
            raise ConfigError(f"{NAME}: unknown key {key!r}{meant}")
        if value not in KEYS[key]:
            expected = ", ".join("null" if each is None else repr(each) for each in KEYS[key])
            raise ConfigError(f"{NAME}.{key}: expected one of {expected}, got {value!r}")
    return {key: (config or {}).get(key, values[0]) for key, values in KEYS.items()}
