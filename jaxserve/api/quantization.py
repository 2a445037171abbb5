"""The keys of ``quantization_config`` and their checks."""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve.api.errors import ConfigError

NAME = "quantization_config"
KEYS: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {"weights": ("auto", "stored", "decoded"), "activations": (None, "int8")}
)
"""The values that each key accepts, the default first."""
METHODS = (
    "int8_w8a8",
    "int8_per_channel_weight_only",
    "int4_group",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
)
"""Ways to quantize float weights while they are loaded: those of ``checkpoints.quantized.on_load``, which a front end
does not import."""
SHORT_NAMES: Mapping[str, str] = MappingProxyType({"fp8": "fp8_per_tensor", "int8": "int8_w8a8"})
PARTS = ("linear", "moe", "head")
"""What is quantized while it is loaded, each in a way of its own."""
RULES = (*PARTS, "targets", "ignore")
"""The keys that say how float weights are quantized while they are loaded."""


class QuantizationSettings(NamedTuple):
    """A checked ``quantization_config``.

    Attributes:
        weights: Where quantized weights are kept as they are.
        activations: How rows are rounded that they multiply; None: as the format says.
        methods: How the parts of a model that have a key are quantized while they are loaded; None: they stay floats.
        targets: The same for modules of some names, which take precedence in this order.
        ignore: Names of modules that stay floats.
    """

    weights: str
    activations: str | None
    methods: Mapping[str, str | None] = MappingProxyType({})
    targets: tuple[tuple[str, str | None], ...] = ()
    ignore: tuple[str, ...] = ()


def check_quantization(config: Mapping[str, Any] | None) -> QuantizationSettings:
    """Return ``quantization_config`` with all its keys.

    Raises:
        ConfigError: An unknown key (the nearest known one is suggested) or value.
    """
    config = config or {}
    known = (*KEYS, *RULES)
    for key, value in config.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(known)}"
            raise ConfigError(f"{NAME}: unknown key {key!r}{meant}")
        if key in KEYS and value not in KEYS[key]:
            expected = ", ".join("null" if each is None else repr(each) for each in KEYS[key])
            raise ConfigError(f"{NAME}.{key}: expected one of {expected}, got {value!r}")
    plain = {key: config.get(key, values[0]) for key, values in KEYS.items()}
    return QuantizationSettings(
        plain["weights"],
        plain["activations"],
        {key: _checked_method(key, config[key]) for key in PARTS if key in config},
        _checked_targets(config.get("targets", {})),
        _checked_ignore(config.get("ignore", [])),
    )


def without_rules(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a ``quantization_config`` that quantizes nothing while it is loaded, as for a draft model."""
    return {key: value for key, value in (config or {}).items() if key not in RULES}


def is_module(pattern: str, module: str) -> bool:
    """Whether a module has a name: the name itself, or a regular expression after ``re:`` for its beginning."""
    expression = pattern.removeprefix("re:")
    return pattern == module if expression == pattern else re.match(expression, module) is not None


def _checked_method(key: str, value: object) -> str | None:
    """Return a way to quantize, by its long name."""
    method = SHORT_NAMES.get(value, value) if isinstance(value, str) else value
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        expected = ", ".join((*SHORT_NAMES, *METHODS))
        raise ConfigError(f"{NAME}.{key}: expected one of {expected}, or null for floats, got {value!r}")
    return method


def _checked_targets(targets: object) -> tuple[tuple[str, str | None], ...]:
    if not isinstance(targets, Mapping):
        raise ConfigError(
            f"{NAME}.targets: expected an object of names of modules, such as "
            f"{{'re:.*down_proj': 'int8_w8a8'}}, got {targets!r}"
        )
    return tuple(
        (_checked_pattern("targets", name), _checked_method(f"targets[{name!r}]", method))
        for name, method in targets.items()
    )


def _checked_ignore(names: object) -> tuple[str, ...]:
    if not isinstance(names, list | tuple):
        raise ConfigError(f"{NAME}.ignore: expected a list of modules, such as ['re:.*down_proj'], got {names!r}")
    return tuple(_checked_pattern("ignore", name) for name in names)


def _checked_pattern(key: str, name: object) -> str:
    if not isinstance(name, str) or not name.removeprefix("re:"):
        raise ConfigError(f"{NAME}.{key}: expected names of modules, or 're:' and a regular expression, got {name!r}")
    try:
        re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"{NAME}.{key}: {name!r} is not a regular expression: {error}") from error
    return name
