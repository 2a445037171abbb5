"""Measures the host's work per step without a device: schedule, batch, complete, stop strings, metrics.

    python scripts/bench_host.py --rows 256
    python scripts/bench_host.py --rows 32 --draft-tokens 4

The engine is the real one, its scheduler, batch builder and detokenizer too; only the compiled step is left out, in
whose place known tokens come back at once: of drafts, which ``suffix`` proposes, a random number is accepted. Every row
decodes, and no text is read. Prints microseconds per step as one JSON line; with ``--draft-tokens`` a second one, of
runs that take turns.
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
from jaxserve.api.speculation import SHORTCUTS, check_speculation
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
from jaxserve.scheduling.proposers.registry import make_proposer
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
    """A ``Runner`` that only builds the buffers of each step, like ``LocalRunner``; tokens repeat those of a seed."""

    def __init__(self, num_rows: int, num_pages: int, vocab_size: int, num_drafts: int):
        table_pages = MAX_MODEL_LEN // PAGE_SIZE
        self._slots = Slots(num_rows, table_pages, PAGE_SIZE, num_pages, vocab_size)
        self._buckets = Buckets.make(num_rows, 8192, table_pages, max_samples=1 + num_drafts)
        rng = random.Random(0)
        self._tokens = [rng.choices(range(270, vocab_size), k=40) * (MAX_MODEL_LEN // 20) for _ in range(num_rows)]
        self._num_sampled = [0] * num_rows
        self._accepted = [[rng.randint(1, count) for _ in range(997)] for count in range(1, num_drafts + 2)]
        self._plans = collections.deque[StepPlan]()

    def warm_up(self) -> None:
        """Do nothing: there are no programs."""

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """Build the step's buffers."""
        (plan,) = plans
        slots = self._slots
        slots.apply(plan)
        variant = slots.variant(plan, bool(slots.masked_samples(plan)))
        shape = self._buckets.shape_for(plan.num_tokens, plan.is_decode_only)
        batch.build(slots, plan, shape, VARIANTS.index(variant))
        self._plans.append(plan)

    def collect(self) -> list[StepResult]:
        """Return the tokens."""
        plan, tokens = self._plans.popleft(), list[list[int]]()
        for slot, num_samples in zip(plan.slots, plan.num_samples, strict=True):
            start = self._num_sampled[slot]
            end = start + self._accepted[num_samples - 1][(start + slot) % 997] if num_samples else start
            tokens.append(self._tokens[slot][start:end])
            self._num_sampled[slot] = end
        return [StepResult(tokens, None, None)]

    def reset(self) -> None:
        """Do nothing: no launch is interrupted."""

    def close(self) -> None:
        """Do nothing."""


class Bench:
    """An engine whose rows all decode, and the times of its steps.

    Args:
        options: The command line's.
        num_drafts: Most draft tokens of a row; 0: without speculative decoding.
    """

    def __init__(self, options: argparse.Namespace, num_drafts: int):
        tokenizer, num_rows = load_tokenizer(MODEL_DIRECTORY), options.rows
        num_pages = num_rows * (MAX_MODEL_LEN // PAGE_SIZE)
        allocator = PageAllocator(num_pages, PAGE_SIZE, keeps_free_pages=options.enable_prefix_caching)
        method = {"method": "suffix", "num_speculative_tokens": num_drafts} if num_drafts else None
        proposer = make_proposer(check_speculation(method, dict.fromkeys(SHORTCUTS)))
        scheduler = Scheduler(SchedulerLimits(num_rows, 8192, max_draft_tokens=num_drafts), allocator, proposer)
        runner = HostRunner(num_rows, num_pages, tokenizer.vocab_size, num_drafts)
        limits = ModelLimits(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, eos_token_ids=(2,))
        self._clock, self._num_rows, self._num_drafts = Clock(), num_rows, num_drafts
        clock = self._clock
        scheduler.schedule = clock.timed("schedule", scheduler.schedule)
        scheduler.complete = clock.timed("complete", scheduler.complete)
        runner.launch = clock.timed("batch", runner.launch)
        self._scheduler = scheduler
        self._engine = Engine(
            [Replica([scheduler], runner, depth=2)],
            Admission(limits, tokenizer, None),
            seed=0,
            counter=CompileCounter(),
        )
        self._times: dict[str, list[float]] = {name: [] for name in ("step", "schedule", "batch", "complete")}
        self._submit(tokenizer.vocab_size, "no such text" if options.stop_strings else None)

    def _submit(self, vocab_size: int, stop: str | None) -> None:
        rng = random.Random(1)
        for row in range(self._num_rows):
            params = SamplingParams(temperature=0.8, max_tokens=None, ignore_eos=True, stop=stop if row % 2 else None)
            prompt = {"prompt_token_ids": rng.choices(range(270, vocab_size), k=PROMPT_TOKENS)}
            self._engine.submit(parse_prompt(prompt, params))

    def run(self, num_steps: int) -> None:
        """Measure some more steps."""
        num_measured, elapsed, parts = 0, 0.0, self._clock.parts
        parts.clear()
        while num_measured < num_steps:
            rows = self._scheduler.num_decode_rows
            start = time.perf_counter()
            self._engine.step()
            elapsed += time.perf_counter() - start
            assert self._engine.num_unfinished, "fewer --steps: the requests have reached the longest context"
            num_planned = self._scheduler.num_decode_rows - rows
            if not num_planned and parts:
                continue  # the engine has collected tokens that the next plan waits for
            if num_planned == self._num_rows:  # else prompts are still being computed
                num_measured += 1
                for name, values in self._times.items():
                    values.append(parts.get(name, 0.0) if name != "step" else elapsed)
            elapsed = 0.0
            parts.clear()

    def results(self) -> dict[str, Any]:
        """Return medians, and the 99th percentile of the total, in microseconds."""
        num_steps, counts = len(self._times["step"]), self._scheduler.draft_counts
        median = {name: statistics.median(values) * 1e6 for name, values in self._times.items()}
        median["deliver"] = 2 * median["step"] - sum(median.values())
        found = {f"{name}_us": round(value, 1) for name, value in median.items()}
        found["p99_us"] = round(sorted(self._times["step"])[-num_steps // 100] * 1e6, 1)
        drafts = {"draft_tokens": self._num_drafts, "drafted": counts.num_tokens} if self._num_drafts else {}
        return {"rows": self._num_rows, "steps": num_steps, **drafts, **found}


def main() -> None:
    """Run steps of rows that all decode, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=0, help="most draft tokens of a row (default: none)")
    parser.add_argument("--stop-strings", action="store_true", help="give every other request a stop string")
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    options = parser.parse_args()
    benches = [Bench(options, num_drafts) for num_drafts in dict.fromkeys((0, options.draft_tokens))]
    for _ in range(20):
        for bench in benches:
            bench.run(options.steps // 20)
    for bench in benches:
        print(json.dumps(bench.results()))


if __name__ == "__main__":
    main()
