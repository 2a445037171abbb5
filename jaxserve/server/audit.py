"""The audit log: who did what that matters to security. One JSON object a line, in a file of its own.

Administration over gRPC, requests that are refused for their key (401, 403), and reloads of keys and certificates.
"""

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Iterator

from jaxserve.api.errors import ConfigError
from jaxserve.log_output import LineQueue

logger = logging.getLogger("jaxserve.audit")

_MAX_TEXT = 500
"""Longest value, in characters: clients choose paths."""


def audit(protocol: str, method: str, caller: str, result: str, **details: str | None) -> None:
    """Record an event; does nothing outside of ``audit_file``.

    Args:
        protocol: ``http``, ``grpc`` or ``server``.
        method: What was called or done.
        caller: Name of the key, or ``-`` if it is not known.
        result: ``ok``, or how it failed.
        details: More fields; those that are None are left out.
    """
    if not logger.handlers:
        return
    fields = {"protocol": protocol, "method": method, "caller": caller, "result": result}
    fields |= {name: value for name, value in details.items() if value is not None}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    logger.info(json.dumps({"time": created, **{name: value[:_MAX_TEXT] for name, value in fields.items()}}))


@contextlib.contextmanager
def audit_file(path: str | None) -> Iterator[None]:
    """Append events to a file while the block runs; None: there is no audit log.

    Raises:
        ConfigError: The file cannot be opened.
    """
    if path is None:
        yield
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"audit_log: {path} cannot be opened: {error.strerror or error}") from error
    handler = _LineHandler(LineQueue(descriptor))
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        handler.lines.close()
        os.close(descriptor)


class _LineHandler(logging.Handler):
    """Writes messages as lines, on a thread: a full disk delays no request."""

    def __init__(self, lines: LineQueue):
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a message."""
        self.lines.put(record.getMessage())
