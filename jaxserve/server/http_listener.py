"""The HTTP server: its socket and uvicorn's life.

The socket is bound here because uvicorn's ``Config.bind_socket`` exits the process on failure, leaves a Unix socket's
file open to all users, and does not replace the file of a server that has died.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import uvicorn

from jaxserve.api.errors import ConfigError
from jaxserve.server import http_protocol, http_transport
from jaxserve.server.connections import ConnectionLimits, FewLines, TransferLimits
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.app import make_app
from jaxserve.server.http_protocol import HttpProtocol
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tls import make_ssl_context, watch_files

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_FEW_LINES = FewLines()


def _settings(frontend: Frontend) -> uvicorn.Config:
    """Return uvicorn's settings."""
    config = frontend.config
    return uvicorn.Config(
        make_app(frontend),
        http=cast(
            "Any",
            functools.partial(
                HttpProtocol,
                TransferLimits(config.stall_timeout, config.min_transfer_rate),
                ConnectionLimits(config.max_connections, config.max_connections_per_address),
            ),
        ),
        ws="none",
        log_config=None,  # its lines are in the server's log, in its format
        log_level=config.uvicorn_log_level,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=config.keepalive_timeout,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=1,
    )


@contextlib.asynccontextmanager
async def http_listening(frontend: Frontend, note_end: Callable[[], None] | None = None) -> AsyncIterator[str]:
    """Serve HTTP while the block runs; yield the address.

    Args:
        frontend: What serves requests.
        note_end: Called if the server ends although it was not told to.

    Raises:
        ConfigError: The address cannot be used.
    """
    config, settings = frontend.config, _settings(frontend)
    settings.load()
    for module in (http_protocol, http_transport):
        module.logger.addFilter(_FEW_LINES)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(_bound(config))
        address = _http_address(config, bound)
        if config.has_tls:
            settings.ssl = make_ssl_context(config)
            watching = asyncio.create_task(watch_files(config, settings.ssl))
            stack.callback(watching.cancel)
        server = uvicorn.Server(settings)  # not its ``serve``, which would handle signals
        server.lifespan = settings.lifespan_class(settings)
        try:
            await server.startup(sockets=[bound])
        except Exception as error:
            raise ConfigError(f"cannot serve HTTP at {address}: {type(error).__name__}: {error}") from error

        async def run() -> None:
            await server.main_loop()
            await server.shutdown(sockets=[bound])

        running = asyncio.create_task(run())
        running.add_done_callback(functools.partial(_note_end, server, address, note_end))
        try:
            yield address
        finally:
            server.should_exit = True
            try:
                await asyncio.wait([running])
            finally:
                running.cancel()
                for connection in list(server.server_state.connections):
                    connection.transport.abort()  # these would wait for clients that do not read


def _note_end(
    server: uvicorn.Server, address: str, note_end: Callable[[], None] | None, running: "asyncio.Task[None]"
) -> None:
    """Log the end of a server that was not told to stop, or that failed, and pass it on."""
    if running.cancelled():
        why = "" if server.should_exit else "it was cancelled"
    else:
        error = running.exception()
        why = "" if error is None else f"{type(error).__name__}: {error}"
    if why or not server.should_exit:
        logger.error("the HTTP server at %s has ended: %s", address, why or "no error was raised")
        if note_end is not None and not server.should_exit:
            note_end()


def _http_address(config: ServerConfig, bound: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if config.has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a socket bound to the HTTP address, listening already so that the gRPC server cannot take the same port.

    Raises:
        ConfigError: The address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            if config.uds is not None:
                bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stack.callback(_remove, config.uds, _bind_path(bound, config.uds))
            else:
                family, kind, protocol, _, address = socket.getaddrinfo(
                    config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
                # Not socket.create_server: asyncio sets TCP_NODELAY only if the socket names its protocol.
                bound = stack.enter_context(socket.socket(family, kind, protocol))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
            bound.listen(_BACKLOG)
        except OSError as error:
            reason = "it is already in use; choose another" if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(f"cannot listen on {config.uds or f'{config.host}:{config.port}'}: {reason}") from error
        yield bound


def _bind_path(bound: socket.socket, path: str) -> os.stat_result:
    """Bind to a new path, or one left by a server that has ended; return the file's status."""
    try:
        bound.bind(path)
    except OSError:
        if not _is_stale(path):
            raise
        logger.info("removing %s, which was left by a server that has ended", path)
        os.unlink(path)
        bound.bind(path)
    # Keep what the umask allows, but give other users of the machine no access.
    os.chmod(path, os.stat(path).st_mode & 0o660)
    return os.stat(path)


def _is_stale(path: str) -> bool:
    """Return whether a path is a socket on which no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1)
        try:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                return False
            asking.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _remove(path: str, made: os.stat_result) -> None:
    """Remove the socket's file, unless another server has replaced it."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), made):
            os.unlink(path)
