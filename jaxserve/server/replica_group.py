"""One of several engines of a front end: the client of its engine process, and the other processes of its group."""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
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
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for process 0 to say why, and for the others to end by themselves


@final
class ReplicaGroup:
    """Starts, watches and ends the processes of a group on this machine.

    Args:
        number: Index of the group.
        arguments: Arguments of ``LLM``.
        environments: Variables of each process besides this one's, in the order of ranks.
        config: The server's settings.
        groups: How the processes are started.

    Attributes:
        client: The client of the engine process, which has rank 0.
    """

    def __init__(
        self,
        number: int,
        arguments: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        config: ServerConfig,
        groups: ReplicaGroups,
    ):
        self._name = f"group {number}"
        self._environments = environments
        self._groups = groups
        self._command = [*groups.command, *own_flags(arguments)]
        self.client = EngineClient(arguments, config, environment=environments[0], group_name=self._name)
        self._followers: list[asyncio.Task[str]] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._resources = contextlib.ExitStack()

    async def start(self) -> None:
        """Start all processes; wait until the engine is ready.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: A process ended by itself.
        """
        starting = None
        try:
            if len(self._environments) > 1:
                self.client.place = await self._start_followers()
            starting = asyncio.create_task(self.client.start())
            await asyncio.wait([starting, *self._followers], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():  # process 0 says why, unless the other one ended before it joined
                await asyncio.wait([starting], timeout=_PATIENCE_S)
            if not starting.done():
                reason = next(follower.result() for follower in self._followers if follower.done())
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
        await self._end_followers(_PATIENCE_S)

    async def stop(self, drain_s: float, patience_s: float) -> None:
        """End all processes; see ``EngineClient.stop``."""
        await self.client.stop(drain_s, patience_s)
        await self._end_followers(_PATIENCE_S)

    async def kill(self) -> None:
        """End all processes at once."""
        await self.client.kill()
        await self._end_followers(0.0)

    async def _start_followers(self) -> GroupPlace:
        """Start the processes but for number 0; return what that one needs to join."""
        count, secret, groups = len(self._environments), secrets.token_bytes(SECRET_BYTES), self._groups
        ports = PortPair()
        self._resources.callback(ports.close)
        for rank in range(1, count):
            process = await self._spawn(rank, ports.first, secret)
            self._processes.append(process)
            self._followers.append(asyncio.create_task(self._watch(rank, process)))
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

    async def _end_followers(self, patience_s: float) -> None:
        """Wait for the followers, which end with process 0; kill those that have not ended after some seconds."""
        if self._followers:
            await asyncio.wait(self._followers, timeout=patience_s)
        for process, follower in zip(self._processes, self._followers, strict=True):
            if not follower.done():
                if patience_s:
                    logger.error("%s: process %d has not ended; it is killed", self._name, process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self._followers:
            await asyncio.wait(self._followers)
        self._followers, self._processes = [], []
        self._resources.close()


def own_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the flags that turn the command of all groups into that of one, by the arguments of its engine."""
    names = ("mesh", "data_parallel_size", "seed")
    flags = [f"--{name.replace('_', '-')}={arguments[name]}" for name in names if arguments.get(name) is not None]
    return [*flags, "--processes-per-group=0"]
