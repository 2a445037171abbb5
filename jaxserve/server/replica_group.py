"""One of several engines of a front end: the client of its engine process, and the other processes of its group."""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxserve.api.errors import ConfigError, EngineDeadError
from jaxserve.child_process import child_environment, end_of
from jaxserve.group.launch import entry_arguments
from jaxserve.group.ports import LOOPBACK, PortPair
from jaxserve.group.replicas import ReplicaGroups
from jaxserve.group.settings import SECRET_BYTES, GroupPlace
from jaxserve.log_output import relayed
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_process.spawn import spawn_engine
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for process 0 to say why, and for the others to end by themselves


class OtherProcesses(ABC):
    """The processes of a group besides number 0, the engine process.

    Attributes:
        ends: A task for each of them, which gives its end in words.
    """

    ends: Sequence["asyncio.Task[str]"] = ()

    @abstractmethod
    async def start(self) -> GroupPlace | None:
        """Start them; return what the engine process needs to join them, if this process has to tell it.

        Raises:
            ConfigError: A process cannot be started, or is missing.
        """

    @abstractmethod
    async def end(self, patience_s: float) -> None:
        """Wait for them, which end with the engine process; kill those that have not ended after some seconds."""


@final
class ReplicaGroup:
    """Starts, watches and ends the processes of a group.

    Args:
        name: What to call it.
        client: The client of the engine process, which has rank 0.
        others: The other processes.

    Attributes:
        client: Likewise.
    """

    def __init__(self, name: str, client: EngineClient, others: OtherProcesses):
        self._name = name
        self.client = client
        self._others = others

    async def start(self) -> None:
        """Start all processes; wait until the engine is ready.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong, or a process is missing.
            EngineDeadError: A process ended by itself.
        """
        starting = None
        try:
            self.client.place = await self._others.start()
            starting = asyncio.create_task(self.client.start())
            await asyncio.wait([starting, *self._others.ends], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():  # process 0 says why, unless the other one ended before it joined
                await asyncio.wait([starting], timeout=_PATIENCE_S)
            if not starting.done():
                reason = next(end.result() for end in self._others.ends if end.done())
                raise EngineDeadError(f"{self._name} did not start: {reason}")
            starting.result()
        except BaseException:
            if starting is not None:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            await self.kill()
            raise

    async def wait_others(self) -> None:
        """Wait for the other processes after the engine process has ended; kill those that do not end."""
        await self._others.end(_PATIENCE_S)

    async def stop(self, drain_s: float, patience_s: float) -> None:
        """End all processes; see ``EngineClient.stop``."""
        await self.client.stop(drain_s, patience_s)
        await self._others.end(_PATIENCE_S)

    async def kill(self) -> None:
        """End all processes at once."""
        await self.client.kill()
        await self._others.end(0.0)


@final
class LocalProcesses(OtherProcesses):
    """Processes of a group on this machine.

    Args:
        name: What to call the group.
        command: The command of ``jaxserve`` that each runs.
        environments: Variables of each process besides this one's, in the order of ranks.
        groups: How the processes are started.
    """

    def __init__(
        self, name: str, command: Sequence[str], environments: Sequence[Mapping[str, str]], groups: ReplicaGroups
    ):
        self._name = name
        self._command = command
        self._environments = environments
        self._groups = groups
        self._processes: list[asyncio.subprocess.Process] = []
        self._resources = contextlib.ExitStack()

    async def start(self) -> GroupPlace | None:
        """Start the processes but for number 0, which this process tells where to join them."""
        count, secret, groups = len(self._environments), secrets.token_bytes(SECRET_BYTES), self._groups
        if count == 1:
            return None
        ports = PortPair()
        self._resources.callback(ports.close)
        ends = list[asyncio.Task[str]]()
        self.ends = ends
        for rank in range(1, count):
            process = await self._spawn(rank, ports.first, secret)
            self._processes.append(process)
            ends.append(asyncio.create_task(self._watch(rank, process)))
        return GroupPlace(LOOPBACK, ports.first, count, 0, secret, groups.join_timeout, groups.step_timeout)

    async def _spawn(self, rank: int, port: int, secret: bytes) -> asyncio.subprocess.Process:
        """Start a process; it ends when this side of its pipe is closed, as it is when this process ends."""
        reading, writing = os.pipe()
        self._resources.callback(os.close, writing)
        os.write(writing, secret)
        try:
            with relayed(f"{self._name} rank {rank}", has_prefix=True) as written:
                return await asyncio.create_subprocess_exec(
                    sys.executable,
                    *entry_arguments(port, len(self._environments), rank, reading, self._command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=written,
                    stderr=written,
                    pass_fds=(reading,),
                    start_new_session=True,  # a terminal's Ctrl-C comes to this process alone
                    env={**child_environment(), **self._environments[rank]},
                )
        except OSError as error:
            raise ConfigError(f"{self._name}: rank {rank} cannot be started: {error}") from error
        finally:
            os.close(reading)

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> str:
        """Wait for the end of a process; return it in words."""
        status = await process.wait()
        reason = f"rank {rank} (process {process.pid}) {end_of(status)}"
        if status:
            logger.error("%s: %s", self._name, reason)
        return reason

    async def end(self, patience_s: float) -> None:
        """Wait for the processes, and kill those that have not ended after some seconds."""
        if self.ends:
            await asyncio.wait(self.ends, timeout=patience_s)
        for process, end in zip(self._processes, self.ends, strict=True):
            if not end.done():
                if patience_s:
                    logger.error("%s: process %d has not ended; it is killed", self._name, process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self.ends:
            await asyncio.wait(self.ends)
        self.ends, self._processes = (), []
        self._resources.close()


def local_group(
    number: int,
    arguments: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]],
    config: ServerConfig,
    groups: ReplicaGroups,
) -> ReplicaGroup:
    """Return a group whose processes are all on this machine.

    Args:
        number: Index of the group.
        arguments: Arguments of ``LLM``.
        environments: Variables of each process besides this one's, in the order of ranks.
        config: The server's settings.
        groups: How the processes are started.
    """
    name = f"group {number}"
    spawn = functools.partial(spawn_engine, config.log_format, environments[0], f"{name} rank 0")
    client = EngineClient(arguments, config, spawn=spawn, group_name=name)
    command = [*groups.command, *own_flags(arguments)]
    return ReplicaGroup(name, client, LocalProcesses(name, command, environments, groups))


def own_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the flags that turn the command of all groups into that of one, by the arguments of its engine."""
    names = ("mesh", "data_parallel_size", "seed")
    flags = [f"--{name.replace('_', '-')}={arguments[name]}" for name in names if arguments.get(name) is not None]
    return [*flags, "--processes-per-group=0"]
