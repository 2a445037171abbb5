"""The engine as the front end sees it: a process that generates, embeds, tokenizes and reports.

The front end renders conversations itself, so that the engine process is given text or token ids only.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import ConfigError, EngineDeadError, RequestError
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.rendering import RenderedChat
from jaxserve.api.request import Request
from jaxserve.api.text_bound import check_text
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.child_process import end_of
from jaxserve.frames import HEADER, FrameError, check_length
from jaxserve.group.settings import GroupPlace
from jaxserve.server.engine_process.spawn import STACKS_SIGNAL, EngineProcess, Spawn, spawn_engine
from jaxserve.server.engine_queries import EngineQueries
from jaxserve.server.errors import UnavailableError
from jaxserve.server.output_collector import OutputCollector, aborted
from jaxserve.server.renderers import Renderers
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import (
    MAX_FROM_ENGINE_BYTES,
    MAX_TO_ENGINE_BYTES,
    Cancel,
    EngineInfo,
    Failure,
    FromEngine,
    Outputs,
    Query,
    QueryResult,
    Start,
    Stop,
    Submit,
    ToEngine,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

_EXIT_S = 2.0  # from the end of the connection to that of the process
_IMPORT_S = 60.0  # until the process reads its first message and counts the time itself
_STACKS_S = 1.0  # for the stacks of a process that hangs
_GROUP_SILENT_S = 15.0  # of process 0 of a group, whose followers end by themselves then; it sends every second
_WATCH_S = 1.0  # between two checks of the heartbeats


class EngineClient(EngineQueries):
    """The client of an engine in a process of its own. All of it belongs to one event loop.

    Args:
        engine_arguments: Arguments of ``LLM``, all of them JSON values.
        config: The server's settings.
        group: Where the processes of the engine meet; None: there is one.
        spawn: Starts the process, if not as one of this machine.
        group_name: What to call its group, if there are several.

    Attributes:
        place: Where the processes of the engine meet when it starts; None: there is one.
        moved: Settings of the mesh and layout that it has moved to, with which it starts again; empty: the given ones.

    Raises:
        ConfigError: They do not go together.
    """

    def __init__(
        self,
        engine_arguments: Mapping[str, Any],
        config: ServerConfig,
        group: GroupPlace | None = None,
        spawn: Spawn | None = None,
        group_name: str = "",
    ):
        config.check_engine(engine_arguments)
        self._arguments = dict(engine_arguments)
        self._config = config
        self.place = group
        self.moved: dict[str, Any] = {}
        log_name = group.log_name if group else "engine"
        self._spawn = spawn or functools.partial(spawn_engine, config.log_format, {}, log_name)
        self._title = f"the engine process of {group_name}" if group_name else "the engine process"
        self._numbers = itertools.count(1)
        self._collectors: dict[int, OutputCollector] = {}
        self._has_metrics = bool(config.enable_log_requests or config.enable_log_outputs or config.otlp_traces_endpoint)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._renderers: Renderers | None = None
        self._process: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the process, or start it again after it has ended; wait until the engine is ready.

        It starts where it was; if it cannot, the next call starts it as it was given.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: The process ended by itself.
        """
        assert not self.is_alive, "the engine process runs"
        try:
            json.dumps(self._arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the engine's arguments must be JSON values: {error}") from error
        config = self._config
        self._process, self._info, self._tasks = None, None, []
        self._reason: str | None = None
        self._silent_s = 0.0
        self._ended = asyncio.Event()
        await self._close_renderers()  # of an engine that has ended
        self._renderers = Renderers.of(config)
        try:
            self._process, self._reader, self._writer, self._clock_ahead_s = await self._spawn()
            self._info = await self._shake_hands()
        except BaseException as error:
            if self.moved and isinstance(error, ConfigError):
                logger.error("%s cannot start with the mesh and layout that it had moved to: %s", self._title, error)
                self.moved = {}
            await self.kill()
            raise
        self._tasks.append(asyncio.create_task(self._read()))
        if limit_s := config.watchdog_timeout:
            longest_s = _GROUP_SILENT_S if self.place is not None and self.place.count > 1 else limit_s
            self._tasks.append(asyncio.create_task(self._watch(min(limit_s, longest_s))))

    async def _shake_hands(self) -> EngineInfo:
        limit_s = self._config.startup_timeout
        self._send(Start(self._arguments, self._config.watchdog_timeout, self.place, limit_s, self.moved))
        try:
            # The process ends by itself, with its stacks in the log, unless it is stopped or has no CPU.
            first = await asyncio.wait_for(self._read_message(), limit_s + _IMPORT_S if limit_s else None)
        except TimeoutError:
            raise EngineDeadError(f"{self._title} was not ready within {limit_s:g} s (startup_timeout)") from None
        except (OSError, EOFError) as error:
            await self._reap()
            raise EngineDeadError(f"{self._title} ended while it started: {self._why()}") from error
        if isinstance(first, Failure):
            raise first.error
        assert isinstance(first, EngineInfo)
        return first

    def fail_requests(self, error: Exception) -> None:
        """End every request with an error, after the outputs that have come. No more may follow."""
        collectors, self._collectors = self._collectors, {}
        if collectors and self.is_alive:
            self._send(Cancel(list(collectors)))
        for collector in collectors.values():
            collector.fail(error)
        if self._renderers is not None:
            self._renderers.end(error)

    def end_named(self, request_ids: Collection[str], error: Exception) -> None:
        """End requests by their full names with an error, after the outputs that have come."""
        if self._renderers is not None:
            self._renderers.abort(request_ids)
        numbers = [number for number, found in self._collectors.items() if found.request_id in request_ids]
        for number in numbers:
            self._collectors.pop(number).fail(error)
        if numbers and self.is_alive:
            self._send(Cancel(numbers))

    async def stop(self, drain_s: float, patience_s: float = 10.0) -> None:
        """End the process, if it runs, after at most ``drain_s`` seconds for its requests and ``patience_s`` more."""
        if self.is_alive:
            self._reason = self._reason or "it was stopped"
            self._send(Stop(drain_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), drain_s + patience_s)
        await self.kill()

    async def kill(self) -> None:
        """End the processes at once, if they run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            if self._tasks:
                await self._ended.wait()
            else:
                await self._reap()
        await self._close_renderers()

    async def _close_renderers(self) -> None:
        renderers, self._renderers = self._renderers, None
        if renderers is not None:
            renderers.end(UnavailableError("the server is shutting down"))
            await asyncio.to_thread(renderers.close)

    @property
    def is_alive(self) -> bool:
        """Whether a process runs that is ready."""
        return self._info is not None and not self._ended.is_set()

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return why."""
        await self._ended.wait()
        return self._why()

    @property
    def info(self) -> EngineInfo:
        """What runs.

        Raises:
            UnavailableError: The engine is not ready.
        """
        if self._info is None:
            raise UnavailableError("the engine is starting")
        if self._ended.is_set():
            raise UnavailableError(f"{self._title} has ended: {self._why()}")
        return self._info

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request finishes. Closing the generator, or cancelling its reader, ends the request.

        Deltas that arrive while the reader is busy are merged. The first output has the prompt's token ids, text and
        logprobs, the last has ``metrics`` if logs or traces show them.

        Args:
            request: The request.
            is_waiting: Whether to yield the prompt's token ids before it runs, in an output without completions.

        Raises:
            RequestError: The request is wrong.
            RequestFailedError: The engine failed at it.
            DeadlineError: The deadline has passed.
            EngineDeadError: The engine has ended.
        """
        arrival_s = time.monotonic()
        collector = OutputCollector(request.timeout_s, request.request_id)
        number = self._take_number()
        if request.chat is not None and request.text is None:
            rendered = await self._render(request.chat, request.turn, request.request_id, request.timeout_s)
            if rendered is None:
                yield aborted(request)
                return
            last = {  # it tells where reasoning begins
                "messages": request.chat["messages"][-1:],
                "continue_final_message": request.chat.get("continue_final_message", False),
            }
            request = dataclasses.replace(request, **rendered._asdict(), chat=last, add_special_tokens=False)
            check_text(self.info.text_bound, request, self.info.max_model_len)
        self._collectors[number] = collector
        try:
            self._send(Submit(number, request, arrival_s + self._clock_ahead_s, is_waiting, self._has_metrics))
            while True:
                output = await collector.get()
                yield output
                if output.finished:
                    return
        finally:
            self._collectors.pop(number, None)
            if not collector.has_ended and self.is_alive:
                self._send(Cancel([number]))

    async def render_chat(self, chat: Mapping[str, Any], turn: Turn = SHARED_TURN) -> tuple[str, Sequence[int]]:
        """Return the prompt of a conversation, as text and token ids; ``chat`` as in ``Request``."""
        rendered = await self._render(chat, turn)
        assert rendered is not None
        text = rendered.text
        return text, (await self.tokenize(text, add_special_tokens=False, turn=turn))[0]

    async def _render(self, chat: Mapping[str, Any], turn: Turn, *request: Any) -> RenderedChat | None:
        assert self._renderers is not None
        return await self._renderers.render(chat, self.info, *request, turn=turn)

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests by their full names; return those that were running or waiting."""
        rendering = [] if self._renderers is None else self._renderers.abort(request_ids)
        return [*await self._query("abort", request_ids=list(request_ids)), *rendering]

    async def reshard(self, mesh: str | None, layout: str | None) -> dict[str, Any]:
        """Move the engine to another mesh or layout; return the fields of a ``ReshardReport``.

        Updates ``info`` and ``moved``.

        Raises:
            RequestError: The mesh or layout is invalid, or another reshard is running.
            EngineDeadError: The move failed, and the engine has ended.
        """
        report, self._info, self.moved = await self._query("reshard", mesh=mesh, layout=layout)
        return report

    async def _query(self, method: str, **arguments: Any) -> Any:
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

    def _take_number(self) -> int:
        if self._info is None:
            raise UnavailableError("the engine is starting")
        if self._ended.is_set():
            raise self._dead()
        return next(self._numbers)

    def _send(self, message: ToEngine) -> None:
        try:
            self._writer.write(pack(message, MAX_TO_ENGINE_BYTES))
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
                self.fail_requests(self._dead())
                for query in self._queries.values():
                    if not query.done():
                        query.set_exception(self._dead())
                for task in self._tasks[1:]:
                    task.cancel()

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for number, content in message.outputs:
                if number in self._collectors:
                    self._collectors[number].put(content)
        elif isinstance(message, QueryResult):
            query = self._queries.get(message.number)
            if query is not None and not query.done():
                if isinstance(message.result, Exception):
                    query.set_exception(message.result)
                else:
                    query.set_result(message.result)
        elif isinstance(message, Failure):
            is_named = isinstance(message.error, EngineDeadError)  # in words for clients too
            self._reason = self._reason or (str(message.error) if is_named else "the engine failed; its log says why")

    async def _watch(self, timeout_s: float) -> None:
        """Kill the process after ``timeout_s`` seconds without a message, not counting time in which this loop hung."""
        assert self._process is not None
        interval_s = min(_WATCH_S, timeout_s / 4)
        while self._silent_s < timeout_s:
            await asyncio.sleep(interval_s)
            self._silent_s += interval_s
        self._reason = f"it sent nothing for {timeout_s:g} s and was killed"
        logger.error("%s sends nothing; it is killed", self._title)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(_STACKS_S)
            self._process.kill()

    async def _reap(self) -> None:
        """Wait for the process, which has closed the connection, and close this side."""
        assert self._process is not None
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
        return f"it {end_of(None if self._process is None else self._process.returncode)}"

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"{self._title} ended: {self._why()}")
