"""Move a running engine to another mesh or layout between two steps.

Plans are checked and programs compiled while the engine serves. Then the steps in flight complete, every running
sequence is requeued as if preempted, and weights, and pages and states of the prefix cache move. Requests keep their
state on the host, so they continue with the same tokens; what they lose is at most a page each of computed keys and
values, if the prefix cache is on.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import MESH_FIELDS, parse_mesh
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.memory import MemoryLedger, return_freed_memory
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import Runner
from jaxserve.device.stage import num_programs
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import (
    PROCESS_LINE,
    StartedEngine,
    log_choices,
    make_ledger,
    make_replicas,
)
from jaxserve.group.moving import prepare_group_move
from jaxserve.reshard.cache_moves import KeptState, PageMove, StateMove, move_cache, move_states
from jaxserve.reshard.device_move import DeviceMove, check_move
from jaxserve.reshard.move_memory import check_move_memory
from jaxserve.reshard.page_transfer import page_bytes
from jaxserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

Call = Callable[[Callable[[], Any]], Any]
"""Calls a function on the thread of an engine's steps, between two steps, and returns its result."""
Deliver = Callable[[list[RequestState]], object]
"""Receives, on that thread, the requests that the last steps before a move changed."""
_MOVED = ("mesh", *MESH_FIELDS.values(), "stage_layers", "layout", "enable_expert_parallel", "compile_sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """What a change of mesh or layout did, and how long it took.

    Attributes:
        from_mesh: Old size of each mesh axis.
        to_mesh: New size of each mesh axis.
        from_layout: Name of the old layout.
        to_layout: Name of the new layout.
        num_programs: Number of programs compiled.
        compile_s: Seconds spent planning, tracing and compiling, while the engine went on.
        pause_s: Seconds without a step: the sum of ``drain_s``, ``move_s`` and ``warm_up_s``.
        drain_s: Seconds until the steps in flight were complete.
        move_s: Seconds spent moving pages and weights.
        warm_up_s: Seconds spent running every new program once.
        weight_bytes: Bytes of the weights on all new devices.
        page_bytes: Bytes of the cached pages written to all new devices.
        num_pages: Cached pages that a new prefix cache has.
        num_cached_pages: Cached pages before; those that are not moved had no room, or had the content of others.
        num_requeued: Running sequences that were requeued.
        num_recomputed_tokens: Tokens of them whose keys and values are computed again, at most.
        num_states: States of recurrent layers that a new prefix cache has.
        num_cached_states: Such states before.
    """

    from_mesh: dict[str, int]
    to_mesh: dict[str, int]
    from_layout: str
    to_layout: str
    num_programs: int
    compile_s: float
    pause_s: float
    drain_s: float
    move_s: float
    warm_up_s: float
    weight_bytes: int
    page_bytes: int
    num_pages: int
    num_cached_pages: int
    num_requeued: int
    num_recomputed_tokens: int
    num_states: int = 0
    num_cached_states: int = 0

    def __str__(self) -> str:
        meshes = (" ".join(f"{axis}={size}" for axis, size in mesh.items()) for mesh in (self.from_mesh, self.to_mesh))
        old, new = meshes
        states = f" and {self.num_states} of {self.num_cached_states} states" if self.num_cached_states else ""
        return (
            f"resharded from mesh {old}, layout {self.from_layout} to mesh {new}, layout {self.to_layout}: paused "
            f"{self.pause_s:.3f} s (drain {self.drain_s:.3f}, move {self.move_s:.3f}, warm-up {self.warm_up_s:.3f}) "
            f"after compiling {self.num_programs} programs in {self.compile_s:.2f} s; moved "
            f"{self.weight_bytes / 1e6:.1f} MB of weights and {self.num_pages} of {self.num_cached_pages} cached "
            f"pages{states}, requeued {self.num_requeued} sequences to recompute at most "
            f"{self.num_recomputed_tokens} tokens"
        )


class Mover(Protocol):
    """Moves what the devices of an engine hold."""

    @property
    def num_programs(self) -> int:
        """Number of programs that read and write cached pages and states."""
        ...

    @property
    def temporary_bytes(self) -> int:
        """Peak temporary memory per device over all new steps."""
        ...

    def choose(
        self, schedulers: Sequence[Scheduler], utilization: float
    ) -> tuple[list[list[int]], list[list[KeptState]]]:
        """Return what is kept of the prefix cache; see ``CacheTransfer.choose``."""
        ...

    def move(
        self, runners: Sequence[Runner], pages: Sequence[Sequence[int]], states: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Runner], float]:
        """Replace the old runners, in which no step is in flight; return the new ones, with the weights, and the
        seconds that running every program once took.

        Args:
            runners: The old runners, which cannot be used afterwards.
            pages: The cached pages of each old scheduler that ``write`` will be given.
            states: The state pages likewise.
        """
        ...

    def write(self, moves: Sequence[Sequence[PageMove]], state_moves: Sequence[Sequence[StateMove]]) -> None:
        """Write cached pages and states to the arrays of each new scheduler."""
        ...


class PreparedReshard:
    """A planned and compiled change of mesh or layout, which ``switch`` makes.

    Args:
        started: The running engine.
        config: The new settings.
        plan: The new plan.
        mover: Its programs.
    """

    def __init__(self, started: StartedEngine, config: EngineConfig, plan: EnginePlan, mover: Mover):
        self._started = started
        self._config = config
        self._plan = plan
        self._mover = mover

    @property
    def num_programs(self) -> int:
        """Number of compiled programs."""
        plan, sharded = self._plan, self._plan.models[0]
        platform = sharded.mesh.devices.flat[0].platform
        drafters = [sharded.drafter.sharded for sharded in plan.models if sharded.drafter is not None]
        steps = num_programs(plan.buckets, platform, sharded.is_always_full, plan.num_stages, plan.models[-1])
        own = len(plan.models)  # zeros, and copies of pages
        own += sum(len({*sharded.kv_layout.pools}) for sharded in (*plan.models, *drafters))
        own += sum(any(each.state_specs) for each in plan.models)
        return len(plan.replicas) * (steps + 1) + own + self._mover.num_programs

    def switch(self, deliver: Deliver, compile_s: float) -> tuple[StartedEngine, ReshardReport]:
        """Move the engine; call it on the thread of its steps.

        Args:
            deliver: See ``Deliver``.
            compile_s: Seconds that the preparation took, for the report.

        Returns:
            The engine with its new plan, and what was done.

        Raises:
            MemoryPlanError: The memory does not suffice; nothing has changed.
            EngineDeadError: A step or the move failed; the engine has stopped.
        """
        engine, old_plan, start_s = self._started.engine, self._started.plan, time.monotonic()
        check_move_memory(old_plan, self._plan, self._config.gpu_memory_utilization)
        with engine.fatal_errors():
            deliver(engine.drain())
            drain_s = time.monotonic() - start_s
            moved = self._move(engine)
        pause_s = time.monotonic() - start_s
        report = ReshardReport(
            from_mesh=old_plan.mesh_sizes,
            to_mesh=self._plan.mesh_sizes,
            from_layout=old_plan.models[0].layout.name,
            to_layout=self._plan.models[0].layout.name,
            num_programs=self.num_programs,
            compile_s=compile_s,
            pause_s=pause_s,
            drain_s=drain_s,
            move_s=pause_s - drain_s - moved.warm_up_s,
            **moved._asdict(),
        )
        logger.info("%s", report)
        return dataclasses.replace(self._started, plan=self._plan, ledger=self._make_ledger()), report

    def _move(self, engine: Engine) -> "_Moved":
        """Requeue all sequences, and replace the engine's replicas by new ones with the old weights and pages."""
        old = [scheduler for replica in engine.replicas for scheduler in replica.schedulers]
        running = [(sequence, sequence.num_computed) for scheduler in old for sequence in scheduler.running]
        for scheduler in old:
            scheduler.requeue_all()
        num_cached = sum(len(scheduler.allocator.cached_pages) for scheduler in old)
        num_cached_states = sum(scheduler.pages.num_states for scheduler in old)
        pages, kept = self._mover.choose(old, self._config.gpu_memory_utilization)
        states = [[checkpoint.page for checkpoint, _ in each] for each in kept]
        runners, warm_up_s = self._mover.move([replica.runner for replica in engine.replicas], pages, states)
        replicas = make_replicas(self._config, self._plan, runners)
        new = [scheduler for replica in replicas for scheduler in replica.schedulers]
        moves, state_moves = move_cache(old, new, pages), move_states(new, kept)
        self._mover.write(moves, state_moves)
        engine.replace_replicas(replicas)
        lanes = {sequence: scheduler for scheduler in new for sequence in scheduler.waiting}
        lost = [n - lanes[s].pages.num_cached_tokens(s) for s, n in running if s.finish_reason is None]
        return _Moved(
            warm_up_s=warm_up_s,
            weight_bytes=sum(sharded.weight_bytes * sharded.mesh.devices.size for sharded in self._plan.models),
            page_bytes=sum(map(len, moves)) * sum(map(page_bytes, self._plan.replicas[0])),
            num_pages=len({(move.lane, move.source) for each in moves for move in each}),
            num_cached_pages=num_cached,
            num_requeued=len(running),
            num_recomputed_tokens=sum(max(0, each) for each in lost),
            num_states=len({(move.lane, move.source) for each in state_moves for move in each}),
            num_cached_states=num_cached_states,
        )

    def _make_ledger(self) -> MemoryLedger:
        """Return the memory use of a device of the new mesh."""
        before = dict(self._started.ledger.lines).get(PROCESS_LINE, 0)
        return make_ledger(self._config, self._plan, self._mover.temporary_bytes, before)


class _Moved(NamedTuple):
    """Fields of the report that the move sets."""

    warm_up_s: float
    weight_bytes: int
    page_bytes: int
    num_pages: int
    num_cached_pages: int
    num_requeued: int
    num_recomputed_tokens: int
    num_states: int
    num_cached_states: int


class Resharder:
    """Changes the mesh and the layout of an engine, one change at a time.

    Attributes:
        config: The engine's current settings.
        started: The engine with its current plan.

    Args:
        config: The engine's settings.
        started: The engine.
        given: The settings before any change, if it was started with those of one (see ``moved``).
    """

    def __init__(self, config: EngineConfig, started: StartedEngine, given: EngineConfig | None = None):
        self.config = config
        self.started = started
        self._compile_sizes = (given or config).compile_sizes
        self._lock = threading.Lock()

    def reshard(
        self,
        mesh: str | None,
        layout: Any,
        call: Call = lambda function: function(),
        deliver: Deliver = lambda changed: None,
    ) -> ReshardReport:
        """Move the engine to another mesh or layout. Blocks until it has moved.

        Args:
            mesh: Devices along each axis, as in ``EngineConfig``; None keeps the mesh.
            layout: The layout, as in ``EngineConfig``; None keeps it.
            call: See ``Call``; by default the caller is the thread of the steps.
            deliver: See ``Deliver``.

        Raises:
            ConfigError: The mesh or layout is not valid for the model or the engine, or another change is in progress.
            MeshError: There are too few devices.
            LayoutError: The layout is unknown, or contradicts itself.
            MemoryPlanError: The weights, or the KV pages of one request, do not fit, or not during the move.
            EngineDeadError: The move failed, and the engine has stopped.
        """
        if not self._lock.acquire(blocking=False):
            raise ConfigError("a change of mesh or layout is in progress; retry when it is complete")
        try:
            start_s = time.monotonic()
            changes = self._changes(mesh, layout)
            config = dataclasses.replace(self.config, **changes)
            prepared = prepare_reshard(self.started, config, changes)
            compile_s = time.monotonic() - start_s

            def switch() -> ReshardReport:
                self.started, report = prepared.switch(deliver, compile_s)
                self.config = config
                return report

            return call(switch)
        finally:
            self._lock.release()
            return_freed_memory()

    @property
    def moved(self) -> dict[str, Any]:
        """The settings that changes may set, as they are now: an engine that starts with them is where this one is."""
        return {name: getattr(self.config, name) for name in _MOVED}

    def _changes(self, mesh: str | None, layout: Any) -> dict[str, Any]:
        """Return the settings that change with the mesh or layout, and the sizes that requests rely on."""
        plan, config = self.started.plan, self.config
        changes: dict[str, Any] = {"max_model_len": plan.max_model_len}
        if mesh is not None:
            changes |= {"mesh": mesh, **parse_mesh(mesh, {})}
            if changes["pipeline_parallel_size"] != config.pipeline_parallel_size:
                changes["stage_layers"] = None
        if layout is not None:
            changes |= {"layout": layout, "enable_expert_parallel": False}
        if self._compile_sizes is not None and "decode" in self._compile_sizes:
            num_stages = changes.get("pipeline_parallel_size", config.pipeline_parallel_size)
            rows = -(-plan.max_num_seqs // num_stages)  # of a step; the stages share the sequences
            decode = sorted({min(size, rows) for size in self._compile_sizes["decode"]})
            changes["compile_sizes"] = {**self._compile_sizes, "decode": decode}
        return changes


def prepare_reshard(started: StartedEngine, config: EngineConfig, changes: dict[str, Any]) -> PreparedReshard:
    """Plan and check a change to other settings, and compile its programs, while the engine serves.

    Args:
        started: The running engine.
        config: The new settings.
        changes: Those that differ.
    """
    old = started.plan
    if started.leader is None:
        for replica in started.engine.replicas:
            if not isinstance(replica.runner, LocalRunner):
                name = type(replica.runner).__name__
                raise ConfigError(f"cannot reshard an engine whose steps run in another process ({name})")
        plan = plan_engine(config, old.config)
        check_move(old, plan, config.gpu_memory_utilization)
        log_choices(plan)
        return PreparedReshard(started, config, plan, DeviceMove(config, old, plan))
    plan, mover = prepare_group_move(started.leader, old, config, changes)
    log_choices(plan)
    return PreparedReshard(started, config, plan, mover)
