"""Measures the host's work per step without a device: schedule, batch, complete, stop strings, metrics.

    python scripts/bench_host.py --rows 256

The engine is the real one, its scheduler, batch builder and detokenizer too; only the compiled step is left out, in
whose place known tokens come back at once. Every row decodes, and no text is read. Prints
microseconds per step as one JSON line.
"""

import argparse
import collections
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api.request import parse_prompt
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.device import batch
from jaxserve.device.buckets import Buckets
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.slots import Slots
from jaxserve.engine.admission import Admission
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import CompileCounter
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.replica import Replica
from jaxserve.sampling.sampler import VARIANTS
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.text.tokenizer import load_tokenizer

PAGE_SIZE = 64
PROMPT_TOKENS = 500
MAX_MODEL_LEN = 4096


@dataclasses.dataclass
class Clock:
    """Seconds spent in each part of the current step."""

    parts: dict[str, float] = dataclasses.field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to add its time to a part."""

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start
            return result

        return call


class HostRunner:
    """A ``Runner`` that only builds the buffers of each step, like ``LocalRunner``; tokens come from a seed."""

    def __init__(self, num_rows: int, num_pages: int, vocab_size: int):
        table_pages = MAX_MODEL_LEN // PAGE_SIZE
        self._slots = Slots(num_rows, table_pages, PAGE_SIZE, num_pages, vocab_size)
        self._buckets = Buckets.make(num_rows, 8192, table_pages)
        self._tokens = [[token] for token in random.Random(0).choices(range(270, vocab_size), k=num_rows)]
        self._num_rows = collections.deque[int]()  # of each step in flight

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """Build the step's buffers."""
        (plan,) = plans
        slots = self._slots
        slots.apply(plan)
        variant = slots.variant(plan, bool(slots.masked_samples(plan)))
        shape = self._buckets.shape_for(plan.num_tokens, plan.is_decode_only)
        batch.build(slots, plan, shape, VARIANTS.index(variant))
        self._num_rows.append(plan.num_rows)

    def collect(self) -> list[StepResult]:
        """Return the tokens."""
        return [StepResult(self._tokens[: self._num_rows.popleft()], None, None)]

    def reset(self) -> None:
        """Do nothing: no launch is interrupted."""

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Run steps of rows that all decode, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured (default: %(default)s)")
    parser.add_argument("--stop-strings", action="store_true", help="give every other request a stop string")
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    options = parser.parse_args()
    tokenizer = load_tokenizer(MODEL_DIRECTORY)
    num_pages = options.rows * (MAX_MODEL_LEN // PAGE_SIZE)
    allocator = PageAllocator(num_pages, PAGE_SIZE, keeps_free_pages=options.enable_prefix_caching)
    scheduler = Scheduler(SchedulerLimits(options.rows, 8192), allocator)
    runner = HostRunner(options.rows, num_pages, tokenizer.vocab_size)
    limits = ModelLimits(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, eos_token_ids=(2,))
    clock = Clock()
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)
    scheduler.complete = clock.timed("complete", scheduler.complete)
    runner.launch = clock.timed("batch", runner.launch)
    replica = Replica([scheduler], runner, depth=2)
    engine = Engine([replica], Admission(limits, tokenizer, None), seed=0, counter=CompileCounter())
    print(
        json.dumps(
            measure(engine, options.rows, options.steps, clock, "no such text" if options.stop_strings else None)
        )
    )


def measure(engine: Engine, num_rows: int, num_steps: int, clock: Clock, stop: str | None) -> dict[str, Any]:
    """Return medians, and the 99th percentile of the total, in microseconds."""
    rng = random.Random(1)
    for row in range(num_rows):
        params = SamplingParams(temperature=0.8, max_tokens=None, ignore_eos=True, stop=stop if row % 2 else None)
        prompt = {"prompt_token_ids": rng.choices(range(270, engine.admission.limits.vocab_size), k=PROMPT_TOKENS)}
        engine.submit(parse_prompt(prompt, params))
    whole: list[float] = []
    parts: dict[str, list[float]] = {"schedule": [], "batch": [], "complete": []}
    while len(whole) < num_steps:
        clock.parts.clear()
        rows = engine.replicas[0].num_decode_rows
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        if engine.replicas[0].num_decode_rows - rows != num_rows:
            continue  # prompts are still being computed
        whole.append(elapsed)
        for name, values in parts.items():
            values.append(clock.parts.get(name, 0.0))
    median = {name: statistics.median(values) * 1e6 for name, values in {"step": whole, **parts}.items()}
    median["deliver"] = median["step"] - sum(median[name] for name in parts)
    found = {f"{name}_us": round(value, 1) for name, value in median.items()}
    return {"rows": num_rows, "steps": num_steps, **found, "p99_us": round(sorted(whole)[-num_steps // 100] * 1e6, 1)}


if __name__ == "__main__":
    main()
