"""Start an engine process. Imported by the front end, so without the engine."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Mapping

from jaxserve.api.errors import ConfigError
from jaxserve.child_process import child_environment
from jaxserve.log_output import LogFormat, relayed

STACKS_SIGNAL = signal.SIGUSR2
"""Makes the process write the stacks of its threads into its log."""


async def spawn_engine(
    log_format: LogFormat, environment: Mapping[str, str], log_name: str
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start an engine process; return it and both directions of the connection to it.

    Args:
        log_format: Form of its log, which goes through this process's queue if there is one.
        environment: Variables of the process besides this one's.
        log_name: What the log calls it; in text, only one of several has its name before each line.
    """
    own, other = socket.socketpair()
    level = logging.getLogger("jaxserve").getEffectiveLevel()
    try:
        with other, relayed(log_name, has_prefix=log_name != "engine") as written:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "jaxserve.server.engine_process", "--fd", str(other.fileno())),
                *("--log-level", str(level), "--log-format", log_format, "--log-name", log_name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=written,  # libraries may print; the server's own output is for its address
                stderr=written,
                pass_fds=(other.fileno(),),
                # With one of malloc's arenas per thread its memory would grow for an hour.
                env={"MALLOC_ARENA_MAX": "2", **child_environment(), **environment},
            )
    except BaseException as error:
        own.close()
        if isinstance(error, OSError):
            raise ConfigError(f"the engine process cannot be started: {error}") from error
        raise
    return process, *await asyncio.open_connection(sock=own)
