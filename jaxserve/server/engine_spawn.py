"""How an engine process is started, and how it ended."""

import asyncio
import logging
import signal
import socket
import sys
from typing import NamedTuple

from jaxserve.child_process import child_environment
from jaxserve.errors import ConfigError

_STDERR = 2


class SpawnedEngine(NamedTuple):
    """A process that was started, and both ways of the line to it, which no other process can reach."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


def _environment() -> dict[str, str]:
    """What the process inherits; one of malloc's arenas a thread would let its memory grow for an hour."""
    return {"MALLOC_ARENA_MAX": "2", **child_environment()}


async def spawn_engine() -> SpawnedEngine:
    """Starts an engine process.

    Raises:
        ConfigError: It cannot be started.
    """
    own, other = socket.socketpair()
    level = logging.getLogger("jaxserve").getEffectiveLevel()
    try:
        with other:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "jaxserve.server.engine_process", "--fd", str(other.fileno())),
                *("--log-level", str(level)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,  # what libraries print is no answer of the front end's
                pass_fds=(other.fileno(),),
                env=_environment(),
            )
    except BaseException as error:
        own.close()
        if isinstance(error, OSError):
            raise ConfigError(f"the engine process cannot be started: {error}") from error
        raise
    return SpawnedEngine(process, *await asyncio.open_connection(sock=own))


def exit_text(status: int | None) -> str:
    """How a process ended, from its exit status."""
    if status is not None and status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with status {status}"
