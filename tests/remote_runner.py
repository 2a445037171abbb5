"""A runner in another process: nothing but pickled plans goes there, nothing but pickled results comes back."""

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.device import batch
from jaxserve.device.build import load_params, plan_engine
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.stage import Stage
from jaxserve.scheduling.plan import StepPlan


class RemoteRunner:
    """A ``Runner`` whose devices another process owns.

    Args:
        config: From which both processes plan the same engine.

    Attributes:
        plans: The plans of every step, as they were sent.
    """

    def __init__(self, config: EngineConfig):
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, config))
        self._process.start()
        other.close()
        self.plans: list[bytes] = []

    def launch(self, plans: Sequence[StepPlan]) -> int:
        """See ``Runner``."""
        self.plans.append(pickle.dumps(plans))
        return self._ask("launch", self.plans[-1])

    def collect(self, handle: int) -> list[StepResult]:
        """See ``Runner``."""
        return self._ask("collect", pickle.dumps(handle))

    def weights(self) -> dict[str, np.ndarray]:
        """See ``Runner``."""
        return self._ask("weights")

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """See ``Runner``."""
        self._ask("set_weights", pickle.dumps(weights))

    def num_buffers(self) -> int:
        """How many buffers were built for the plans so far."""
        return self._ask("num_buffers")

    def reset(self) -> None:
        """See ``Runner``."""
        self._ask("reset")

    def close(self) -> None:
        """See ``Runner``."""
        self._ask("close")
        self._link.close()
        self._process.join(60)
        assert self._process.exitcode == 0

    def _ask(self, method: str, *arguments: bytes) -> Any:
        self._link.send_bytes(pickle.dumps((method, arguments)))
        return pickle.loads(self._link.recv_bytes())


def serve(link: Connection, config: EngineConfig) -> None:
    """Runs what comes until the runner is closed."""
    plan = plan_engine(config)
    (program,) = plan.models
    stage = Stage(program, plan.buckets)
    stage.compile()
    stage.load(load_params(plan, program))
    runner = LocalRunner([stage])
    method = ""
    with mock.patch.object(batch, "build", side_effect=batch.build) as build:
        while method != "close":
            method, arguments = pickle.loads(link.recv_bytes())
            is_count = method == "num_buffers"
            found = build.call_count if is_count else getattr(runner, method)(*map(pickle.loads, arguments))
            link.send_bytes(pickle.dumps(found))
