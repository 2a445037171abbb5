"""Real servers for tests: a small engine that starts soon, with programs that all tests share."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scripts import server_child
from scripts.server_child import RunningServer
from tests import drafting

START_LIMIT_S = 300.0
END_LIMIT_S = 30.0
SMALL_ENGINE = (
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"),
    *("--kv-cache-memory-bytes", str(8 << 20)),
)
"""Flags of an engine that starts soon."""
PROGRAMS_CACHE = Path(tempfile.gettempdir()) / f"jaxserve-test-programs-{os.getuid()}"


@contextlib.contextmanager
def running_server(
    *flags: str,
    model: str = "demo",
    environment: Mapping[str, str] = MappingProxyType({}),
    engine: bool = True,
    launcher: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """A server while the block runs.

    Args:
        *flags: Of ``jaxserve serve``.
        model: Directory, or ``demo``.
        environment: Added to this process' own.
        engine: Add the flags of ``SMALL_ENGINE``.
        launcher: Words of the command before ``serve``.
    """
    model, drafts = drafting.server(model)
    all_flags = ["--compilation-cache-dir", str(PROGRAMS_CACHE), "--shutdown-timeout", "5", "--allowed-hosts", "*"]
    all_flags += [*drafts, *(SMALL_ENGINE if engine else ()), *flags]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        limits: dict[str, Any] = {"start_limit_s": START_LIMIT_S, "end_limit_s": END_LIMIT_S, "launcher": launcher}
        with server_child.running_server(model, all_flags, Path(log.name), environment=environment, **limits) as server:
            yield server
