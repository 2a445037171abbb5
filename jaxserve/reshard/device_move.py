"""The part of one process in a move to another mesh or layout: programs, weights, and cached pages and states."""

import logging
from collections.abc import Sequence
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import EnginePlan
from jaxserve.device.runner import LocalRunner
from jaxserve.device.stage_link import StageLinks
from jaxserve.device.start import join_stages, make_stages, short_switch_interval, warm_up_runners
from jaxserve.device.state_structs import compile_zeros
from jaxserve.reshard.cache_moves import KeptState, PageMove, StateMove
from jaxserve.reshard.cached_contents import CachedContents, CacheTransfer
from jaxserve.reshard.exchange import Exchange
from jaxserve.reshard.move_memory import check_move_memory
from jaxserve.reshard.page_transfer import can_share_pages
from jaxserve.reshard.resident_weights import check_same_parameters, move_weights
from jaxserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


def check_move(old: EnginePlan, new: EnginePlan, utilization: float) -> None:
    """Raise an error unless an engine can move from one plan to another.

    Raises:
        ConfigError: The parameters of the new plan are others.
        MemoryPlanError: The memory does not suffice.
    """
    before, after = old.models[0], new.models[0]
    check_same_parameters(old.replicas[0], new.replicas[0])
    if str(before.policy) != str(after.policy):
        raise ConfigError(
            f"cannot reshard from {before.policy} to {after.policy}: kernels of the new layout need other element "
            "types; start an engine with the new layout instead"
        )
    check_move_memory(old, new, utilization)


class DeviceMove:
    """Compiles the programs of a new plan, then moves what the devices of this process hold to it.

    Args:
        config: The new settings.
        old: The plan of the running engine.
        new: The new plan.
        exchange: Leads to the other processes; None if this one has all devices.
        links: Leads to the processes that have other stages of the new plan; None if this one has all.

    Attributes:
        plan: The new plan.
    """

    def __init__(
        self,
        config: EngineConfig,
        old: EnginePlan,
        new: EnginePlan,
        exchange: Exchange | None = None,
        links: StageLinks | None = None,
    ):
        self.plan = new
        self._warms_up, self._exchange, self._links = config.warm_up, exchange, links
        shares = config.enable_prefix_caching and can_share_pages(old.replicas[0], new.replicas[0])
        self._stages = make_stages(new)
        with short_switch_interval():
            for stage in self._stages:
                stage.compile()
            self._empty_states: list[Any] = [
                compile_zeros(stage.model.abstract_state()) if stage.is_here else None for stage in self._stages
            ]
            self._transfer = CacheTransfer(old, new, shares, exchange)
        self._runners = list[LocalRunner]()
        self._contents = CachedContents([], [], [], [])

    @property
    def num_programs(self) -> int:
        """Number of programs that read and write cached pages and states."""
        return self._transfer.num_programs

    @property
    def temporary_bytes(self) -> int:
        """Peak temporary memory per device over all new steps."""
        return max(stage.temporary_bytes for stage in self._stages)

    def choose(
        self, schedulers: Sequence[Scheduler], utilization: float, num_processes: int = 1
    ) -> tuple[list[list[int]], list[list[KeptState]]]:
        """Return what is kept of the prefix cache; see ``CacheTransfer.choose``."""
        return self._transfer.choose(schedulers, utilization, num_processes)

    def move(
        self, runners: Sequence[Any], pages: Sequence[Sequence[int]], states: Sequence[Sequence[int]]
    ) -> tuple[list[LocalRunner], float]:
        """Replace the old runners, which are those of this process; see ``Mover``."""
        self._contents = self._transfer.read(runners, pages, states)
        held = [runner.release() for runner in runners]
        params = move_weights(held, self.plan.replicas, self._exchange)
        empty = [None if empty_state is None else empty_state() for empty_state in self._empty_states]
        self._runners = join_stages(
            self.plan, self._stages, [each for stages in params for each in stages], empty, self._links
        )
        return self._runners, warm_up_runners(self._runners) if self._warms_up else 0.0

    def write(self, moves: Sequence[Sequence[PageMove]], state_moves: Sequence[Sequence[StateMove]]) -> None:
        """Write cached pages and states to the arrays of each new scheduler."""
        self._transfer.write(self._runners, self._contents, moves, state_moves)
        self._contents = CachedContents([], [], [], [])
