"""Authentication: API keys, their scopes and limits.

An auth file is YAML or JSON: a list of keys, each with

* ``key``: the key, or ``sha256``: its SHA-256 in hexadecimal, so that the file holds no secret;
* ``name``: the caller's name in logs and metrics;
* ``scopes``: some of ``generate``, ``metrics`` and ``admin``; default: ``generate`` and ``metrics``;
* ``max_concurrent_requests``, ``requests_per_minute`` and ``tokens_per_minute``, of prompts and completions: limits;
  default: none;
* ``max_memory_share``: fraction of the server's ``max_admitted_bytes`` that its requests may take; default: 0.5 if
  there are several keys, else 1;
* ``weight``: its share of turns: requests of different keys are prepared and admitted in turns, and the long bodies
  and responses of one take a tenth of the time, times its weight, while others have requests; default: 1;
* ``min_priority``: requests with a smaller number, which would run earlier, get this one; default: none;
* ``expires``: a date or an ISO 8601 time, in UTC unless it has an offset; default: never;
* ``tenant``: keys of the same tenant share cached pages; default: the name.

The file is read again when it changes and on SIGHUP. A file with a mistake changes nothing. Requests in flight of keys
that are no longer in it, or that have expired, are ended.
"""

import dataclasses
import datetime
import hashlib
import hmac
import re
import time
from pathlib import Path
from typing import Any, cast

import yaml

from jaxserve.api.errors import ConfigError
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.server.errors import PermissionDeniedError, UnauthenticatedError
from jaxserve.server.settings import ServerConfig

_LEAST_WEIGHT = 0.001
SCOPES = ("generate", "metrics", "admin")
_LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
_SHARES = ("max_memory_share", "weight")
_FIELDS = ("key", "sha256", "name", "scopes", *_LIMITS, *_SHARES, "min_priority", "expires", "tenant")
_SHARE_OF_SEVERAL = 0.5
_ANONYMOUS = "anonymous"


@dataclasses.dataclass(frozen=True, eq=False)
class Caller:
    """Who sent a request.

    Attributes:
        name: Of the caller in logs and metrics: from the auth file, ``key-1`` …, or ``anonymous``.
        scopes: What the caller may do.
        tenant: Callers of one tenant share cached pages; None: all callers do.
        max_concurrent_requests: Most sequences in flight; None: no limit.
        requests_per_minute: Most requests in any minute; None: no limit.
        tokens_per_minute: Tokens of prompts and completions in a minute after which requests are rejected; None: no
            limit.
        min_priority: The smallest priority of its requests; None: no limit.
        expires_s: When its key expires, in seconds since the epoch; None: never.
        weight: Its share of turns beside other callers.
        max_memory_share: Fraction of the memory for requests that the caller's may take; 0 until the default is known.
    """

    name: str
    scopes: frozenset[str]
    tenant: str | None = None
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int | None = None
    expires_s: float | None = None
    max_memory_share: float = 1.0
    weight: float = 1.0

    @property
    def turn(self) -> Turn:
        """Whose turns its requests take: without keys all take the same."""
        return SHARED_TURN if self.name == _ANONYMOUS else Turn(self.name, self.weight)

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDeniedError if the caller lacks a scope."""
        if scope not in self.scopes:
            raise PermissionDeniedError(f"this API key lacks the scope {scope!r}")


class Authenticator:
    """Finds the caller of a request by its API key.

    Args:
        config: Keys and auth file; without either every request is allowed everything.

    Raises:
        ConfigError: An auth file that cannot be read or has wrong entries.
    """

    def __init__(self, config: ServerConfig):
        self._config = config
        self._callers = self._read()
        self._anonymous = None if self._callers else Caller(_ANONYMOUS, frozenset(SCOPES))

    def _read(self) -> list[tuple[bytes, Caller]]:
        config, callers = self._config, list[tuple[bytes, Caller]]()
        self._started_s = time.time() - time.monotonic()
        default = frozenset(("generate", "metrics"))
        for number, key in enumerate(config.api_key or (), 1):
            tenant = None if config.share_prefix_cache else f"key-{number}"
            callers.append((_digest(key), Caller(f"key-{number}", default, tenant, max_memory_share=0.0)))
        if config.auth_file is not None:
            callers += _read_auth_file(Path(config.auth_file), config.share_prefix_cache)
        names = [caller.name for _, caller in callers]
        if len(set(names)) < len(names) or len({digest for digest, _ in callers}) < len(names):
            raise ConfigError("api_key, auth_file: two callers have the same name or the same key")
        share = _SHARE_OF_SEVERAL if len(callers) > 1 else 1.0
        return [
            (digest, caller if caller.max_memory_share else dataclasses.replace(caller, max_memory_share=share))
            for digest, caller in callers
        ]

    def reload(self) -> frozenset[str]:
        """Read the auth file again; return the names of callers whose keys are no longer valid.

        Raises:
            ConfigError: The file cannot be read or has wrong entries; then nothing changes.
        """
        callers = self._read()
        kept = {digest for digest, _ in callers}
        revoked = frozenset(caller.name for digest, caller in self._callers if digest not in kept)
        self._callers = callers
        return revoked

    @property
    def expired(self) -> frozenset[str]:
        """Names of callers whose keys have expired."""
        return frozenset(caller.name for _, caller in self._callers if self._has_expired(caller))

    def _has_expired(self, caller: Caller) -> bool:
        """Whether a key has expired, by the time of day when keys were read and what has passed since: later jumps of
        the clock end no key."""
        return caller.expires_s is not None and self._started_s + time.monotonic() >= caller.expires_s

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller that an ``Authorization`` header names.

        The key is compared with every known key in constant time.

        Raises:
            UnauthenticatedError: No key, or an unknown one.
        """
        if self._anonymous is not None:
            return self._anonymous
        kind, _, key = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("expected the header 'Authorization: Bearer KEY'")
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise UnauthenticatedError("unknown API key")
        if self._has_expired(found):
            raise UnauthenticatedError("the API key has expired")
        return found

    @property
    def callers(self) -> list[Caller]:
        """All known callers."""
        return [caller for _, caller in self._callers] if self._anonymous is None else [self._anonymous]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()


def _read_auth_file(path: Path, shares_prefixes: bool) -> list[tuple[bytes, Caller]]:
    try:
        found: Any = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        # The error of a YAML parser quotes the line, which may hold a key.
        raise ConfigError(f"auth_file: {path} cannot be read as YAML: {type(error).__name__}") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"auth_file: expected a list of keys in {path}, got {type(found).__name__}")
    entries = [_read_entry(f"auth_file: entry {place}", entry) for place, entry in enumerate(cast("list[Any]", found))]
    return [(digest, dataclasses.replace(one, tenant=None) if shares_prefixes else one) for digest, one in entries]


def _read_entry(where: str, entry: Any) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(entry).__name__}")
    values = cast("dict[str, Any]", entry)
    if not set(values) <= set(_FIELDS):  # not quoted, since it may be a key in the wrong place
        raise ConfigError(f"{where}: unknown field; fields: {', '.join(_FIELDS)}")
    name, scopes = values.get("name"), values.get("scopes", ["generate", "metrics"])
    if not isinstance(name, str) or not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise ConfigError(f"{where}: name: expected 1 to 64 letters, digits and any of '_.@-'")
    if not isinstance(scopes, list) or not all(scope in SCOPES for scope in cast("list[Any]", scopes)):
        raise ConfigError(f"{where}: scopes: expected some of {', '.join(SCOPES)}")
    _check_numbers(where, values)
    tenant = values.get("tenant", name)
    if not isinstance(tenant, str) or not tenant:
        raise ConfigError(f"{where}: tenant: expected a string that is not empty")
    caller = Caller(
        name,
        frozenset(scopes),
        tenant,
        *(values.get(limit) for limit in _LIMITS),
        min_priority=values.get("min_priority"),
        expires_s=_read_time(f"{where}: expires", values.get("expires")),
        max_memory_share=float(values.get("max_memory_share", 0)),
        weight=float(values.get("weight", 1)),
    )
    return _entry_digest(where, values), caller


def _check_numbers(where: str, values: dict[str, Any]) -> None:
    """Raise ConfigError unless the numbers of an entry are such, and within their bounds."""
    for limit in _LIMITS:
        if limit in values and (type(values[limit]) is not int or values[limit] < 1):
            raise ConfigError(f"{where}: {limit}: expected an integer of at least 1")
    share = values.get("max_memory_share", 1)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ConfigError(f"{where}: max_memory_share: expected a number above 0 and at most 1")
    weight = values.get("weight", 1)
    if type(weight) not in (int, float) or not _LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT:
        raise ConfigError(f"{where}: weight: expected a number from {_LEAST_WEIGHT} to {1 / _LEAST_WEIGHT:g}")
    if type(values.get("min_priority", 0)) not in (int, type(None)):
        raise ConfigError(f"{where}: min_priority: expected an integer")


def _read_time(where: str, value: Any) -> float | None:
    """Return a date or time as seconds since the epoch; None for none."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        elif isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            value = datetime.datetime(value.year, value.month, value.day)
    except ValueError:
        pass
    if not isinstance(value, datetime.datetime):
        raise ConfigError(f"{where}: expected a date or an ISO 8601 time, such as 2030-01-31T12:00:00Z")
    return (value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)).timestamp()


def _entry_digest(where: str, values: dict[str, Any]) -> bytes:
    key, digest = values.get("key"), values.get("sha256")
    if isinstance(key, str) and key and digest is None:
        return _digest(key)
    if key is None and isinstance(digest, str) and re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        return bytes.fromhex(digest)
    raise ConfigError(f"{where}: expected either 'key', a string, or 'sha256', 64 hexadecimal digits")
