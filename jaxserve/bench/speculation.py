"""Speed of speculative decoding: the same batches with and without, in turns."""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.errors import ConfigError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation import NAME as SETTING
from jaxserve.api.speculation import SHORTCUTS
from jaxserve.bench.replay import Replay
from jaxserve.bench.workload import add_output_arguments, check_output, random_prompts, report
from jaxserve.cli_arguments import engine_arguments
from jaxserve.llm import LLM

NAME = "speculation"
HELP = "compare speculative decoding with none on the same batches, in turns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens per request (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens per request (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="requests per batch (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests (default: %(default)s)")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="warm-up pairs (default: %(default)s)")
    parser.add_argument("--num-iters", type=int, default=12, help="measured pairs (default: %(default)s)")
    parser.add_argument(
        "--replay-acceptance",
        type=float,
        metavar="RATE",
        help="instead of the method's drafts, propose the known text, with each token right at this rate from 0 to 1",
    )
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Run batches with and without speculative decoding, and print the ratio of their speeds."""
    check_output(options)
    rate = options.replay_acceptance
    if rate is not None and not 0 <= rate <= 1:
        raise ConfigError(f"--replay-acceptance: expected a number from 0 to 1, got {rate}")
    arguments = engine_arguments(options)
    plain = {key: value for key, value in arguments.items() if key not in (SETTING, *SHORTCUTS)}
    if len(plain) == len(arguments):
        raise ConfigError("there is nothing to compare: give --speculative-config, or --spec-method and --spec-tokens")
    with LLM(**plain) as without, LLM(**arguments) as drafting:
        replay = None
        if rate is not None:
            replay = Replay(drafting.config.num_speculative_tokens, rate, drafting.vocab_size)
            for replica in drafting.engine.replicas:
                for scheduler in replica.schedulers:
                    scheduler.proposer = replay
        found = compare(without, drafting, replay, options)
    speedup, drafts = found.speedup, found.drafts
    tokens = options.batch_size * options.output_len
    figures: dict[str, Any] = {
        "speedup": speedup.median,
        "speedup_interval": [speedup.low, speedup.high],
        "num_pairs": len(found.without_s),
        "seconds_without": found.without_s,
        "seconds_with": found.with_s,
        "steps_without": found.steps_without,
        "steps_with": found.steps_with,
        "mean_acceptance_length": drafts.mean_length,
        "drafts": int(drafts.num_drafts),
        "draft_tokens": int(drafts.num_tokens),
        "accepted_tokens": int(drafts.num_accepted),
        "different_outputs": found.num_different,
    }
    lines = [
        f"Output tokens/s without: {tokens / statistics.median(found.without_s):.2f}",
        f"Output tokens/s with: {tokens / statistics.median(found.with_s):.2f}",
        f"Speedup: {speedup.median:.3f} (95 % interval {speedup.low:.3f} to {speedup.high:.3f}, "
        f"{len(found.without_s)} pairs)",
        f"Steps per batch: {found.steps_without:.1f} without, {found.steps_with:.1f} with",
        f"Mean acceptance length: {drafts.mean_length:.2f} ({drafts.num_drafts:.0f} drafts, "
        f"{drafts.num_tokens:.0f} draft tokens)",
        f"Different outputs: {found.num_different}",
    ]
    report(options, figures, lines)


class Interval(NamedTuple):
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its 95 % interval between two order statistics, whatever the distribution.

    Fewer than 6 values have none: the interval is infinite.
    """
    ordered, count = sorted(values), len(values)
    tail, outside = 2.0**-count, 0  # probability that the median is below the lowest value
    while tail <= 0.025:
        outside += 1
        tail += math.comb(count, outside) * 2.0**-count
    low, high = (ordered[outside - 1], ordered[-outside]) if outside else (-math.inf, math.inf)
    return Interval(statistics.median(ordered), low, high)


class Comparison(NamedTuple):
    """The measured pairs.

    Attributes:
        without_s: Seconds of each batch without speculative decoding.
        with_s: Seconds of the same batches with it.
        steps_without: Mean number of steps of a batch without.
        steps_with: Mean number of steps of a batch with it.
        drafts: The drafts of the measured batches.
        num_different: Number of outputs that differ; where the engine is not deterministic, rounding may do it.
    """

    without_s: list[float]
    with_s: list[float]
    steps_without: float
    steps_with: float
    drafts: DraftTotals
    num_different: int

    @property
    def speedup(self) -> Interval:
        """Ratio of the speeds of each pair."""
        return median_interval([a / b for a, b in zip(self.without_s, self.with_s, strict=True)])


def compare(without: LLM, drafting: LLM, replay: Replay | None, options: argparse.Namespace) -> Comparison:
    """Run the pairs; every second one runs the engine with speculative decoding first.

    Prompts are new in each pair, except those of a replay, whose texts must be known; which drafts are wrong is new.
    """
    without_s, with_s, num_different, known = list[float](), list[float](), 0, list[list[int]]()
    first_drafts, first_steps = DraftTotals(), (0, 0)
    for pair in range(options.num_iters_warmup + options.num_iters):
        if pair == options.num_iters_warmup:
            first_drafts = DraftTotals.of(drafting.get_metrics())
            first_steps = _num_steps(without), _num_steps(drafting)
            without_s, with_s = [], []
        seed = 0 if replay is not None else pair
        prompts = random_prompts(options.batch_size, options.input_len, without.vocab_size, seed=seed)
        if replay is not None:
            known = known or _timed(without, prompts, options)[1]
            for prompt, output in zip(prompts, known, strict=True):
                replay.learn(prompt["prompt_token_ids"], output, pair)
        outputs = list[list[list[int]]]()
        for llm, times in ((without, without_s), (drafting, with_s))[:: 1 if pair % 2 else -1]:
            elapsed, tokens = _timed(llm, prompts, options)
            times.append(elapsed)
            outputs.append(tokens)
        num_different += sum(a != b for a, b in zip(*outputs, strict=True))
    drafts = DraftTotals.of(drafting.get_metrics()).since(first_drafts)
    count = max(options.num_iters, 1)
    steps = [(_num_steps(llm) - first) / count for llm, first in zip((without, drafting), first_steps, strict=True)]
    return Comparison(without_s, with_s, steps[0], steps[1], drafts, num_different)


def _timed(llm: LLM, prompts: list[dict[str, list[int]]], options: argparse.Namespace) -> tuple[float, list[list[int]]]:
    """Run a batch; return its seconds and the tokens of its outputs."""
    params = [
        SamplingParams(
            temperature=options.temperature, max_tokens=options.output_len, ignore_eos=True, detokenize=False, seed=seed
        )
        for seed in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def _num_steps(llm: LLM) -> int:
    return sum(replica.num_steps for replica in llm.engine.replicas)
