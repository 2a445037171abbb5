"""Compile, load and join the stages of a planned engine, and run their programs once."""

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from jaxserve.api.errors import MemoryPlanError
from jaxserve.device.build import EnginePlan, load_params
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import Runner
from jaxserve.device.stage import Stage
from jaxserve.device.stage_link import StageLinks
from jaxserve.device.step_state import StepState


def make_runners(plan: EnginePlan, links: StageLinks | None = None) -> tuple[list[LocalRunner], int, float, float]:
    """Compile and load weights in parallel; return the runners, the temporary bytes of their programs, and the seconds
    each took.

    Args:
        plan: The plan of the engine.
        links: Leads to the processes that have stages of it; None if this one has all.
    """
    stages = make_stages(plan)

    def compile_all() -> float:
        start = time.monotonic()
        for stage in stages:
            stage.compile()
        return time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(1) as background, short_switch_interval():
        compiling = background.submit(compile_all)
        start = time.monotonic()
        params = [load_params(plan, stage.model) if stage.is_here else () for stage in stages]
        load_s = time.monotonic() - start
        compile_s = compiling.result()
    runners = join_stages(plan, stages, params, [None for _ in stages], links)
    return runners, max(stage.temporary_bytes for stage in stages), load_s, compile_s


def make_stages(plan: EnginePlan) -> list[Stage]:
    """Return the stages of a plan, not compiled yet: those of a replica one after the other."""
    return [Stage(sharded, plan.buckets) for sharded in plan.models]


def join_stages(
    plan: EnginePlan,
    stages: list[Stage],
    params: list[tuple[jax.Array, ...]],
    states: Sequence[StepState | None],
    links: StageLinks | None = None,
) -> list[LocalRunner]:
    """Load compiled stages, and return a runner for those of each replica.

    Args:
        plan: The plan of the stages.
        stages: Compiled stages, those of a replica one after the other.
        params: Packed parameters of each.
        states: State of each; None allocates it.
        links: Leads to the processes that have stages of them; None if this one has all.
    """
    for stage, values, state in zip(stages, params, states, strict=True):
        stage.load(values, state)
    firsts = range(0, len(stages), plan.num_stages)
    return [
        LocalRunner(stages[first : first + plan.num_stages], None if links is None else links.of_slice(index))
        for index, first in enumerate(firsts)
    ]


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Set Python's thread switch interval to 0.5 ms instead of 5 ms.

    Loading weights reacquires the GIL after every 2 MiB, while tracing holds it for the whole interval: the default
    slows loading down tenfold.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def warm_up_runners(runners: Sequence[Runner]) -> float:
    """Run every program once, on one replica after the other; return the seconds it took.

    All processes launch programs in one order, which threads would not keep.

    Raises:
        MemoryPlanError: A device ran out of memory.
    """
    start = time.monotonic()
    try:
        for runner in runners:
            runner.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryPlanError(
            "a device ran out of memory when the steps first ran: use a smaller max_num_batched_tokens, or fewer KV "
            f"pages (kv_cache_memory_bytes, num_gpu_blocks_override): {str(error).splitlines()[0]}"
        ) from error
    return time.monotonic() - start
