"""The front end's side of an engine process: start it, send it messages, hand out its outputs, notice its end."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from typing import Any

from jaxserve.child_process import child_environment
from jaxserve.errors import ConfigError, DeadlineError, EngineDeadError, JaxserveError, RequestError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request
from jaxserve.server.engine_messages import (
    HEADER,
    MAX_FROM_ENGINE_BYTES,
    MAX_TO_ENGINE_BYTES,
    Cancel,
    EngineInfo,
    Failure,
    FrameError,
    FromEngine,
    Outputs,
    Query,
    QueryResult,
    Start,
    Stop,
    Submit,
    ToEngine,
    check_length,
    pack_frame,
    unpack,
)

logger = logging.getLogger(__name__)

_EXIT_S = 2.0  # from the end of the connection to that of the process
_GRACE_S = 0.5  # after a request's deadline, which the engine process should notice first
_WATCH_S = 1.0  # between two checks of the heartbeats
_STDERR = 2


async def open_link(start: Start) -> "EngineLink":
    """Start an engine process; return the link to it once it is ready.

    Raises:
        ConfigError: A setting, the model or one of its files is wrong.
        EngineDeadError: The process ended by itself.
    """
    link = EngineLink(*await spawn_engine())
    try:
        await link.start(start)
    except BaseException:
        await link.kill()
        raise
    return link


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


class EngineLink:
    """An engine process and the connection to it. Make one with ``open_link``.

    Attributes:
        info: What the engine process runs.
    """

    info: EngineInfo

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer
        self._next_number = 1
        self._collectors: dict[int, OutputCollector] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._reason: str | None = None
        self._silent_s = 0.0
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._ended.is_set()

    async def start(self, start: Start) -> None:
        """Wait until the engine is ready.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: The process ended by itself.
        """
        self._send(start)
        try:
            first = await self._read_message()
        except (OSError, EOFError) as error:
            await self._reap()
            raise EngineDeadError(f"the engine process ended while it started: {self._why()}") from error
        if isinstance(first, Failure):
            raise first.error
        assert isinstance(first, EngineInfo)
        self.info = first
        self._tasks.append(asyncio.create_task(self._read()))
        if start.watchdog_timeout:
            self._tasks.append(asyncio.create_task(self._watch(start.watchdog_timeout)))

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, as ``EngineClient.generate``."""
        number = self._take_number()
        self._send(Submit(number, request))
        collector = self._collectors[number] = OutputCollector(request.request_id, request.timeout_s)
        try:
            while True:
                output = await collector.get()
                yield output
                if output.finished:
                    return
        finally:
            self._collectors.pop(number, None)
            if not collector.has_ended and self.is_alive:
                self._send(Cancel([number]))

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, after the outputs that have come."""
        collectors, self._collectors = self._collectors, {}
        if collectors and self.is_alive:
            self._send(Cancel(list(collectors)))
        for collector in collectors.values():
            collector.fail(error)

    async def query(self, method: str, **arguments: Any) -> Any:
        """Call a control method of the engine process.

        Raises:
            JaxserveError: The method is unknown, or failed.
            EngineDeadError: The process has ended.
        """
        number = self._take_number()
        self._send(Query(number, method, arguments))
        self._queries[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._queries[number]
        finally:
            self._queries.pop(number, None)

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return why."""
        await self._ended.wait()
        return self._why()

    async def stop(self, drain_s: float, patience_s: float = 10.0) -> None:
        """End the process after at most ``drain_s`` seconds for its requests and ``patience_s`` more for itself."""
        self._reason = self._reason or "it was stopped"
        if self._tasks and self.is_alive:
            self._send(Stop(drain_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), drain_s + patience_s)
        await self.kill()

    async def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._tasks:
            await self._ended.wait()
        else:
            await self._reap()

    def _take_number(self) -> int:
        if not self.is_alive:
            raise self._dead()
        self._next_number += 1
        return self._next_number - 1

    def _send(self, message: ToEngine) -> None:
        try:
            self._writer.write(pack_frame(message, MAX_TO_ENGINE_BYTES))
        except FrameError as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error

    async def _read_message(self) -> FromEngine:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return unpack(await self._reader.readexactly(check_length(length, MAX_FROM_ENGINE_BYTES)))

    async def _read(self) -> None:
        """Handle messages until the process ends; then fail whatever waits for it."""
        try:
            while True:
                message = await self._read_message()
                self._silent_s = 0.0
                self._handle(message)
        except (OSError, EOFError):
            pass
        except Exception as error:  # nothing may be left waiting
            logger.exception("cannot read a message of the engine process")
            self._reason = self._reason or f"its messages cannot be read: {error}"
        finally:
            try:
                await self._reap()
            finally:
                self._ended.set()
                self.fail_all(self._dead())
                for query in self._queries.values():
                    if not query.done():
                        query.set_exception(self._dead())
                for task in self._tasks[1:]:
                    task.cancel()

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                collector = self._collectors.get(output.number)
                if collector is not None:
                    collector.put(output.content)
        elif isinstance(message, QueryResult):
            query = self._queries.get(message.number)
            if query is not None and not query.done():
                if isinstance(message.result, Exception):
                    query.set_exception(message.result)
                else:
                    query.set_result(message.result)
        elif isinstance(message, Failure):
            self._reason = self._reason or "the engine failed; its log says why"

    async def _watch(self, timeout_s: float) -> None:
        """Kill the process after ``timeout_s`` seconds without a message, not counting time in which this loop hung."""
        interval_s = min(_WATCH_S, timeout_s / 4)
        while self._silent_s < timeout_s:
            await asyncio.sleep(interval_s)
            self._silent_s += interval_s
        self._reason = f"it sent nothing for {timeout_s:g} s and was killed"
        logger.error("the engine process sends nothing; it is killed")
        self._process.kill()

    async def _reap(self) -> None:
        """Wait for the process, which has closed the connection, and close this side."""
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_S)
        except TimeoutError:
            self._reason = self._reason or "it closed the connection"
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _why(self) -> str:
        if self._reason is not None:
            return self._reason
        status = self._process.returncode
        if status is not None and status < 0:
            return f"it was killed by {signal.Signals(-status).name}"
        return f"it ended with status {status}"

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine process ended: {self._why()}")


class OutputCollector:
    """Collects the deltas of one request until they are read, and joins those that a slow reader left unread.

    Args:
        request_id: The request's name.
        timeout_s: Seconds until the request's deadline; None for none.

    Attributes:
        has_ended: Whether the engine process sends nothing more about the request.
    """

    def __init__(self, request_id: str, timeout_s: float | None = None):
        self.has_ended = False
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._limit_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s + _GRACE_S
        self._changed = asyncio.Event()
        self._first: RequestOutput | None = None  # has the prompt
        self._latest: RequestOutput | None = None  # None: everything was read
        self._deltas: dict[int, CompletionOutput] = {}
        self._error: Exception | None = None

    def put(self, content: RequestOutput | JaxserveError) -> None:
        """Take the next output, or the error that ends the request."""
        if isinstance(content, JaxserveError):
            self.fail(content)
            return
        self._first = self._first or content
        self._latest = content
        for delta in content.outputs:
            if delta.index in self._deltas:
                self._deltas[delta.index].extend(delta)
            else:
                self._deltas[delta.index] = delta
        self.has_ended = content.finished
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the request, unless it has ended: the reader gets the outputs that have come, then the error."""
        if not self.has_ended:
            self.has_ended = True
            self._error = error
            self._changed.set()

    async def get(self) -> RequestOutput:
        """Wait for an output; return everything since the last call.

        Raises:
            JaxserveError: The request failed, or its deadline has passed and the engine process did not notice.
        """
        while self._latest is None or self._first is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._limit_s):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineError(f"deadline exceeded: not finished within {self._timeout_s:g} s") from None
        first, latest, deltas = self._first, self._latest, self._deltas
        self._latest, self._deltas = None, {}
        prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None  # given once
        return dataclasses.replace(
            latest,
            request_id=self._request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            outputs=[deltas[index] for index in sorted(deltas)],
        )
