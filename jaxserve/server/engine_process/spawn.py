"""Start an engine process. Imported by the front end, so without the engine."""

import asyncio
import logging
import socket
import sys

from jaxserve.api.errors import ConfigError
from jaxserve.child_process import child_environment

_STDERR = 2


async def spawn_engine() -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start an engine process; return it and both directions of the connection to it."""
    own, other = socket.socketpair()
    level = logging.getLogger("jaxserve").getEffectiveLevel()
    try:
        with other:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "jaxserve.server.engine_process", "--fd", str(other.fileno())),
                *("--log-level", str(level)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,  # libraries may print; the server's own output is for its address
                pass_fds=(other.fileno(),),
                # With one of malloc's arenas per thread its memory would grow for an hour.
                env={"MALLOC_ARENA_MAX": "2", **child_environment()},
            )
    except BaseException as error:
        own.close()
        if isinstance(error, OSError):
            raise ConfigError(f"the engine process cannot be started: {error}") from error
        raise
    return process, *await asyncio.open_connection(sock=own)
