"""What the engine is asked to do, and how long it takes."""

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from scripts.gpu.parts import Context

_REPLAYS = 30


class Workload(NamedTuple):
    """Sizes.

    Attributes:
        engine: Settings of ``LLM``.
        decodes: Batch and context of each decode measurement.
        steps: Decode steps of each.
        prefills: Prompt lengths.
        offline_num: Requests of the throughput measurement, at most.
        offline_in: Prompt tokens of each.
        offline_out: New tokens of each.
        offline_s: Seconds that this probably takes.
    """

    engine: dict[str, Any]
    decodes: tuple[tuple[int, int], ...]
    steps: int
    prefills: tuple[int, ...]
    offline_num: int
    offline_in: int
    offline_out: int
    offline_s: float

    @classmethod
    def of(cls, context: Context) -> "Workload":
        """The issue's sizes, fewer of them where it is to be quick, and small ones for a CPU."""
        if context.is_tiny:
            engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
            engine["kv_cache_memory_bytes"] = 8 << 20
            return cls(engine, ((1, 64), (4, 64)), 8, (32,), 4, 16, 8, 1.0)
        engine = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8448, "dtype": "bfloat16"}
        decodes = ((1, 1024), (1, 8192), (256, 1024), (64, 1024), (8, 1024))
        if context.is_quick:
            return cls(engine, decodes[:3], 48, (2048,), 64, 1024, 128, 20.0)
        return cls(engine, decodes, 64, (2048, 8192), 256, 1024, 1024, 45.0)


class Decode(NamedTuple):
    """Seconds of decode steps: median, 10th and 90th percentile; and of the step alone, where that could be run."""

    batch: int
    context: int
    num_steps: int
    step_s: float
    low_s: float
    high_s: float
    device_s: float | None
    num_replays: int


def decode(llm: Any, batch: int, context: int, num_steps: int) -> Decode:
    """Steps in which every one of ``batch`` rows decodes, at contexts around ``context``."""
    from jaxserve import SamplingParams
    from jaxserve.request import parse_prompts

    engine = llm.engine
    length = context - num_steps // 2 - 2
    # Rows that are computed first go on decoding while the others' prompts are: these tokens must not run out.
    spare = batch * length // llm.plan.max_num_batched_tokens + 8
    most = llm.plan.max_model_len - length - 1
    params = SamplingParams(
        temperature=0.0, max_tokens=min(most, num_steps + spare + 16), ignore_eos=True, detokenize=False
    )
    prompts = random_prompts(batch, length, llm.vocab_size, seed=context + batch)
    requests = [engine.submit(parse_prompts({"prompt_token_ids": ids})[0], params) for ids in prompts]
    while any(request.first_token_s is None for request in requests):
        engine.step()
    for _ in range(3):
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    with replayed(_REPLAYS) as replay:
        engine.step()
    if any(request.is_finished() for request in requests):
        raise RuntimeError(f"a request of {length} tokens ended before {num_steps} steps were measured")
    for request in requests:
        engine.abort(request)
    while engine.num_unfinished or not all(replica.is_idle for replica in engine.replicas):
        engine.step()
    low, high = np.percentile(times, (10, 90))
    middle = statistics.median(times)
    return Decode(batch, context, num_steps, middle, float(low), float(high), replay.get("seconds"), _REPLAYS)


def prefill_s(llm: Any, num_tokens: int, runs: int = 5) -> float:
    """Median seconds from a prompt's submission to its first token; the first run does not count."""
    from jaxserve import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for ids in random_prompts(runs + 1, num_tokens, llm.vocab_size, seed=num_tokens):
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def throughput(llm: Any, workload: Workload) -> tuple[int, float]:
    """How many requests were handed over at once, as many as have room, and how long all of them took."""
    from jaxserve import SamplingParams

    pool = llm.ledger.num_pages * llm.ledger.page_size
    num = max(1, min(workload.offline_num, pool // (workload.offline_in + workload.offline_out)))
    params = SamplingParams(temperature=0.0, max_tokens=workload.offline_out, ignore_eos=True, detokenize=False)
    prompts = random_prompts(num, workload.offline_in, llm.vocab_size, seed=3)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return num, time.perf_counter() - start


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids of prompts that share nothing."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


@contextlib.contextmanager
def replayed(count: int) -> Iterator[dict[str, float]]:
    """Runs the next compiled program that takes over a state and returns it ``count`` times more, and times that.

    The runs are launched one behind the other, so that the device never waits for the host. They compute the same step
    again: the same tokens' keys and values into the same places. Yields a mapping that then has ``seconds``, of a run.
    """
    found: dict[str, float] = {}
    call = jax.stages.Compiled.__call__

    @functools.wraps(call)
    def measured(self: jax.stages.Compiled, *arguments: Any) -> Any:
        result = call(self, *arguments)
        place = _state_place(arguments, result)
        if place is None or found:
            return result
        jax.block_until_ready(result)
        start = time.perf_counter()
        for _ in range(count):
            result = call(self, *arguments[:place], result[0], *arguments[place + 1 :])
        jax.block_until_ready(result)
        found["seconds"] = (time.perf_counter() - start) / count
        return result

    with replaced(jax.stages.Compiled, "__call__", measured):
        yield found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts a value into an attribute's place for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _state_place(arguments: tuple[Any, ...], result: Any) -> int | None:
    """Which argument a step gives back as the first of its results: the one of the same tree and shapes."""
    if not isinstance(result, tuple) or not result:
        return None
    given = _shapes(result[0])
    places = [i for i, argument in enumerate(arguments) if len(given[0]) > 1 and _shapes(argument) == given]
    return places[0] if len(places) == 1 else None


def _shapes(tree: Any) -> tuple[list[Any], Any]:
    leaves, treedef = jax.tree.flatten(tree)
    return [(leaf.shape, leaf.dtype) for leaf in leaves], treedef
