"""A group whose processes are on several nodes, or on another one than the front end."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxserve.group.ports import PortPair
from jaxserve.group.replicas import ReplicaGroups, secret_of_group
from jaxserve.group.settings import GroupPlace
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_process.spawn import SpawnedEngine
from jaxserve.server.nodes import Node, Nodes
from jaxserve.server.replica_group import OtherProcesses, ReplicaGroup
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

_NONCE_BYTES = 32


@final
class NodeProcesses(OtherProcesses):
    """The processes of a group on other nodes, of which the first one has the engine process unless this one has it.

    Args:
        name: What to call the group.
        ranks: The nodes of the group; number 0 is this one.
        nodes: Those that have joined.
    """

    def __init__(self, name: str, ranks: Sequence[int], nodes: Nodes):
        self._name = name
        self._count = len(ranks)
        self._ranks = [rank for rank in ranks if rank]
        self._nodes = nodes
        self._leader: tuple[Node, float] | None = None
        self._joined: list[Node] = []
        self._resources = contextlib.ExitStack()

    async def start(self) -> GroupPlace | None:
        """Wait for the nodes, and tell them what to run; return where they join, if the engine process is here."""
        self._joined = await self._nodes.take(self._ranks)
        nonce, place, followers = secrets.token_bytes(_NONCE_BYTES), self._nodes.place, self._joined
        if len(self._ranks) == self._count:
            leading, ahead_s = await self._joined[0].lead(nonce)
            self._leader, followers = (self._joined[0], ahead_s), self._joined[1:]
            host, port = leading.host, leading.port
        elif followers:
            ports = PortPair(place.address)
            self._resources.callback(ports.close)
            host, port = place.address, ports.first
        else:
            return None
        for node in followers:
            node.follow(host, port, nonce)
        self.ends = [asyncio.create_task(self._watch(node)) for node in followers]
        if self._leader is not None:
            return None
        return place.in_group(host, port, self._count, 0, secret_of_group(place.secret, nonce))

    async def _watch(self, node: Node) -> str:
        reason = await node.end()
        logger.info("%s: %s", self._name, reason)
        return reason

    async def spawn(self) -> SpawnedEngine:
        """Connect to the engine process on another node."""
        assert self._leader is not None
        node, ahead_s = self._leader
        return await node.open(ahead_s)

    async def end(self, patience_s: float) -> None:
        """Wait for the processes, and let their nodes kill those that have not ended after some seconds."""
        if self.ends:
            await asyncio.wait(self.ends, timeout=patience_s)
        for node in self._joined:
            node.kill()
        if self.ends:
            await asyncio.wait(self.ends)
        self.ends, self._joined, self._leader = (), [], None
        self._resources.close()


def group_of_nodes(
    number: int, arguments: Mapping[str, Any], config: ServerConfig, groups: ReplicaGroups, nodes: Nodes
) -> ReplicaGroup:
    """Return a group over nodes.

    Args:
        number: Index of the group.
        arguments: Arguments of ``LLM``.
        config: The server's settings.
        groups: How the processes are started.
        nodes: Those that have joined.
    """
    name, count = f"group {number}", groups.num_processes
    others = NodeProcesses(name, range(number * count, (number + 1) * count), nodes)
    client = EngineClient(arguments, config, spawn=others.spawn if number else None, group_name=name)
    return ReplicaGroup(name, client, others)
