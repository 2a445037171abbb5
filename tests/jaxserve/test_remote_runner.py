"""Plans are plain values and all that a runner gets from the host: one in another process makes the same tokens."""

import array
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request, parse_prompt
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.device.build import plan_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.model_defaults import find_tokenizer
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import assemble_engine, start_engine
from jaxserve.scheduling.plan import ON_DEVICE, StepPlan
from jaxserve.scheduling.plan_codec import decode_plans, encode_plans
from tests.jaxserve.test_request_mix import REQUESTS, SETTINGS, outcome, scores
from tests.remote_runner import RemoteRunner

NUM_REQUESTS = 40


def config(is_async: bool) -> EngineConfig:
    """So few pages that requests are preempted."""
    settings = {**SETTINGS, "async_scheduling": is_async, "num_gpu_blocks_override": 16, "seed": 3}
    return EngineConfig.from_arguments("demo", **settings)


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine, RemoteRunner]]:
    """An engine with a runner in this process, one like it with a runner in another, and that runner."""
    settings = config(request.param)
    runner = RemoteRunner(settings)
    local = start_engine(settings).engine
    plan = plan_engine(settings)
    remote = assemble_engine(settings, plan, find_tokenizer(settings, plan.directory), None, [runner])
    yield local, remote, runner
    local.close()
    remote.close()


def run(engine: Engine, seed: int) -> list[RequestOutput]:
    """Requests of all kinds in a random order, vectors among them; some hit cached pages."""
    order = random.Random(seed)
    inputs = []
    for prompt, params in order.choices(REQUESTS, k=NUM_REQUESTS):
        default = PoolingParams() if order.random() < 0.1 else SamplingParams(**params)
        inputs.append(parse_prompt(prompt, default=default))
    return [request.output() for request in run_all(engine, inputs)]


def run_all(engine: Engine, inputs: list[Request]) -> list[RequestState]:
    """Step until all requests have finished."""
    requests = [engine.submit(each) for each in inputs]
    while engine.num_unfinished:
        engine.step()
    return requests


def check_plain(value: Any) -> None:
    """Numbers, text, bytes and what is made of them: nothing that only this process knows."""
    if isinstance(value, array.array):
        assert value.typecode == "i"
    elif dataclasses.is_dataclass(value):
        check_plain([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, list | tuple):
        for one in value:
            check_plain(one)
    else:
        assert type(value) in (int, float, bool, str, bytes, type(None)), type(value)


def check_plan(sent: bytes) -> StepPlan:
    """A plan survives the way there, with what is derived from its rows."""
    (plan,) = decode_plans(sent)
    assert encode_plans([plan]) == sent
    check_plain(plan)
    fresh = dataclasses.replace(plan)
    assert (plan.num_tokens, plan.is_decode_only) == (fresh.num_tokens, fresh.is_decode_only)
    return plan


def test_a_runner_in_another_process_reuses_the_inputs_of_steps_with_equal_rows(
    engines: tuple[Engine, Engine, RemoteRunner],
) -> None:
    """Overlapping steps have equal rows until a page is full; without overlap, each names its tokens."""
    _, engine, runner = engines
    num_plans, num_buffers = len(runner.plans), runner.num_buffers()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    inputs = [parse_prompt(prompt, default=params) for prompt in ("Once", "The dog")]
    run_all(engine, inputs)
    plans = [check_plan(sent) for sent in runner.plans[num_plans:]]
    changed = [plan for plan in plans if plan.setups or plan.grants or plan.same_rows_as is None]
    assert runner.num_buffers() - num_buffers == len(changed)
    assert len(changed) == len(plans) if plans[-1].starts[0] != ON_DEVICE else len(changed) < len(plans) / 2


def test_a_runner_in_another_process_makes_the_same_tokens(engines: tuple[Engine, Engine, RemoteRunner]) -> None:
    local, remote, runner = engines
    for seed in range(2):
        for found, expected in zip(run(remote, seed), run(local, seed), strict=True):
            assert outcome(found) == outcome(expected)
            assert scores(found) == scores(expected)
            assert found.embedding == expected.embedding
    values = {metric.name: metric.value for metric in remote.metrics()}
    assert values["jaxserve:num_preemptions"] > 0 and values["jaxserve:prefix_cache_hits"] > 0
    plans = [check_plan(sent) for sent in runner.plans]
    assert any(plan.masks for plan in plans) and any(plan.copies for plan in plans)
    assert any(plan.pooling for plan in plans) and any(plan.targets for plan in plans)
