"""The checks behind ``ServerConfig``: types first, as values come from users, then what they may be."""

import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.config_checks import check_type
from jaxserve.errors import ConfigError

_KINDS = (bool, int, str, float, list, dict)
_TIMES = (
    *("request_timeout", "stall_timeout", "shutdown_timeout", "watchdog_timeout", "chat_template_timeout"),
    *("grpc_keepalive_time", "grpc_keepalive_timeout", "grpc_max_connection_age", "grpc_max_connection_idle"),
)
_MAX_S = 1_000_000
_MAX_COUNT = 2**31 - 1  # gRPC and sockets have 32 bits for numbers, and for milliseconds


def typed(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each of its field's type; whole numbers stand for floats too.

    Args:
        values: By name.
        types: Of the fields.

    Raises:
        ConfigError: A value of another type.
    """
    checked = dict(values)
    for name, value in values.items():
        kinds = typing.get_args(types[name]) or (types[name],)
        if value is None and type(None) in kinds:
            continue
        kind = next((found for one in kinds if (found := typing.get_origin(one) or one) in _KINDS), None)
        if isinstance(value, bool) and kind is not bool:
            raise ConfigError(f"{name}: expected {kind.__name__ if kind else kinds}, got {value!r}")
        if kind is float and isinstance(value, int):
            checked[name] = float(value)
        elif kind is not None:
            check_type(name, value, kind)
        elif value not in kinds:
            raise ConfigError(f"{name}: expected one of {', '.join(map(str, kinds))}, got {value!r}")
        if isinstance(value, list) and not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{name}: expected texts that are not empty")
    return checked


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuses numbers that mean nothing.

    Raises:
        ConfigError: There is one.
    """
    for name in ("port", "grpc_port", "admin_port"):
        if not -1 <= values[name] <= 65535:
            raise ConfigError(f"{name}: expected a port from 0 to 65535, or -1 for none, got {values[name]}")
    for name in _TIMES:
        if not 0 <= values[name] <= _MAX_S:
            raise ConfigError(f"{name}: expected seconds from 0 to {_MAX_S}, got {values[name]}")
    for name in ("chat_template_timeout", "grpc_keepalive_time", "grpc_keepalive_timeout"):
        if values[name] < 1e-3:
            raise ConfigError(f"{name}: expected seconds from 0.001, got {values[name]}")
    least = {"max_request_bytes": 1024, "max_prompts": 1, "max_concurrent_streams": 1, "keepalive_timeout": 0}
    least |= {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1, "max_log_len": 0}
    for name, low in least.items():
        value = values[name]
        if value is not None and not low <= value <= _MAX_COUNT:
            raise ConfigError(f"{name}: expected a number from {low} to {_MAX_COUNT}, got {value}")
    if values["ssl_cert_reqs"] not in (0, 1, 2):
        raise ConfigError(f"ssl_cert_reqs: expected 0, 1 or 2, got {values['ssl_cert_reqs']}")


def check_files(values: Mapping[str, Any]) -> None:
    """Refuses names of files that there are not.

    Raises:
        ConfigError: There is one.
    """
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "auth_file"):
        path = values[name]
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: expected a file, got {path!r}, which is none")


def check_paths(name: str, paths: Iterable[str]) -> None:
    """Refuses what no request's path can be.

    Raises:
        ConfigError: It does not begin with a slash.
    """
    for path in sorted(paths):
        if not path.startswith("/"):
            raise ConfigError(f"{name}: expected paths such as /health, got {path!r}")
