"""Give the engine work and measure how long it takes."""

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from scripts.gpu.device_events import DeviceTime, device_time
from scripts.gpu.parts import Context
from scripts.gpu.timing import WARM_UPS

_PROFILED = 24  # steps, and runs of one step, under the profiler


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
        """Return sizes for the engine with all its programs; fewer where it is to be quick, small ones for a CPU."""
        if context.is_tiny:
            engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
            engine["kv_cache_memory_bytes"] = 8 << 20
            engine["compile_sizes"] = {"decode": [1, 4], "mixed": [64]}
            return cls(engine, ((1, 64), (4, 64)), 8, (32,), 4, 16, 8, 1.0)
        engine = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8448, "dtype": "bfloat16"}
        engine["compile_sizes"] = {"decode": [2, 64, 256], "mixed": [2048, 8192]}
        decodes = ((1, 1024), (1, 8192), (256, 1024), (64, 1024))
        if context.is_quick:
            return cls(engine, decodes[:3], 48, (2048,), 64, 1024, 128, 20.0)
        return cls(engine, decodes, 64, (2048, 8192), 256, 1024, 1024, 45.0)

    @classmethod
    def first_of(cls, context: Context) -> "Workload":
        """Return sizes for an engine with as few programs as can be, whose figures come first."""
        whole = cls.of(context)
        rows, tokens = (1, 64) if context.is_tiny else (2, 2048)
        sizes = {"max_num_seqs": rows, "max_num_batched_tokens": tokens}
        engine = {**whole.engine, **sizes, "compile_sizes": {"decode": [rows], "mixed": [tokens]}}
        return whole._replace(engine=engine, decodes=whole.decodes[:1], steps=16, prefills=whole.prefills[:1])


class Decode(NamedTuple):
    """How long decode steps take.

    Attributes:
        batch: Rows.
        context: Tokens of each row's context, about.
        num_steps: Steps measured.
        step_s: Median seconds of a step.
        low_s: 10th percentile.
        high_s: 90th percentile.
        stepping: What the device did in ``num_profiled`` steps; None where the profiler saw no device.
        replaying: The same of one of these steps run again and again with no host between.
        num_profiled: Steps and runs under the profiler.
    """

    batch: int
    context: int
    num_steps: int
    step_s: float
    low_s: float
    high_s: float
    stepping: DeviceTime | None
    replaying: DeviceTime | None
    num_profiled: int = _PROFILED


def decode(llm: Any, batch: int, context: int, num_steps: int) -> Decode:
    """Time steps in which every one of ``batch`` rows decodes, at contexts around ``context``."""
    from jaxserve import SamplingParams
    from jaxserve.api.request import parse_prompt

    engine = llm.engine
    length = context - num_steps // 2 - 2
    # Rows that are computed first go on decoding while the others' prompts are: these tokens must not run out.
    spare = batch * length // llm.plan.max_num_batched_tokens + 8
    most = llm.plan.max_model_len - length - 1
    needed = num_steps + _PROFILED + spare + 16
    params = SamplingParams(temperature=0.0, max_tokens=min(most, needed), ignore_eos=True, detokenize=False)
    prompts = random_prompts(batch, length, llm.vocab_size, seed=context + batch)
    requests = [engine.submit(parse_prompt({"prompt_token_ids": ids}, params)) for ids in prompts]
    while any(request.first_token_s is None for request in requests):
        engine.step()
    for _ in range(WARM_UPS):
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)

    def run_steps() -> None:
        for _ in range(_PROFILED):
            engine.step()

    stepping = device_time(run_steps)
    with replayed(_PROFILED) as replaying:
        engine.step()
    if any(request.is_finished() for request in requests):
        raise RuntimeError(f"a request of {length} tokens ended before {num_steps} steps were measured")
    for request in requests:
        engine.abort(request)
    while engine.num_unfinished or any(replica.has_steps_in_flight for replica in engine.replicas):
        engine.step()
    low, high = np.percentile(times, (10, 90))
    middle = statistics.median(times)
    return Decode(batch, context, num_steps, middle, float(low), float(high), stepping, replaying.get("time"))


def longest_kernels(found: Decode) -> str:
    """Return the kernels that take most of a step, each with its number and its microseconds per step."""
    if found.replaying is None:
        return ""
    count = found.num_profiled
    return ", ".join(f"{n / count:g} of {name} {s / count * 1e6:.0f} us" for name, n, s in found.replaying.kernels)


def prefill_s(llm: Any, num_tokens: int, runs: int = 5) -> float:
    """Return the median seconds from a prompt's submission to its first token; the first three runs do not count."""
    from jaxserve import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for ids in random_prompts(runs + WARM_UPS, num_tokens, llm.vocab_size, seed=num_tokens):
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UPS:])


def throughput(llm: Any, workload: Workload) -> tuple[int, float]:
    """Submit as many requests at once as the pages hold; return their number and the seconds that all of them took."""
    from jaxserve import SamplingParams

    num = max(1, min(workload.offline_num, llm.ledger.num_tokens // (workload.offline_in + workload.offline_out)))
    params = SamplingParams(temperature=0.0, max_tokens=workload.offline_out, ignore_eos=True, detokenize=False)
    prompts = random_prompts(num, workload.offline_in, llm.vocab_size, seed=3)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return num, time.perf_counter() - start


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return token ids of prompts that share nothing."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


@contextlib.contextmanager
def replayed(count: int) -> Iterator[dict[str, DeviceTime | None]]:
    """Run the next compiled program that takes over a state and returns it ``count`` times more, under the profiler.

    The runs are launched one after the other, so that the device never waits for the host. They compute the same step
    again: the same tokens' keys and values into the same places. Yields a mapping that then has the device's ``time``.
    """
    found: dict[str, DeviceTime | None] = {}
    call = jax.stages.Compiled.__call__

    @functools.wraps(call)
    def measured(self: jax.stages.Compiled, *arguments: Any) -> Any:
        result = call(self, *arguments)
        place = _state_place(arguments, result)
        if place is None or found:
            return result

        def run_again(times: int) -> None:
            nonlocal result
            for _ in range(times):
                result = call(self, *arguments[:place], result[0], *arguments[place + 1 :])
            jax.block_until_ready(result)

        run_again(WARM_UPS)
        found["time"] = device_time(functools.partial(run_again, count))
        return result

    with replaced(jax.stages.Compiled, "__call__", measured):
        yield found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _state_place(arguments: tuple[Any, ...], result: Any) -> int | None:
    """Find the argument that a step returns as the first of its results: the one of the same tree and shapes."""
    if not isinstance(result, tuple) or not result:
        return None
    given = _shapes(result[0])
    places = [i for i, argument in enumerate(arguments) if len(given[0]) > 1 and _shapes(argument) == given]
    return places[0] if len(places) == 1 else None


def _shapes(tree: Any) -> tuple[list[Any], Any]:
    leaves, treedef = jax.tree.flatten(tree)
    return [(leaf.shape, leaf.dtype) for leaf in leaves], treedef
