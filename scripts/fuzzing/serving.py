"""Engines of the fuzz test of speculative decoding: without drafts and with them, they get the same requests."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve import RequestOutput
from jaxserve.api.config import EngineConfig
from jaxserve.device.build import plan_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import StartedEngine, start_engine
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence as Running
from scripts.fuzzing.configurations import Configuration
from scripts.fuzzing.requests import Asked


class Served(NamedTuple):
    """What an engine did.

    Attributes:
        outputs: The output of each request.
        is_exact: Whether its results are independent of the batch, bit for bit.
        num_draft_tokens: Number of verified drafts.
        num_accepted: Number of accepted ones.
        num_preemptions: Number of preemptions.
        problems: What is wrong with the engine itself.
    """

    outputs: list[RequestOutput]
    is_exact: bool
    num_draft_tokens: int
    num_accepted: int
    num_preemptions: int
    problems: list[str]


class KnownTexts:
    """Proposes what each request said without drafts, with each token right at a set rate.

    Args:
        outputs: Those outputs.
        rate: The rate.
        seed: Chooses the tokens that are wrong.
        num_tokens: Most drafts after the tokens of steps in flight.
    """

    def __init__(self, outputs: Sequence[RequestOutput], rate: float, seed: int, num_tokens: int):
        self._texts = {f"{each.request_id} {one.index}": one.token_ids for each in outputs for one in each.outputs}
        self._rate = rate
        self._rng = np.random.default_rng(seed)
        self._num_tokens = num_tokens

    def propose(self, sequences: Sequence[Running]) -> list[list[int]]:
        """See ``DraftProposer``."""
        return [self._following(sequence) for sequence in sequences]

    def finish(self, sequence: Running) -> None:
        """See ``DraftProposer``."""

    def forget(self, sequence: Running) -> None:
        """See ``DraftProposer``."""

    def _following(self, sequence: Running) -> list[int]:
        text = self._texts[f"{sequence.request.request_id} {sequence.index}"]
        start = sequence.num_output_tokens
        known = text[start : start + sequence.num_pending - 1 + self._num_tokens]
        return [token if self._rng.random() < self._rate else (token + 1) % 360 for token in known]


def engine_config(configuration: Configuration, target: Path, speculation: dict[str, Any] | None) -> EngineConfig:
    """Return the settings of an engine.

    Raises:
        ConfigError: The settings contradict each other.
    """
    settings = dict(configuration.settings)
    few = settings.pop("few_pages")
    made = EngineConfig(**settings, model=str(target), speculative_config=speculation)
    if few is None:
        return made
    pages = plan_engine(made).needs.request_pages
    return dataclasses.replace(made, num_gpu_blocks_override=math.ceil(pages * few))


def serve(
    config: EngineConfig, configuration: Configuration, asked: Sequence[Asked], known: Sequence[RequestOutput] = ()
) -> Served:
    """Run all requests on an engine of its own.

    Args:
        config: Its settings.
        configuration: What happens to it.
        asked: The requests, in order of their arrival.
        known: What they return without drafts, which is proposed in place of the method's drafts if not empty.
    """
    started = start_engine(config)
    engine = started.engine
    try:
        if known and configuration.replay is not None:
            proposer = KnownTexts(known, configuration.replay, configuration.number, config.num_speculative_tokens)
            for scheduler in _schedulers(engine):
                scheduler.proposer = proposer
        states = _run(started, config, configuration, asked)
        counts = [scheduler.draft_counts for scheduler in _schedulers(engine)]
        return Served(
            outputs=[state.output() for state in states],
            is_exact=started.plan.models[0].row_tile is not None and not configuration.moves_sums,
            num_draft_tokens=sum(each.num_tokens for each in counts),
            num_accepted=sum(sum(each.num_accepted.values()) for each in counts),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in _schedulers(engine)),
            problems=_problems(engine, config, states),
        )
    finally:
        engine.close()


def _run(
    started: StartedEngine, config: EngineConfig, configuration: Configuration, asked: Sequence[Asked]
) -> list[RequestState]:
    """Submit the requests as others finish, abort some, and move the engine in the middle."""
    engine, resharder = started.engine, Resharder(config, started)
    states, middle = list[RequestState](), len(asked) // 2
    while len(states) < len(asked) or engine.num_unfinished or _is_busy(engine):
        while len(states) < len(asked) and engine.num_unfinished < configuration.concurrency:
            if len(states) == middle:
                if configuration.reshard is not None:
                    resharder.reshard(configuration.reshard, None)
                if configuration.resets_cache:
                    engine.reset_prefix_cache()
            states.append(engine.submit(asked[len(states)].request))
        engine.step()
        for state, each in zip(states, asked, strict=False):
            if each.aborts_after is not None and not state.is_finished():
                if state.samples[0].sequence.num_output_tokens >= each.aborts_after:
                    engine.abort(state)
    return states


def _problems(engine: Engine, config: EngineConfig, states: Sequence[RequestState]) -> list[str]:
    """Return what is wrong with an engine whose requests have all finished."""
    found = list[str]()
    for scheduler in _schedulers(engine):
        allocator = scheduler.allocator
        if allocator.num_free != allocator.num_pages:
            found.append(f"{allocator.num_pages - allocator.num_free} pages are not free at the end")
        if config.speculative_config is not None and scheduler.proposer is None:
            found.append("the proposer has failed")
    compiled = {metric.name: metric for metric in engine.metrics()}["jaxserve:compiles_after_ready"]
    if getattr(compiled, "value", 0):
        found.append(f"{compiled} programs were compiled after the start")
    unfinished = [state.request_id for state in states if not state.is_finished()]
    return found + ([f"requests {unfinished} have not finished"] if unfinished else [])


def _schedulers(engine: Engine) -> list[Scheduler]:
    return [scheduler for replica in engine.replicas for scheduler in replica.schedulers]


def _is_busy(engine: Engine) -> bool:
    return any(replica.has_steps_in_flight for replica in engine.replicas)
