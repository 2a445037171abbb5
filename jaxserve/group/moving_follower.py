"""A group moves to another mesh or layout of its processes: the part of a follower."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Sequence
from typing import NoReturn, Protocol

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import JaxserveError
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.runner import LocalRunner
from jaxserve.group.facts import agreed_plan, plan_facts
from jaxserve.group.messages import (
    Addresses,
    Dismiss,
    Move,
    MoveAgreed,
    Moved,
    MoveFacts,
    Prepare,
    Prepared,
    ToLeader,
    Write,
)
from jaxserve.group.peers import Peers, after_move
from jaxserve.group.settings import GroupPlace
from jaxserve.reshard.cache_moves import PageMove, StateMove
from jaxserve.reshard.device_move import DeviceMove, check_move
from jaxserve.reshard.exchange import Exchange
from sharding.processes import Processes

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The connection to process 0 as a move needs it."""

    is_preparing: bool

    @property
    def own_address(self) -> str:
        """Address of this machine at which process 0 sees it."""
        ...

    def send(self, message: ToLeader) -> None:
        """Send a message."""
        ...

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the leader that this process has failed, and end it."""
        ...


class FollowerMoves:
    """Prepares moves on threads of their own, and makes them.

    Attributes:
        plan: The plan of the running engine.

    Args:
        link: The connection to process 0.
        place: The place of this process in the group.
        processes: The processes of the group.
        config: The settings of the running engine.
        plan: Its plan.
        peers: The connections over which its stages hand over; None without stages.
    """

    def __init__(
        self,
        link: Link,
        place: GroupPlace,
        processes: Processes,
        config: EngineConfig,
        plan: EnginePlan,
        peers: Peers | None,
    ):
        self.plan = plan
        self._link, self._place, self._processes = link, place, processes
        self._config, self._peers = config, peers
        self._prepared: _Preparation | None = None

    def prepare(self, message: Prepare | MoveAgreed | Dismiss) -> None:
        """Begin to prepare a move, go on with it, or give it up."""
        if isinstance(message, Prepare):
            config = dataclasses.replace(self._config, **message.changes)
            self._link.is_preparing = True
            self._prepared = _Preparation(self._link, self._place, self._processes, config, self.plan, message.number)
            threading.Thread(target=self._prepared.run, name="jaxserve-prepare", daemon=True).start()
        elif self._prepared is not None and self._prepared.number == message.number:
            self._prepared.inbox.put(message)
            if isinstance(message, Dismiss):
                self._prepared = None

    def move(self, runners: Sequence[LocalRunner], message: Move) -> Sequence[LocalRunner]:
        """Replace the runners of all data slices, in which no step is in flight; return the new ones."""
        assert self._prepared is not None and self._prepared.move is not None, "the move is not prepared"
        moved, _ = self._prepared.move.move(runners, message.pages, message.states)
        self.plan, self._config = self._prepared.move.plan, self._prepared.config
        return moved

    def write(self, message: Write) -> None:
        """Write cached pages and states."""
        assert self._prepared is not None and self._prepared.move is not None, "the move is not prepared"
        moves = [[PageMove(*each) for each in lane] for lane in message.moves]
        self._prepared.move.write(moves, [[StateMove(*each) for each in lane] for lane in message.state_moves])
        self._link.send(Moved(self._prepared.number))

    def settle(self) -> None:
        """Close the connections that are not needed anymore, as all processes have moved."""
        assert self._prepared is not None
        self._peers = after_move(self._peers, self._prepared.peers, self.plan.num_stages > 1)
        self._prepared = None


class _Preparation:
    """A move that is being prepared.

    Attributes:
        number: Its number.
        config: The new settings.
        inbox: What process 0 says of it.
        peers: The connections over which weights and pages go.
        move: Its programs, once they are compiled.
    """

    def __init__(
        self,
        link: Link,
        place: GroupPlace,
        processes: Processes,
        config: EngineConfig,
        old: EnginePlan,
        number: int,
    ):
        self.number = number
        self.config = config
        self.inbox: queue.SimpleQueue[MoveAgreed | Dismiss] = queue.SimpleQueue()
        self.peers = Peers(place, link.own_address, link.fail)
        self.move: DeviceMove | None = None
        self._link, self._place, self._processes, self._old = link, place, processes, old

    def run(self) -> None:
        """Plan, agree with the other processes, connect to them, and compile."""
        try:
            if not self._has_prepared():
                self.peers.close()
        except (JaxserveError, ValueError) as error:  # such as MeshError; process 0 refuses the move
            self._link.send(Prepared(self.number, str(error)))
            self.peers.close()
        except BaseException as error:
            self._link.fail(error)
        finally:
            self._link.is_preparing = False

    def _has_prepared(self) -> bool:
        """Prepare; return whether process 0 has not given the move up in the meantime."""
        processes = dataclasses.replace(self._processes, has_slices=True)
        plan = plan_engine(self.config, self._old.config, processes)
        check_move(self._old, plan, self.config.gpu_memory_utilization)
        address = self.peers.address
        self._link.send(MoveFacts(self.number, plan_facts(plan), address.host, address.port))
        agreed = self.inbox.get()
        if isinstance(agreed, Dismiss):
            return False
        plan = agreed_plan(self.config, plan, agreed.values, processes)
        others = [rank for rank in range(self._place.count) if rank != self._place.rank]
        self.peers.connect(Addresses(agreed.hosts, agreed.ports), others)
        link = self.peers if plan.num_stages > 1 else None
        self.move = DeviceMove(self.config, self._old, plan, Exchange(self._place.rank, self.peers), link)
        self._link.send(Prepared(self.number, ""))
        return self.inbox.empty()
