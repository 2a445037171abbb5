"""The methods of ``speculative_config``, its keys, and their checks."""

import difflib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve.api.errors import ConfigError

NAME = "speculative_config"


class Key(NamedTuple):
    """A number or a switch in ``speculative_config``.

    Attributes:
        kind: int, float for any finite number, or bool.
        least: Smallest value.
        most: Largest value.
        default: Value if it is not given; None: left out.
    """

    kind: type[int] | type[float] | type[bool] = int
    least: int = 1
    most: float = math.inf
    default: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError unless a value is of the kind and within the bounds."""
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{name}: expected true or false, got {value!r}")
            return
        is_number = isinstance(value, int | self.kind) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not self.least <= value <= self.most:
            what = "an integer" if self.kind is int else "a number"
            limits = f">= {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"
            raise ConfigError(f"{name}: expected {what} {limits}, got {value!r}")


MAX_DRAFTS = 64
DEVICE_METHODS = ("draft_model", "eagle", "eagle3", "dflash", "mtp")
"""Methods whose drafts a model makes on the device."""
KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "num_speculative_tokens": Key(most=MAX_DRAFTS),
        "enable_adaptive_verification": Key(bool, default=True),
        "prompt_lookup_max": Key(),
        "prompt_lookup_min": Key(),
        "suffix_decoding_max_tree_depth": Key(most=1024, default=24),
        "suffix_decoding_max_cached_requests": Key(least=0, default=10_000),
        "suffix_decoding_max_spec_factor": Key(float, least=0, default=1.0),
        "suffix_decoding_min_token_prob": Key(float, least=0, most=1, default=0.1),
        "draft_tensor_parallel_size": Key(),
        "parallel_drafting": Key(bool, default=False),
    }
)
TEXTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": (),
        "revision": (),
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "draft_sample_method": ("probabilistic", "greedy"),
    }
)
"""The texts that the other keys accept, the default first; empty: any text, without a default."""
_COMMON = ("num_speculative_tokens", "enable_adaptive_verification")
_HEAD = ("model", "revision", "draft_tensor_parallel_size", "draft_sample_method")
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "grammar": _COMMON,
        "ngram": (*_COMMON, "prompt_lookup_max", "prompt_lookup_min"),
        "suffix": (
            *_COMMON,
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "draft_model": (
            *_COMMON,
            "model",
            "revision",
            "dtype",
            "draft_tensor_parallel_size",
            "draft_sample_method",
            "parallel_drafting",
        ),
        "eagle": (*_COMMON, *_HEAD),
        "eagle3": (*_COMMON, *_HEAD, "parallel_drafting"),
        "dflash": (*_COMMON, *_HEAD),
        "mtp": (*_COMMON, "draft_tensor_parallel_size", "draft_sample_method"),
    }
)
"""The keys of each method, besides ``method``; all are in ``KEYS`` or ``TEXTS``."""
SHORTCUTS: Mapping[str, str] = MappingProxyType(
    {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
)
"""The settings that stand for single keys."""
_HEADS = "its heads guess trees of tokens; drafts are chains here"
_REFUSED_METHODS: Mapping[str, str] = MappingProxyType({"medusa": _HEADS, "mlp_speculator": _HEADS})
_REFUSED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "speculative_token_tree": "drafts are chains, not trees",
        "tensor_parallel_size": "what a method runs on devices uses those of the model",
    }
)
_LOSSLESS = "standard"


def check_speculation(values: Mapping[str, Any] | None, shortcuts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked values with the defaults of their method, without those that are None.

    Args:
        values: ``speculative_config``.
        shortcuts: The values of ``SHORTCUTS``.

    Returns:
        The values; None without speculative decoding.

    Raises:
        ConfigError: An unknown method or key, one that would change answers, or a value out of range.
    """
    given = {key: value for key, value in (values or {}).items() if value is not None}
    for shortcut, key in SHORTCUTS.items():
        value = shortcuts[shortcut]
        if value is not None and given.setdefault(key, value) != value:
            raise ConfigError(f"{shortcut}={value!r} and {NAME}.{key}={given[key]!r} differ: give one of them")
    if values is None and not given:
        return None
    rule = given.pop("rejection_sample_method", _LOSSLESS)
    if rule != _LOSSLESS:
        raise ConfigError(
            f"{NAME}.rejection_sample_method: expected {_LOSSLESS}, got {rule!r}; a draft is kept only if it is the "
            "token that would have been sampled, so that answers do not change"
        )
    method = _check_method(given.get("method"))
    given = {**_defaults(METHODS[method]), **given}
    _check_values(given, method)
    if method == "suffix":
        given.setdefault("num_speculative_tokens", min(given["suffix_decoding_max_tree_depth"], MAX_DRAFTS))
    KEYS["num_speculative_tokens"].check(f"{NAME}.num_speculative_tokens", given.get("num_speculative_tokens"))
    least, most = given.get("prompt_lookup_min", 1), given.get("prompt_lookup_max", math.inf)
    if least > most:
        raise ConfigError(f"{NAME}: prompt_lookup_min={least} must be at most prompt_lookup_max={most}")
    return given


def takes_in_blocks(given: Mapping[str, Any]) -> bool:
    """Return whether a model on the device takes in a mask token for each draft, besides the latest token."""
    return given["method"] == "dflash"


def _defaults(known: Iterable[str]) -> dict[str, Any]:
    """Return the defaults of those keys that have one."""
    numbers = {key: KEYS[key].default for key in known if key in KEYS and KEYS[key].default is not None}
    return numbers | {key: TEXTS[key][0] for key in known if key == "draft_sample_method"}


def _check_values(given: Mapping[str, Any], method: str) -> None:
    """Raise ConfigError for an unknown key, a value that is not accepted, or no model where a method needs one."""
    known = METHODS[method]
    for key, value in given.items():
        if key not in known and key != "method":
            raise _unknown(key, method)
        if key in KEYS:
            KEYS[key].check(f"{NAME}.{key}", value)
        elif key in TEXTS:
            _check_text(key, value)
    if "model" in known and "model" not in given:
        raise ConfigError(f"{NAME}.model: expected the directory or hub id of a draft model for method {method!r}")


def _check_method(method: Any) -> str:
    """Return a method that runs.

    Raises:
        ConfigError: It does not.
    """
    if isinstance(method, str) and method in METHODS:
        return method
    why = _REFUSED_METHODS.get(method) if isinstance(method, str) else None
    raise ConfigError(
        f"{NAME}.method: expected one of {', '.join(METHODS)}, got {method!r}" + (f": {why}" if why else "")
    )


def _check_text(key: str, value: Any) -> None:
    """Raise ConfigError unless a value is one of those that a key of ``TEXTS`` accepts."""
    accepted = TEXTS[key]
    if not isinstance(value, str) or not value or (accepted and value not in accepted):
        what = f"one of {', '.join(accepted)}" if accepted else "a text"
        raise ConfigError(f"{NAME}.{key}: expected {what}, got {value!r}")


def _unknown(key: str, method: str) -> ConfigError:
    known = METHODS[method]
    near = difflib.get_close_matches(key, known, n=1)
    why = f": {_REFUSED_KEYS[key]}" if key in _REFUSED_KEYS else f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{NAME}: expected method, {', '.join(known)} with method {method!r}; got {key!r}{why}")
