"""Runs single steps, and reads and changes the weights of a ``LocalRunner``."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxserve.api.config import EngineConfig
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.device.stage import Stage
from jaxserve.scheduling.plan import StepPlan


def run_step(runner: Runner, plan: StepPlan) -> StepResult:
    """The result of a step of one lane, with no other in flight."""
    runner.launch([plan])
    return runner.collect()[0]


def weights_of(runner: Runner) -> dict[str, np.ndarray]:
    """Copies of the parameters by path in the whole model."""
    assert isinstance(runner, LocalRunner)
    found = dict[str, np.ndarray]()
    for stage in runner._stages:
        arrays = stage.model.packing.unpack([np.array(array) for array in stage.params])
        found |= zip(_names(stage), arrays, strict=True)
    return found


def set_weights(runner: LocalRunner, weights: Mapping[str, np.ndarray]) -> None:
    """Replaces the named parameters, on CPUs, where none are stacked."""
    for stage in runner._stages:
        named = zip(_names(stage), stage.params, strict=True)
        stage.params = tuple(jax.device_put(weights.get(name, old), old.sharding) for name, old in named)


def _names(stage: Stage) -> list[str]:
    return [stage.model.whole_path(path) for path in stage.model.abstract_model.params]


def plan_of_demo() -> EnginePlan:
    """A plan of the demo model on one device."""
    return plan_engine(EngineConfig(model="demo", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64))
