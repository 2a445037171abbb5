"""Copy what the prefix cache of an engine holds, pages and states, to an engine that replaces it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.device.build import EnginePlan
from jaxserve.device.runner import LocalRunner
from jaxserve.reshard.cache_moves import KeptState, PageMove, StateMove, best_states, newest_pages
from jaxserve.reshard.exchange import Exchange
from jaxserve.reshard.move_memory import host_room
from jaxserve.reshard.page_transfer import HostPages, PageReader, PageWrite, PageWriter, page_bytes, receivers_of
from jaxserve.reshard.state_transfer import (
    HostStates,
    StateReader,
    StateWrite,
    StateWriter,
    has_states,
    receivers_of_states,
    state_bytes,
)
from jaxserve.scheduling.scheduler import Scheduler


class CachedContents(NamedTuple):
    """Copies of what the prefix cache of each old scheduler holds.

    Attributes:
        pages: The pages.
        page_copies: Their contents; empty if none are moved.
        states: The state pages.
        state_copies: Their states.
    """

    pages: Sequence[Sequence[int]]
    page_copies: list[HostPages]
    states: Sequence[Sequence[int]]
    state_copies: list[HostStates]


class CacheTransfer:
    """Compiled programs that read the cached pages and states of an engine, and write them to another one.

    Args:
        old: Plan of the old engine.
        new: Plan of the new one.
        shares: Whether the new engine can use what the old one has cached.
        exchange: Leads to the other processes; None if this one has all devices.
    """

    def __init__(self, old: EnginePlan, new: EnginePlan, shares: bool, exchange: Exchange | None = None):
        self._old, self._new, self._shares = old, new, shares
        pages = None if exchange is None else receivers_of(new.models)
        states = None if exchange is None else receivers_of_states(new.models)
        self._readers = [PageReader(sharded, exchange, pages) for sharded in old.models] if shares else []
        self._writers = [PageWriter(sharded) for sharded in new.models] if shares else []
        self._state_readers = [
            StateReader(each, exchange, states) if has_states(each) else None for each in old.models if shares
        ]
        self._state_writers = [StateWriter(each) if has_states(each) else None for each in new.models if shares]

    @property
    def num_programs(self) -> int:
        """Number of compiled programs."""
        states = sum(each is not None for each in (*self._state_readers, *self._state_writers))
        return sum(each.num_programs for each in (*self._readers, *self._writers)) + states

    def choose(
        self, schedulers: Sequence[Scheduler], utilization: float, num_processes: int = 1
    ) -> tuple[list[list[int]], list[list[KeptState]]]:
        """Return the cached pages of each scheduler, the most recently used first, and the checkpoints, those to keep
        longest first, as far as the host has room for copies.

        Args:
            schedulers: The old schedulers, in which no sequence runs.
            utilization: Share of the host's memory that may be used.
            num_processes: Number of processes that may keep copies of the same pages.
        """
        room = host_room(self._old, self._new, utilization, num_processes) if self._shares else 0
        stages = self._old.replicas[0]
        size = sum(map(state_bytes, filter(has_states, stages)))
        states = best_states(schedulers, room // 2 // size if size else 0)
        room -= size * sum(map(len, states))
        return newest_pages(schedulers, room // max(1, sum(map(page_bytes, stages)))), states

    def read(
        self, runners: Sequence[LocalRunner], pages: Sequence[Sequence[int]], states: Sequence[Sequence[int]]
    ) -> CachedContents:
        """Copy pages and states of each old scheduler to the host.

        Args:
            runners: The old runners, whose lanes the schedulers are in turn.
            pages: The pages of each scheduler.
            states: The state pages of each.
        """
        page_copies, state_copies = list[HostPages](), list[HostStates]()
        readers = zip(self._readers, self._state_readers, strict=True)
        num_lanes = len(pages) // len(runners)
        for first, runner in zip(range(0, len(pages), num_lanes), runners if self._shares else (), strict=False):
            lanes, part = [(HostPages(), HostStates()) for _ in range(num_lanes)], slice(first, first + num_lanes)
            for arrays in runner.pools:
                reader, state_reader = next(readers)
                for (lane, _), found in zip(lanes, reader.read(arrays, pages[part]), strict=True):
                    lane |= found
                copies = state_reader.read(arrays, states[part]) if state_reader else ()
                for (_, lane), found in zip(lanes, copies, strict=False):
                    lane |= found
            page_copies += [lane for lane, _ in lanes]
            state_copies += [lane for _, lane in lanes]
        return CachedContents(pages, page_copies, states, state_copies)

    def write(
        self,
        runners: Sequence[LocalRunner],
        contents: CachedContents,
        moves: Sequence[Sequence[PageMove]],
        state_moves: Sequence[Sequence[StateMove]],
    ) -> None:
        """Write copies of pages and states to the arrays of the new lanes."""
        if not self._shares:
            return
        indices = [{page: index for index, page in enumerate(each)} for each in contents.pages]
        own = [{page: index for index, page in enumerate(each)} for each in contents.states]
        copies, states = contents.page_copies, contents.state_copies
        writes = [[PageWrite(copies[m.lane], indices[m.lane][m.source], m.target, m.table) for m in e] for e in moves]
        own_writes = [[StateWrite(states[m.lane], own[m.lane][m.source], m.target) for m in e] for e in state_moves]
        num_lanes, writers = len(moves) // len(runners), zip(self._writers, self._state_writers, strict=True)
        for number, runner in enumerate(runners):
            part, written = slice(number * num_lanes, (number + 1) * num_lanes), []
            for arrays in runner.pools:
                writer, state_writer = next(writers)
                arrays = writer.write(arrays, writes[part])
                written.append(state_writer.write(arrays, own_writes[part]) if state_writer else arrays)
            runner.pools = written
