"""Several engines that one front end serves: a group for each data slice, whose end is not that of the others."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, final

from jaxserve.api.errors import ConfigError, EngineDeadError, JaxserveError, RequestError
from jaxserve.api.metric_types import Metric
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.group.differences import difference
from jaxserve.group.replicas import (
    ReplicaGroups,
    arguments_of_groups,
    check_processes,
    devices_of_replica,
    sizes_of,
)
from jaxserve.group.settings import GroupPlace
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_queries import EngineQueries
from jaxserve.server.group_moves import merged_report, mesh_of_each
from jaxserve.server.node_group import group_of_nodes
from jaxserve.server.nodes import Nodes
from jaxserve.server.replica_group import ReplicaGroup, local_group
from jaxserve.server.restarts import Pauses
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo

logger = logging.getLogger(__name__)


@final
class EngineGroups(EngineQueries):
    """What ``EngineClient`` is for one engine, for several of the same model. A request goes to the least busy one.

    Args:
        engine_arguments: Arguments of ``LLM``; ``data_parallel_size`` is the number of groups.
        config: The server's settings.
        replicas: How the groups are started.
        place: Where the nodes that have the processes join this one; None: they are all on this machine.

    Attributes:
        on_change: Called when a group has ended or is ready again, and any is ready.
    """

    def __init__(
        self,
        engine_arguments: Mapping[str, Any],
        config: ServerConfig,
        replicas: ReplicaGroups,
        place: GroupPlace | None = None,
    ):
        self._nodes = None if place is None else Nodes(place, engine_arguments)
        if self._nodes is None:
            self._processes = local_groups(engine_arguments, config, replicas)
        else:
            self._processes = [
                group_of_nodes(number, arguments, config, replicas, self._nodes)
                for number, arguments in enumerate(arguments_of_groups(engine_arguments))
            ]
        self._groups = [each.client for each in self._processes]
        self._num_seqs = [0] * len(self._groups)
        self._restarts = config.restart_engine
        self._supervisors: list[asyncio.Task[None]] = []
        self._is_up, self._is_down = asyncio.Event(), asyncio.Event()
        self._reason = ""
        self._is_moving = False
        self._first: tuple[int, dict[str, str]] | None = None
        self.on_change: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Start all groups; once they have started, wait until any is ready again.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: A process ended by itself.
        """
        if self._supervisors:
            await self._is_up.wait()
            return
        if self._nodes is not None:
            self._nodes.open()
        try:
            async with asyncio.TaskGroup() as starting:
                for index in range(len(self._processes)):
                    starting.create_task(self._start(index))
        except* JaxserveError as errors:
            await self.kill(str(errors.exceptions[0]))
            raise errors.exceptions[0] from None
        self._is_up.set()
        self._supervisors = [asyncio.create_task(self._supervise(index)) for index in range(len(self._groups))]

    async def _start(self, index: int) -> None:
        """Start a group, which must have the same model as the others; only on other nodes it can be another one.

        Raises:
            JaxserveError: It did not start.
        """
        group = self._processes[index]
        await group.start()
        if self._nodes is None:
            return
        files = await group.client.model_files()
        self._first = self._first or (index, files)
        problem = difference([self._first[1], files], [f"group {self._first[0]}", f"group {index}"])
        if problem is not None:
            await group.kill()
            raise ConfigError(problem)

    async def _supervise(self, index: int) -> None:
        """Tell of the ends of a group, and start it again if the engine is to be restarted."""
        group, pauses = self._processes[index], Pauses()
        while True:
            pauses.began()
            self._reason = await group.client.wait_ended()
            logger.error("group %d: the engine process ended: %s", index, self._reason)
            self._note_change()
            await group.wait_others()
            if not self._restarts:
                return
            pause_s = pauses.next_s()
            while not group.client.is_alive:
                await asyncio.sleep(pause_s)
                try:
                    await self._start(index)
                except JaxserveError:
                    logger.exception("group %d: the engine process could not be started again", index)
                    pause_s = pauses.longest_s
            logger.warning("group %d: the engine process was started again", index)
            self._note_change()

    def _note_change(self) -> None:
        if self.is_alive:
            self._is_down.clear()
            self._is_up.set()
            self.on_change()
        else:
            self._is_up.clear()
            self._is_down.set()

    def fail_requests(self, error: Exception) -> None:
        """End every request with an error, after the outputs that have come. No more may follow."""
        for group in self._groups:
            group.fail_requests(error)

    def end_named(self, request_ids: Collection[str], error: Exception) -> None:
        """End requests by their full names with an error, after the outputs that have come."""
        for group in self._groups:
            group.end_named(request_ids, error)

    async def stop(self, drain_s: float, patience_s: float = 10.0) -> None:
        """End all processes, after at most ``drain_s`` seconds for their requests and ``patience_s`` more."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(group.stop(drain_s, patience_s) for group in self._processes))
        if self._nodes is not None:
            self._nodes.close()

    async def kill(self, reason: str = "") -> None:
        """End all processes at once; ``reason`` says why they could not start."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        if self._nodes is not None:
            self._nodes.close(reason)
        await asyncio.gather(*(group.kill() for group in self._processes))

    @property
    def is_alive(self) -> bool:
        """Whether any group is ready."""
        return any(group.is_alive for group in self._groups)

    @property
    def groups_up(self) -> Sequence[bool]:
        """Whether each group is ready."""
        return [group.is_alive for group in self._groups]

    async def wait_ended(self) -> str:
        """Wait until no group is left; return why the last one has ended."""
        await self._is_down.wait()
        return self._reason

    @property
    def info(self) -> EngineInfo:
        """What the groups that are ready run together.

        Raises:
            UnavailableError: None is ready.
        """
        infos = [group.info for group in self._groups if group.is_alive]
        return merged_info(infos) if infos else self._groups[0].info

    def _choose(self) -> int:
        """Return the index of the ready group with the fewest sequences.

        Raises:
            EngineDeadError: None is ready.
        """
        alive = [index for index, group in enumerate(self._groups) if group.is_alive]
        if not alive:
            raise EngineDeadError(f"the engine process ended: {self._reason}")
        return min(alive, key=lambda index: self._num_seqs[index])

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Run a request in the least busy group; see ``EngineClient.generate``."""
        index = self._choose()
        num_seqs = request.params.n
        self._num_seqs[index] += num_seqs
        try:
            async with contextlib.aclosing(self._groups[index].generate(request, is_waiting=is_waiting)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._num_seqs[index] -= num_seqs

    async def render_chat(self, chat: Mapping[str, Any], turn: Turn = SHARED_TURN) -> tuple[str, Sequence[int]]:
        """Return the prompt of a conversation, as text and token ids; ``chat`` as in ``Request``."""
        return await self._groups[self._choose()].render_chat(chat, turn)

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests by their full names; return those that were running or waiting."""
        aborted = await self._of_all(lambda group: group.abort(request_ids))
        return list(itertools.chain(*aborted.values()))

    async def reshard(self, mesh: str | None, layout: str | None) -> dict[str, Any]:
        """Move all groups that are ready, one after the other: each pauses alone, and the others serve.

        Those that are not ready start there.

        Args:
            mesh: The mesh of all groups, with as many data slices as before.
            layout: Name of the layout.

        Raises:
            RequestError: The mesh or layout is invalid for a group, or another reshard is running. Groups before it
                have moved, as the message says.
            EngineDeadError: A move failed, and its group has ended.
        """
        own = mesh_of_each(mesh, len(self._groups))
        self._choose()
        if self._is_moving:
            raise RequestError("another reshard is running")
        self._is_moving, moved = True, dict[int, dict[str, Any]]()
        try:
            for index, group in enumerate(self._groups):
                if not group.is_alive:
                    continue
                try:
                    moved[index] = await group.reshard(own, layout)
                except RequestError as error:
                    if not moved:
                        raise
                    done = ", ".join(map(str, moved))
                    text = f"group {index} did not move: {error}; of the groups, {done} have moved"
                    raise RequestError(text) from error
        finally:
            self._is_moving = False
        if not moved:
            raise EngineDeadError(f"the engine process ended: {self._reason}")
        for group in self._groups:
            if not group.is_alive:
                group.moved = self._groups[min(moved)].moved
        return merged_report(list(moved.values()), len(self._groups))

    async def metrics(self) -> list[Metric]:
        """Return the current metrics of all groups that are ready, each with the group's index as label ``engine``."""
        found = await self._of_all(lambda group: group.metrics())
        labelled = [
            dataclasses.replace(metric, labels={**metric.labels, "engine": str(index)})
            for index, metrics in found.items()
            for metric in metrics
        ]
        order = {metric.name: None for metric in labelled}
        position = {name: number for number, name in enumerate(order)}
        return sorted(labelled, key=lambda metric: position[metric.name])

    async def reset_prefix_cache(self) -> None:
        """Drop all cached pages."""
        await self._of_all(lambda group: group.reset_prefix_cache())

    async def start_profile(self, directory: str) -> None:
        """Start to record a profile of each group, in a folder of its own."""
        await self._of_all(
            lambda group: group.start_profile(os.path.join(directory, f"group-{self._groups.index(group)}"))
        )

    async def stop_profile(self) -> None:
        """Stop the recordings and write the profiles."""
        await self._of_all(lambda group: group.stop_profile())

    async def _of_all(self, call: Callable[[EngineClient], Any]) -> dict[int, Any]:
        """Return what all groups that are ready answer, by index. Those that end meanwhile have no answer.

        Raises:
            JaxserveError: One of them refused; the others have done it.
            EngineDeadError: None is ready.
        """
        self._choose()
        asked = {index: call(group) for index, group in enumerate(self._groups) if group.is_alive}
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
        answers = dict(zip(asked, found, strict=True))
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                raise answer
        answers = {index: each for index, each in answers.items() if not isinstance(each, BaseException)}
        if not answers:
            raise EngineDeadError(f"the engine process ended: {self._reason}")
        return answers

    async def _query(self, method: str, **arguments: Any) -> Any:
        group: EngineQueries = self._groups[self._choose()]
        return await group._query(method, **arguments)


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return what engines of the same model run together."""
    first = infos[0]
    model = type(first.model)()
    model.CopyFrom(first.model)
    for axis in model.mesh:
        if axis.name == "data":
            axis.size = len(infos)
    for info in infos[1:]:
        model.max_num_seqs += info.model.max_num_seqs
        model.max_num_batched_tokens += info.model.max_num_batched_tokens
        for name in ("num_pages", "num_tokens", "max_concurrency", "size_bytes"):
            setattr(model.kv_cache, name, getattr(model.kv_cache, name) + getattr(info.model.kv_cache, name))
    return dataclasses.replace(first, model=model)


def local_groups(
    engine_arguments: Mapping[str, Any], config: ServerConfig, replicas: ReplicaGroups
) -> list[ReplicaGroup]:
    """Return groups whose processes are all on this machine."""
    found = group_arguments(engine_arguments, os.environ, replicas.num_processes)
    return [
        local_group(number, arguments, environments, config, replicas)
        for number, (arguments, environments) in enumerate(found)
    ]


def group_arguments(
    engine_arguments: Mapping[str, Any], environment: Mapping[str, str], num_processes: int = 1
) -> list[tuple[dict[str, Any], list[dict[str, str]]]]:
    """Return the arguments of the engine of each group, and what is added to the environment of each of its processes:
    its own GPUs.

    Args:
        engine_arguments: Those of all.
        environment: Names the GPUs, if not all are to be used.
        num_processes: Number of processes of each group.

    Raises:
        ConfigError: There are too few GPUs, the processes cannot share them, or the mesh is wrong.
    """
    sizes = sizes_of(engine_arguments)
    count, num_devices = sizes["data_parallel_size"], devices_of_replica(sizes)
    check_processes(num_processes, num_devices)
    named = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(count * num_devices)] if named is None else [g for g in named.split(",") if g]
    if gpus and len(gpus) < count * num_devices:
        raise ConfigError(
            f"data_parallel_size={count}: the groups need {count * num_devices} GPUs, but CUDA_VISIBLE_DEVICES names "
            f"{len(gpus)}"
        )
    each = num_devices // num_processes
    parts = [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * each : (number + 1) * each])}
        for number in range(count * num_processes)
    ]
    return [
        (own, parts[index * num_processes : (index + 1) * num_processes])
        for index, own in enumerate(arguments_of_groups(engine_arguments))
    ]
