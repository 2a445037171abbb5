"""Start an engine process. Imported by the front end, so without the engine."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from jaxserve.api.errors import ConfigError
from jaxserve.child_process import child_environment
from jaxserve.log_output import LogFormat, relayed

STACKS_SIGNAL = signal.SIGUSR2
"""Makes the process write the stacks of its threads into its log."""


class EngineProcess(Protocol):
    """An engine process of this machine, as ``asyncio.subprocess.Process``, or of another node."""

    @property
    def returncode(self) -> int | None:
        """How it has ended, as ``subprocess`` has it; None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait for its end; return how it has ended."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def send_signal(self, signal: int) -> None:
        """Send it a signal."""
        ...


class SpawnedEngine(NamedTuple):
    """An engine process that has been started, and both directions of the connection to it."""

    process: EngineProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    clock_ahead_s: float = 0.0
    """How far its ``time.monotonic()`` is ahead of this process's, which is not 0 on another machine."""


Spawn = Callable[[], Awaitable[SpawnedEngine]]
"""Starts an engine process."""


def engine_command(fd: int, log_format: LogFormat, log_name: str) -> list[str]:
    """Return the command of an engine process.

    Args:
        fd: Descriptor of its socket.
        log_format: Form of its log.
        log_name: What the log calls it.
    """
    level = logging.getLogger("jaxserve").getEffectiveLevel()
    return [
        *(sys.executable, "-P", "-m", "jaxserve.server.engine_process", "--fd", str(fd)),
        *("--log-level", str(level), "--log-format", log_format, "--log-name", log_name),
    ]


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine process, with these variables besides this process's."""
    # With one of malloc's arenas per thread its memory would grow for an hour.
    return {"MALLOC_ARENA_MAX": "2", **child_environment(), **environment}


async def spawn_engine(log_format: LogFormat, environment: Mapping[str, str], log_name: str) -> SpawnedEngine:
    """Start an engine process.

    Args:
        log_format: Form of its log, which goes through this process's queue if there is one.
        environment: Variables of the process besides this one's.
        log_name: What the log calls it; in text, only one of several has its name before each line.
    """
    own, other = socket.socketpair()
    try:
        with other, relayed(log_name, has_prefix=log_name != "engine") as written:
            process = await asyncio.create_subprocess_exec(
                *engine_command(other.fileno(), log_format, log_name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=written,  # libraries may print; the server's own output is for its address
                stderr=written,
                pass_fds=(other.fileno(),),
                env=engine_environment(environment),
            )
    except BaseException as error:
        own.close()
        if isinstance(error, OSError):
            raise ConfigError(f"the engine process cannot be started: {error}") from error
        raise
    return SpawnedEngine(process, *await asyncio.open_connection(sock=own))
