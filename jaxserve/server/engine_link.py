"""The front end's line to one engine process: frames go out, frames come in, and its end is noticed."""

import asyncio
import contextlib
import json
import logging
from typing import Any

from google.protobuf.message import Message

from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.server.engine_frames import (
    HEADER,
    MAX_FROM_ENGINE_BYTES,
    MAX_TO_ENGINE_BYTES,
    FrameError,
    checked_length,
    error_from_proto,
    packed,
)
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.engine_slot import EngineSlot
from jaxserve.server.engine_spawn import SpawnedEngine, exit_text, spawn_engine
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.submit_codec import submit_to_proto

logger = logging.getLogger(__name__)

_EXIT_S = 2.0  # from the end of the line to that of the process
_LOOK_S = 1.0  # between two looks at the heartbeats


class EngineLink:
    """An engine process that was started, and the line to it. Make one with ``open_link``.

    Args:
        spawned: The process, and both ways of the line.

    Attributes:
        ready: What the engine says of itself; empty before it is ready.
    """

    def __init__(self, spawned: SpawnedEngine):
        self.ready = engine_pb2.Ready()
        self._process, self._reader, self._writer = spawned
        self._next_number = 1
        self._slots: dict[int, EngineSlot] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reason: str | None = None
        self._silent_s = 0.0
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._ended.is_set()

    async def start(self, start: engine_pb2.Start) -> None:
        """Waits until the engine is ready.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: The process ended by itself.
        """
        self._send(start=start)
        try:
            first = await self._read_frame()
            if first.HasField("failure"):
                raise error_from_proto(first.failure.error)
        except (OSError, EOFError) as error:
            await self._reap()
            raise EngineDeadError(f"the engine process ended while it started: {self._why()}") from error
        self.ready = first.ready
        self._tasks.append(asyncio.create_task(self._read()))
        if start.watchdog_timeout_s:
            self._tasks.append(asyncio.create_task(self._watch(start.watchdog_timeout_s)))

    def submit(self, request: EngineRequest, request_id: str) -> EngineSlot:
        """Lets a request run; its outputs come to the slot, until ``release``.

        Raises:
            RequestError: A value that no message can hold, or too much in all.
            EngineDeadError: The process has ended.
        """
        slot = EngineSlot(self._take_number(), request_id)
        self._send(submit=submit_to_proto(request, slot.number, request_id))
        slot.begin(request.timeout_s)
        self._slots[slot.number] = slot
        return slot

    def release(self, slot: EngineSlot) -> None:
        """Forgets a slot, and ends its request where it still runs."""
        self._slots.pop(slot.number, None)
        slot.close()
        if not slot.has_ended and self.is_alive:
            self._send(cancel=engine_pb2.Cancel(ids=[slot.number]))

    def fail_all(self, error: Exception) -> None:
        """Ends every request with an error; what has come of it is read first."""
        slots, self._slots = self._slots, {}
        if slots and self.is_alive:
            self._send(cancel=engine_pb2.Cancel(ids=list(slots)))
        for slot in slots.values():
            slot.fail(error)

    async def ask(self, method: str, **arguments: Any) -> Any:
        """The answer to a question.

        Raises:
            JaxserveError: The question is wrong.
            EngineDeadError: The process has ended.
        """
        number = self._take_number()
        self._send(query=engine_pb2.Query(id=number, method=method, arguments_json=json.dumps(arguments)))
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._answers[number]
        finally:
            self._answers.pop(number, None)

    async def wait_ended(self) -> str:
        """Why the process ended, once it has."""
        await self._ended.wait()
        return self._why()

    async def stop(self, drain_s: float, patience_s: float = 10.0) -> None:
        """Ends the process: its requests may go on for ``drain_s`` seconds, and it may take some more to end."""
        self._reason = self._reason or "it was stopped"
        if self._tasks and self.is_alive:
            self._send(stop=engine_pb2.Stop(drain_s=drain_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), drain_s + patience_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process at once."""
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

    def _send(self, **frame: Message) -> None:
        message = engine_pb2.ToEngine(**frame)  # pyright: ignore[reportArgumentType]
        try:
            self._writer.write(packed(message, MAX_TO_ENGINE_BYTES))
        except FrameError as error:
            raise RequestError(f"the request is too long: {error}") from error

    async def _read_frame(self) -> engine_pb2.FromEngine:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        data = await self._reader.readexactly(checked_length(length, MAX_FROM_ENGINE_BYTES))
        return engine_pb2.FromEngine.FromString(data)

    async def _read(self) -> None:
        """Hands frames over until the process ends; then nothing waits any more."""
        try:
            while True:
                frame = await self._read_frame()
                self._silent_s = 0.0
                self._handle(frame)
        except (OSError, EOFError):
            pass
        except Exception as error:  # nothing may be left waiting
            logger.exception("the engine process cannot be understood")
            self._reason = self._reason or f"it cannot be understood: {error}"
        finally:
            await self._finish()

    async def _finish(self) -> None:
        try:
            await self._reap()
        finally:
            self._ended.set()
            self.fail_all(self._dead())
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._dead())
            for task in self._tasks[1:]:
                task.cancel()

    def _handle(self, frame: engine_pb2.FromEngine) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            for output in frame.outputs.outputs:
                slot = self._slots.get(output.id)
                if slot is not None:
                    slot.put(output)
        elif kind == "answer":
            answer = self._answers.get(frame.answer.id)
            if answer is not None and not answer.done():
                if frame.answer.HasField("error"):
                    answer.set_exception(error_from_proto(frame.answer.error))
                else:
                    answer.set_result(json.loads(frame.answer.value_json))
        elif kind == "failure":
            self._reason = self._reason or "the engine failed; its log says why"

    async def _watch(self, timeout_s: float) -> None:
        """Kills a process that says nothing for too long. Time in which this one stood still is not counted."""
        look_s = min(_LOOK_S, timeout_s / 4)
        while self._silent_s < timeout_s:
            await asyncio.sleep(look_s)
            self._silent_s += look_s
        self._reason = f"it said nothing for {timeout_s:g} s and was killed"
        logger.error("the engine process says nothing; it is killed")
        self._process.kill()

    async def _reap(self) -> None:
        """Waits for the process, which has closed the line, and closes it here."""
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_S)
        except TimeoutError:
            self._reason = self._reason or "it closed the line"
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _why(self) -> str:
        return self._reason or exit_text(self._process.returncode)

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine process ended: {self._why()}")


async def open_link(start: engine_pb2.Start) -> EngineLink:
    """Starts an engine process; returns the line to it once it is ready.

    Raises:
        ConfigError: A setting, the model or one of its files is wrong.
        EngineDeadError: The process ended by itself.
    """
    link = EngineLink(await spawn_engine())
    try:
        await link.start(start)
    except BaseException:
        await link.kill()
        raise
    return link
