"""A group moves to another mesh or layout of its processes: the part of process 0.

All processes plan and compile while steps go on. Then each moves what its devices hold, in the same order: weights and
cached pages go directly from the process that has them to those that need them, over connections of their own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, JaxserveError
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.runner_interface import Runner
from jaxserve.group.differences import difference, least
from jaxserve.group.facts import agreed_plan, plan_facts
from jaxserve.group.group_runner import GroupRunner
from jaxserve.group.leader import Leader
from jaxserve.group.members import Member
from jaxserve.group.messages import (
    Addresses,
    Dismiss,
    Move,
    MoveAgreed,
    Moved,
    MoveFacts,
    Prepare,
    Prepared,
    Settle,
    Write,
)
from jaxserve.group.peers import Peers
from jaxserve.reshard.cache_moves import KeptState, PageMove, StateMove
from jaxserve.reshard.device_move import DeviceMove, check_move
from jaxserve.reshard.exchange import Exchange
from jaxserve.scheduling.scheduler import Scheduler

_Answer = TypeVar("_Answer", MoveFacts, Prepared, Moved)


def prepare_group_move(
    leader: Leader, old: EnginePlan, config: EngineConfig, changes: dict[str, Any]
) -> tuple[EnginePlan, "GroupMove"]:
    """Plan and compile a move in all processes; return the plan, and what makes the move.

    Args:
        leader: The connections to the followers.
        old: The plan of the running engine.
        config: The new settings.
        changes: Those that differ.

    Raises:
        ConfigError: The change is not valid, or a process cannot make it.
        MeshError: The processes cannot share the mesh, or have too few devices.
        MemoryPlanError: The memory does not suffice.
    """
    layout = changes.get("layout")
    if layout is not None and not isinstance(layout, str):
        raise ConfigError(
            f"layout: an engine in {leader.place.count} processes moves to a layout that all can find by its name, got "
            f"an object of {type(layout).__name__}"
        )
    processes = dataclasses.replace(leader.processes, has_slices=True)
    own = plan_engine(config, old.config, processes)
    check_move(old, own, config.gpu_memory_utilization)
    number = leader.next_move()
    peers = Peers(leader.place, leader.place.address, leader.fail)
    leader.set_preparing(True)
    try:
        leader.send_all(Prepare(number, changes))
        plan = agreed_plan(config, own, _agree(leader, number, own, peers), processes)
        move = DeviceMove(config, old, plan, Exchange(0, peers), peers if plan.num_stages > 1 else None)
        for member in leader.members:
            _answer(member, Prepared, number)
    except BaseException:
        leader.send_all(Dismiss(number))
        peers.close()
        raise
    finally:
        leader.set_preparing(False)
    return plan, GroupMove(leader, move, peers, number)


def _agree(leader: Leader, number: int, own: EnginePlan, peers: Peers) -> dict[str, int]:
    """Compare the plans of all processes, and connect them to each other; return the numbers that all use."""
    answers = [_answer(member, MoveFacts, number) for member in leader.members]
    facts = [plan_facts(own), *(each.values for each in answers)]
    problem = difference(facts, leader.names)
    if problem is not None:
        raise ConfigError(problem)
    numbers, address = least(facts), peers.address
    hosts, ports = [address.host, *(each.host for each in answers)], [address.port, *(each.port for each in answers)]
    leader.send_all(MoveAgreed(number, numbers, hosts, ports))
    peers.connect(Addresses(hosts, ports), range(1, leader.place.count))
    return numbers


def _answer(member: Member, kind: type[_Answer], number: int) -> _Answer:
    """Wait for a follower's answer about a move; those about moves that were given up are ignored.

    Raises:
        ConfigError: It cannot make the move.
        JaxserveError: It failed.
    """
    while True:
        found = member.moves.get()
        if isinstance(found, JaxserveError):
            raise found
        if found.number != number:
            continue
        if isinstance(found, Prepared) and found.error:
            raise ConfigError(f"{member.name}: {found.error}")
        assert isinstance(found, kind), f"{member.name} sent {type(found).__name__} in place of {kind.__name__}"
        return found


class GroupMove:
    """A prepared move of all processes (see ``Mover``).

    Args:
        leader: The connections to the followers, which are prepared.
        own: The part of this process.
        peers: The connections over which weights and pages go, and then what stages hand over.
        number: Number of the move.
    """

    def __init__(self, leader: Leader, own: DeviceMove, peers: Peers, number: int):
        self._leader = leader
        self._own = own
        self._peers = peers
        self._number = number
        self._runners: Sequence[GroupRunner] = ()

    @property
    def num_programs(self) -> int:
        """See ``Mover``."""
        return self._own.num_programs

    @property
    def temporary_bytes(self) -> int:
        """See ``Mover``."""
        return self._own.temporary_bytes

    def choose(
        self, schedulers: Sequence[Scheduler], utilization: float
    ) -> tuple[list[list[int]], list[list[KeptState]]]:
        """See ``Mover``."""
        return self._own.choose(schedulers, utilization, self._leader.place.count)

    def move(
        self, runners: Sequence[Runner], pages: Sequence[Sequence[int]], states: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Runner], float]:
        """See ``Mover``."""
        old = [runner for runner in runners if isinstance(runner, GroupRunner)]
        assert len(old) == len(runners), "a data slice runs outside the group"
        self._leader.send_all(Move(self._number, [list(each) for each in pages], [list(each) for each in states]))
        with old[0].failing():
            moved, warm_up_s = self._own.move([runner.release() for runner in old], pages, states)
        self._runners = old[0].replaced(moved, self._own.plan)
        return self._runners, warm_up_s

    def write(self, moves: Sequence[Sequence[PageMove]], state_moves: Sequence[Sequence[StateMove]]) -> None:
        """See ``Mover``; returns once all processes have moved."""
        written = (
            [[list(move) for move in lane] for lane in moves],
            [[list(move) for move in lane] for lane in state_moves],
        )
        self._leader.send_all(Write(*written))
        with self._runners[0].failing():
            self._own.write(moves, state_moves)
            for member in self._leader.members:
                _answer(member, Moved, self._number)
        self._leader.send_all(Settle())
        self._leader.use_peers(self._peers, self._own.plan.num_stages > 1)
