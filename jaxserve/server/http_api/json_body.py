"""JSON as it comes and goes: nothing that is not JSON, nothing nested without end, no text that is not Unicode."""

import json
import math
from typing import Any

from jaxserve.errors import RequestError

MAX_NESTING = 100
"""How deep objects and arrays of a request may stand in each other. Schemas have a limit of their own below it."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def read_json(raw: bytes) -> dict[str, Any]:
    """The object that a request's body holds.

    Raises:
        RequestError: No JSON object, NaN or Infinity, text that is not Unicode, or nested too deeply.
    """
    try:
        found = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise _nested_too_deeply() from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body must be a JSON object, got {type(found).__name__}")
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
        _check_nesting(found)
    # A lone surrogate can only be written as an escape.
    if b"\\u" in raw:
        _check_unicode(found)
    return found


def json_text(value: Any) -> str:
    """JSON without white space, as vLLM writes it.

    Raises:
        ValueError: NaN or Infinity: a fault of the server.
    """
    return _ENCODER.encode(value)


def json_bytes(value: Any) -> bytes:
    """The same in UTF-8; what UTF-8 cannot hold becomes a question mark."""
    return json_text(value).encode("utf-8", "replace")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:40]} is out of range")
    return number


def _nested_too_deeply() -> RequestError:
    return RequestError(f"the body is nested too deeply: expected at most {MAX_NESTING} levels")


def _check_nesting(found: dict[str, Any]) -> None:
    level: list[Any] = [found]
    for _ in range(MAX_NESTING):
        level = [item for container in level for item in _items(container) if type(item) in (dict, list)]
        if not level:
            return
    raise _nested_too_deeply()


def _items(container: Any) -> Any:
    return container.values() if type(container) is dict else container


def _check_unicode(found: dict[str, Any]) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has text that is not valid Unicode: half of a surrogate pair") from None
