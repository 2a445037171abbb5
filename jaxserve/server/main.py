"""The life of a server: listen, start the engine, serve, drain, end."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from jaxserve.api.errors import EngineDeadError, JaxserveError
from jaxserve.garbage import spare_lasting_objects
from jaxserve.group.replicas import ReplicaGroups
from jaxserve.group.settings import GroupPlace
from jaxserve.server.audit import audit_file
from jaxserve.server.connections import AcceptFailures, raise_open_files_limit
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_groups import EngineGroups
from jaxserve.server.errors import UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.server import GrpcServer
from jaxserve.server.http_listener import http_listening
from jaxserve.server.key_watch import KeyWatch
from jaxserve.server.resources import (
    map_large_buffers_apart,
    return_free_memory,
    share_heap,
    switch_threads_often,
)
from jaxserve.server.restarts import Pauses
from jaxserve.server.settings import ServerConfig, is_loopback

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 70
"""Exit status if the engine or a listener ended by itself: EX_SOFTWARE."""
_FAREWELL_S = 2.0  # for responses that say why the engine ended or time ran out
_FLUSH_S = 0.5  # for the last bytes of those responses


async def serve(
    engine_arguments: dict[str, Any],
    config: ServerConfig,
    group: GroupPlace | None = None,
    replicas: ReplicaGroups | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, a drain, or the end of the engine; return the exit status.

    Args:
        engine_arguments: Arguments of ``LLM``, including the model.
        config: The server's settings.
        group: Where the processes of the engine meet, or the nodes of its replicas; None: there is one.
        replicas: How the replicas run as groups; None: one engine has them all.

    Raises:
        ConfigError: The settings, the model or a port cannot be used.
    """
    map_large_buffers_apart()
    share_heap()
    raise_open_files_limit()
    switch_threads_often()
    asyncio.get_running_loop().set_exception_handler(AcceptFailures())
    _warn_of_exposure(config)
    if replicas is None:
        engine = EngineClient(engine_arguments, config, group)
    else:
        engine = EngineGroups(engine_arguments, config, replicas, group)
    frontend = Frontend(config, engine, str(engine_arguments.get("model", "demo")))
    if isinstance(engine, EngineGroups):
        engine.on_change = frontend.reopen
    life = ServerLife(frontend, engine)
    try:
        with audit_file(config.audit_log):
            return await life.run()
    except EngineDeadError as error:  # while it started for the first time
        logger.error("%s", error)
        return EXIT_ENGINE_DEAD
    finally:
        frontend.long_work.close()
        await asyncio.to_thread(frontend.log.close)


class ServerLife:
    """Starts and ends the listeners and the engine.

    Args:
        frontend: What the listeners share.
        engine: The engine, not started yet.
    """

    def __init__(self, frontend: Frontend, engine: EngineClient | EngineGroups):
        self._frontend = frontend
        self._config = frontend.config
        self._engine = engine
        self._grpc = GrpcServer(frontend, self._drain)
        self._drain_s: float | None = None
        self._has_signal = False
        self._has_lost_http = False
        self._is_told = asyncio.Event()
        self._is_hurried = asyncio.Event()

    async def run(self) -> int:
        """Listen, start the engine, and serve until the end; return the exit status."""
        with self._signals():
            async with self._listening() as addresses:
                starting = asyncio.create_task(self._engine.start())
                if not await self._unless_told(starting):
                    await self._stop_engine()
                    return EXIT_ENGINE_DEAD if self._has_lost_http else 0
                spare_lasting_objects()
                self._open()
                returning = asyncio.create_task(return_free_memory())
                try:
                    # May fail: the engine ends all the same. With its line end in one piece, no line of the log can
                    # come between where both go to one terminal.
                    print(f"jaxserve ready: {addresses}\n", end="", flush=True)
                    status = await self._serve_until_end()
                    return EXIT_ENGINE_DEAD if self._has_lost_http else status
                finally:
                    returning.cancel()
                    self._close("the server is shutting down")
                    await self._grpc.stop(_FLUSH_S)
                    await self._stop_engine()

    def _open(self) -> None:
        self._frontend.open()
        self._grpc.set_serving(True)

    def _close(self, reason: str) -> None:
        self._grpc.set_serving(False)
        self._frontend.ledger.close(reason)

    async def _serve_until_end(self) -> int:
        """Serve until told to stop, or until the engine ends and is not to be restarted; return the exit status."""
        pauses = Pauses()
        while True:
            pauses.began()
            ended = asyncio.create_task(self._engine.wait_ended())
            if not await self._unless_told(ended):
                return await self._drained()
            reason = ended.result()
            logger.error("the engine process ended: %s", reason)
            self._close(f"the engine process ended: {reason}")
            if not self._config.restart_engine:
                self._frontend.is_lost = True
                await asyncio.sleep(_FAREWELL_S)
                return EXIT_ENGINE_DEAD
            if not await self._unless_told(asyncio.create_task(self._restart(pauses.next_s()))):
                return 0

    async def _restart(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._engine.start()
            except JaxserveError:
                logger.exception("the engine process could not be started again")
                pause_s = Pauses.longest_s
            else:
                self._open()
                logger.warning("the engine process was started again")
                return

    async def _unless_told(self, task: "asyncio.Task[Any]") -> bool:
        """Wait for a task; if the server is told to stop first, cancel the task and return False."""
        told = asyncio.create_task(self._is_told.wait())
        try:
            await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, JaxserveError):
                await task
            return False
        finally:
            told.cancel()

    async def _drained(self) -> int:
        """Stop accepting requests and wait for in-flight ones, up to the time limit; return the exit status."""
        await self._delay()
        self._close("the server is shutting down")
        limit_s = self._config.shutdown_timeout if self._drain_s is None else self._drain_s
        logger.info("draining: %d sequences in flight, at most %g s", self._frontend.ledger.num_in_flight, limit_s)
        hurried = asyncio.create_task(self._is_hurried.wait())
        idle = asyncio.create_task(self._until_idle())
        ended = asyncio.create_task(self._engine.wait_ended())
        await asyncio.wait([hurried, idle, ended], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        is_lost = ended.done() and not idle.done()
        if is_lost:
            logger.error("the engine process ended while requests ran: %s", ended.result())
        elif not idle.done():
            self._engine.fail_requests(UnavailableError("the server shut down before the request was done"))
        await asyncio.wait([idle], timeout=_FAREWELL_S)
        for task in (hurried, idle, ended):
            task.cancel()
        return EXIT_ENGINE_DEAD if is_lost else 0

    async def _delay(self) -> None:
        """Tell load balancers to send no more requests, and accept requests for the time they take to notice."""
        self._frontend.is_draining = True
        self._grpc.set_serving(False)
        if self._config.drain_delay and not self._has_lost_http:
            logger.info("draining: requests are accepted for %g s more", self._config.drain_delay)
            hurried = asyncio.create_task(self._is_hurried.wait())
            ended = asyncio.create_task(self._engine.wait_ended())
            await asyncio.wait([hurried, ended], timeout=self._config.drain_delay, return_when=asyncio.FIRST_COMPLETED)
            for task in (hurried, ended):
                task.cancel()

    async def _stop_engine(self) -> None:
        """End the engine process, by force after a second signal."""
        hurried = asyncio.create_task(self._is_hurried.wait())
        stopping = asyncio.create_task(self._engine.stop(0.0))
        await asyncio.wait([hurried, stopping], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not stopping.done():
            await self._engine.kill()
        await stopping

    async def _until_idle(self) -> None:
        while self._frontend.ledger.num_in_flight:
            await asyncio.sleep(0.02)

    def _drain(self, timeout_s: float | None) -> None:
        """End the server once its requests have ended; only the first call sets the time limit."""
        if not self._is_told.is_set():
            self._drain_s = timeout_s
        self._is_told.set()

    def _note_http_end(self) -> None:
        """End the server because nothing accepts HTTP connections any more."""
        self._has_lost_http = True
        self._drain(None)

    def _signalled(self) -> None:
        """End the server as ``_drain`` does; after a second signal at once."""
        if self._has_signal:
            self._is_hurried.set()
        self._has_signal = True
        self._drain(None)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: self._signalled,
            signal.SIGINT: self._signalled,
        }
        watching = None
        if self._config.auth_file is not None:
            watch = KeyWatch(self._frontend)
            watching = asyncio.create_task(watch.run())
            handlers[signal.SIGHUP] = watch.reload
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            if watching is not None:
                watching.cancel()

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[str]:
        """Open the listeners; yield their addresses."""
        config, parts = self._config, []
        async with contextlib.AsyncExitStack() as stack:
            if config.uds is not None or config.port != -1:
                address = await stack.enter_async_context(http_listening(self._frontend, self._note_http_end))
                parts.append(f"http={address}")
            await self._grpc.start()
            stack.push_async_callback(self._grpc.stop, 0.0)
            if self._grpc.port is not None:
                parts.append(f"grpc={config.host}:{self._grpc.port}")
            if self._grpc.admin_port is not None:
                parts.append(f"admin={config.admin_host}:{self._grpc.admin_port}")
            yield " ".join(parts)


def _warn_of_exposure(config: ServerConfig) -> None:
    if is_loopback(config.host):
        return
    missing = [what for what, is_there in (("API keys", config.has_keys), ("TLS", config.has_tls)) if not is_there]
    if missing:
        logger.warning("%s can be reached by other machines, without %s", config.host, " and without ".join(missing))
