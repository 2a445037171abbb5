"""A runner in another process: plans go there as bytes of ``plan_codec``, results come back as numbers. No pickle."""

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import msgpack
import numpy as np

from jaxserve.api.config import EngineConfig
from jaxserve.device import batch
from jaxserve.device.build import load_params, plan_engine
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import RowError, StepResult
from jaxserve.device.stage import Stage
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_codec import SentRows, decode_plans, encode_plans


class RemoteRunner:
    """A ``Runner`` whose devices another process owns.

    Args:
        config: From which both processes plan the same engine.

    Attributes:
        plans: The plans of every step, with all their rows.
    """

    def __init__(self, config: EngineConfig):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), json.dumps(dataclasses.asdict(config))]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._link = Connection(ours.detach())
        self.plans: list[bytes] = []
        self._sent = SentRows()

    def warm_up(self) -> None:
        """See ``Runner``."""
        self._ask("warm_up")

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """See ``Runner``."""
        self.plans.append(encode_plans(plans))
        self._ask("launch", encode_plans(plans, self._sent))

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        return [_result(fields) for fields in self._ask("collect")]

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
        assert self._process.wait(60) == 0

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._link.send_bytes(_pack([method, *arguments]))
        return _unpack(self._link.recv_bytes())


def _pack(value: Any) -> bytes:
    return msgpack.Packer(default=_plain).pack(value)


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, object_hook=_array)


def _plain(value: Any) -> Any:
    """An array as its dtype, shape and bytes; an error of a row as its text."""
    return (
        str(value)
        if isinstance(value, Exception)
        else {"dtype": value.dtype.name, "shape": value.shape, "bytes": value.tobytes()}
    )


def _array(fields: dict[str, Any]) -> Any:
    """The array of these fields; another mapping is itself."""
    if fields.keys() != {"dtype", "shape", "bytes"}:
        return fields
    return np.frombuffer(bytearray(fields["bytes"]), fields["dtype"]).reshape(fields["shape"])


def _result(fields: list[Any]) -> StepResult:
    """The result of a lane from its fields."""
    tokens, logprobs, prompt_logprobs, sums, expert_tokens, errors = fields
    scores, prompt_scores = (None if each is None else TokenLogprobs(*each) for each in (logprobs, prompt_logprobs))
    failed = tuple(RowError(row, RuntimeError(text)) for row, text in errors)
    return StepResult(tokens, scores, prompt_scores, sums, expert_tokens, failed)


def serve(link: Connection, config: EngineConfig) -> None:
    """Runs what comes until the runner is closed."""
    plan = plan_engine(config)
    (program,) = plan.models
    stage = Stage(program, plan.buckets)
    stage.compile()
    stage.load(load_params(plan, program))
    runner = LocalRunner([stage])
    method, sent = "", SentRows()
    with mock.patch.object(batch, "build", side_effect=batch.build) as build:
        methods: dict[str, Callable[..., Any]] = {
            "launch": lambda data: runner.launch(sent.restore(decode_plans(data))),
            "num_buffers": lambda: build.call_count,
            **{name: getattr(runner, name) for name in ("warm_up", "collect", "reset", "close")},
        }
        while method != "close":
            method, *arguments = _unpack(link.recv_bytes())
            link.send_bytes(_pack(methods[method](*arguments)))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), EngineConfig(**json.loads(sys.argv[2])))
