"""Replays a recorded trace through the scheduler and the page allocator, with a model of step times.

    python scripts/simulate_scheduler.py --trace ../shared/data/traces/mooncake/conversation_trace.jsonl --rate 1 10 100
    python scripts/simulate_scheduler.py --host-cost 256

Scheduler and allocator are the engine's own. Times of requests are simulated: they come from the model, not from a
device. Host times (of `schedule` and `complete`) are measured here. Memory: 8 bytes for each prompt token that waits.
"""

import argparse
import collections
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve.api.request import Request  # noqa: E402
from jaxserve.bench.traces import Trace, cut_trace, read_trace  # noqa: E402  (after the path)
from jaxserve.scheduling.plan import StepPlan  # noqa: E402
from jaxserve.scheduling.sequence import Sequence  # noqa: E402
from scripts.scheduler_simulation import CostModel, Settings, Simulation, make_scheduler, trace_reuse  # noqa: E402

NUM_PRIORITIES = 3
PERCENTILES = (50, 90, 99)
PLOTTED_POINTS = 2000
MICROSECONDS = 1e6
TIMES = {"queue": "queue_s", "TTFT": "ttft_s", "E2E": "e2e_s"}
LOADS = ("running", "waiting", "kv_use")


class Preset(NamedTuple):
    """Costs of a device and a model, and the number of context tokens that fit beside the weights."""

    cost: CostModel
    kv_tokens: int


# Models, not measurements: nothing here was run on these cards. Llama-3.1-8B reads 15.0 GB of weights a step and 131 kB
# of keys and values for a token of context, and does 15 GFLOP a token and 0.52 MFLOP an attention pair; Llama-3-70B in
# 8 bits 69.5 GB, 328 kB, 139 GFLOP and 2.6 MFLOP.
# * h100-8b: step and context cost as published for vLLM on an H100 (6.44 ms + 4.37e-5 ms a token of context).
# * h200-8b: weights at 4.8 TB/s and the same 2 ms beside them (3.1 + 2.0 ms); context cost scaled by the bandwidths.
# * h200-70b-fp8: 14.5 + 2.0 ms; context cost scaled by the bytes of a token.
# Products at 70 % of 790 TFLOP/s (the bf16 rate measured on an H200; twice that in 8 bits), attention pairs at 50 %; a
# decoding row costs a third of a prompt token, since reading the weights hides most of it. Keys and values get 0.9 of
# the memory less the weights. The host's part is this project's goal for 256 rows.
PRESETS = {
    "h200-8b": Preset(CostModel(5.1e-3, 2.7e-5, 0.9e-5, 3.05e-8, 1.3e-9, 1e-3), 830_000),
    "h100-8b": Preset(CostModel(6.4e-3, 2.7e-5, 0.9e-5, 4.37e-8, 1.3e-9, 1e-3), 420_000),
    "h200-70b-fp8": Preset(CostModel(16.5e-3, 1.25e-4, 4.2e-5, 7.6e-8, 6.6e-9, 1e-3), 170_000),
}


# ---------------------------------------------------------------- figures


def distribution(values: np.ndarray) -> dict[str, float]:
    """Return mean and percentiles; empty without values."""
    if not values.size:
        return {}
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def simulate(trace: Trace, rate: float, settings: Settings) -> tuple[Simulation, dict[str, Any]]:
    """Replay a trace; returns the simulation and its figures."""
    start = time.perf_counter()
    simulation = Simulation(trace, rate, settings)
    simulation.run()
    return simulation, figures_of(simulation, rate, time.perf_counter() - start)


def figures_of(simulation: Simulation, rate: float, wall_s: float) -> dict[str, Any]:
    """Return the results of a simulation. Times of requests are simulated seconds."""
    trace, pages, moments = simulation.trace, simulation.scheduler.pages, simulation.moments
    outputs = np.array([request.num_output_tokens for request in trace.requests])
    prompts = np.array([request.num_prompt_tokens for request in trace.requests])
    duration = moments[-1].time_s
    arrival, scheduled, first, last = map(
        np.array, (simulation.arrival_s, simulation.scheduled_s, simulation.first_s, simulation.last_s)
    )
    ttft = first - arrival
    several = outputs > 1
    ends = np.array([moment.time_s for moment in moments])
    lengths = np.diff(ends, prepend=0.0)
    running, waiting, kv_use = np.array([moment[1:] for moment in moments]).T
    host_us = np.array(simulation.host_s) * MICROSECONDS
    priorities = np.array(simulation.settings.priorities)
    return {
        "rate": rate,
        "duration_s": duration,
        "steps": len(moments),
        "requests_per_s": len(outputs) / duration,
        "output_tokens_per_s": int(outputs.sum()) / duration,
        "total_tokens_per_s": int(outputs.sum() + prompts.sum()) / duration,
        "queue_s": distribution(scheduled - arrival),
        "ttft_s": distribution(ttft),
        "tpot_s": distribution((last - first)[several] / (outputs[several] - 1)),
        "e2e_s": distribution(last - arrival),
        "ttft_s_of_priority": {int(p): distribution(ttft[priorities == p]) for p in np.unique(priorities)},
        "preemptions": simulation.scheduler.num_preemptions,
        "queried_tokens": pages.num_queried_tokens,
        "hit_tokens": pages.num_hit_tokens,
        "hit_rate": pages.num_hit_tokens / max(1, pages.num_queried_tokens),
        "running": {"mean": float(np.average(running, weights=lengths)), "peak": int(running.max())},
        "waiting": {"mean": float(np.average(waiting, weights=lengths)), "peak": int(waiting.max())},
        "kv_use": {"mean": float(np.average(kv_use, weights=lengths)), "peak": float(kv_use.max())},
        "host_us": distribution(host_us) | {"per_row": float(host_us.sum() / sum(simulation.num_rows))},
        "wall_s": wall_s,
        "steps_per_wall_s": len(moments) / wall_s,
    }


def lines_of(figures: dict[str, Any]) -> list[str]:
    """Return the figures of one rate as text."""

    def times(name: str, unit: str = "s", scale: float = 1.0) -> str:
        found = figures[name]
        return " ".join(f"{key} {value * scale:.4g} {unit}," for key, value in found.items()).rstrip(",") or "none"

    counts = "; ".join(f"{name} mean {figures[name]['mean']:.3g} peak {figures[name]['peak']:.3g}" for name in LOADS)
    lines = [
        f"rate {figures['rate']:g}x: {figures['steps']} steps in {figures['duration_s']:.1f} simulated s; "
        f"{figures['requests_per_s']:.3g} requests/s, {figures['output_tokens_per_s']:.4g} output tokens/s, "
        f"{figures['total_tokens_per_s']:.4g} total tokens/s",
        *(f"  {label:6} {times(name)}" for label, name in TIMES.items()),
        f"  TPOT   {times('tpot_s', 'ms', 1e3)}",
        f"  preemptions {figures['preemptions']}; prefix hits {figures['hit_rate']:.2%} of "
        f"{figures['queried_tokens']} tokens; {counts}",
        f"  host (measured): schedule + complete {times('host_us', 'us')}",
        f"  {figures['wall_s']:.1f} s of this machine, {figures['steps_per_wall_s']:.0f} simulated steps/s",
    ]
    for priority, found in figures["ttft_s_of_priority"].items():
        lines.append(f"  TTFT of priority {priority}: " + ", ".join(f"{k} {v:.4g} s" for k, v in found.items()))
    return lines


# ---------------------------------------------------------------- host cost


def host_cost(num_rows: int, settings: Settings, repetitions: int = 150) -> dict[str, Any]:
    """Measure microseconds of `schedule` and `complete` per step at exactly ``num_rows`` decoding sequences.

    The best of ``repetitions`` means, each over as many steps as a page has tokens, so that granting every sequence a
    page and registering one is in it, spread over the steps. Steps are in flight as in the engine.
    """
    num_steps = settings.page_size
    total = 3 * settings.page_size + num_steps * (repetitions + 1) + num_rows
    settings = dataclasses.replace(
        settings,
        num_pages=num_rows * -(-total // settings.page_size),
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(num_rows, settings.max_num_batched_tokens),
    )
    scheduler = make_scheduler(settings)
    for index in range(num_rows):
        prompt = [index] * (2 * settings.page_size + index % settings.page_size)
        scheduler.add(
            Sequence(Request(request_id=str(index)), prompt, len(prompt), total, cache_root=index.to_bytes(8, "little"))
        )
    flights: collections.deque[StepPlan] = collections.deque()
    times: list[float] = []
    while len(times) < repetitions * num_steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        took = time.perf_counter() - start
        assert plan is not None
        flights.append(plan)
        if len(flights) == settings.depth:
            oldest = flights.popleft()
            tokens = [[index] * count for index, count in enumerate(oldest.num_samples)]
            start = time.perf_counter()
            scheduler.complete(oldest, tokens)
            took += time.perf_counter() - start
        if plan.num_rows == plan.num_tokens == num_rows:
            times.append(took * MICROSECONDS)
    means = np.array(times).reshape(repetitions, num_steps).mean(axis=1)
    best = float(means.min())
    return {"rows": num_rows, "best_us": best, "median_us": float(np.median(means)), "best_us_per_row": best / num_rows}


# ---------------------------------------------------------------- plot


def figure_class() -> type[Any]:
    """Return matplotlib's pyplot, which only plots need.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'jaxserve[research]'") from error


def plot(file: Path, title: str, reuse: float, results: list[tuple[Simulation, dict[str, Any]]]) -> None:
    """Queueing and TTFT over rates, hit rate over rates, and the queues over time.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(13, 8), layout="constrained")
    (latency, hits), (running, waiting) = figure.subplots(2, 2)
    figure.suptitle(title)
    rates = [figures["rate"] for _, figures in results]
    for name, style in (("queue_s", "--"), ("ttft_s", "-")):
        for percentile in PERCENTILES:
            values = [figures[name][f"p{percentile}"] for _, figures in results]
            latency.plot(rates, values, style, marker="o", label=f"{name[:-2]} p{percentile}")
    latency.set(xscale="log", xlabel="rate (x)", ylabel="simulated seconds", title="Queueing and TTFT")
    latency.set_yscale("symlog", linthresh=1e-3)
    latency.set_ylim(bottom=0)
    hits.plot(rates, [100 * figures["hit_rate"] for _, figures in results], "-", marker="o", label="simulated")
    hits.axhline(100 * reuse, linestyle="--", color="grey", label="endless cache")
    hits.set(xscale="log", ylim=(0, 100), xlabel="rate (x)", ylabel="% of prompt tokens", title="Prefix hits")
    for simulation, figures in results:
        moments = simulation.moments[:: max(1, len(simulation.moments) // PLOTTED_POINTS)]
        ends = [moment.time_s / figures["duration_s"] for moment in moments]
        for axes, name in ((running, "num_running"), (waiting, "num_waiting")):
            axes.plot(ends, [getattr(m, name) for m in moments], linewidth=0.8, label=f"{figures['rate']:g}x")
    running.set(xlabel="share of the replay", ylabel="sequences", title="Running")
    waiting.set(xlabel="share of the replay", ylabel="sequences", title="Waiting")
    waiting.set_yscale("symlog", linthresh=1)
    waiting.set_ylim(bottom=0)
    for axes in (latency, hits, running, waiting):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


# ---------------------------------------------------------------- command


def make_parser() -> argparse.ArgumentParser:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Azure .csv or Mooncake .jsonl")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help="multiples of the trace's own speed")
    parser.add_argument("--requests", type=int, help="use only this many requests of the trace")
    parser.add_argument("--model", choices=sorted(PRESETS), default="h200-8b", help="cost model (not a measurement)")
    for field in dataclasses.fields(CostModel):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, help="seconds, overriding the model's")
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument("--num-pages", type=int)
    pages.add_argument("--kv-tokens", type=int, help="tokens of all pages (default: the model's)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=131072, help="longer requests are truncated, and counted")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--long-prefill-token-threshold", type=int, default=0)
    parser.add_argument("--no-prefix-caching", dest="is_caching", action="store_false")
    parser.add_argument(
        "--policy", choices=("fcfs", "priority"), default="fcfs", help="priority draws priorities from 0 to 2"
    )
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2, help="steps in flight; 2 hides the host's part")
    parser.add_argument("--seed", type=int, help="seed of the priorities (default: 0)")
    parser.add_argument(
        "--host-cost", type=int, nargs="?", const=256, metavar="ROWS", help="measure the host part only"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser


def check_flags(options: argparse.Namespace) -> None:
    """Raise a ValueError where a number is out of its range."""
    least = {name: 1 for name in ("requests", "host_cost", "page_size", "num_pages", "kv_tokens", "max_num_seqs")}
    least |= {"max_model_len": 2, "max_num_batched_tokens": 1, "long_prefill_token_threshold": 0, "seed": 0}
    least |= {field.name: 0 for field in dataclasses.fields(CostModel)}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")
    for rate in options.rate:
        if not rate > 0:
            raise ValueError(f"--rate must be more than 0, got {rate:g}")
    if options.seed is not None and options.policy != "priority":
        raise ValueError("--seed is the seed of priorities; it needs --policy priority")
    if options.host_cost is not None and (options.trace or options.plot):
        raise ValueError("--host-cost measures only decode steps; --trace and --plot do not apply")
    if options.plot is not None and not options.plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {options.plot}: expected a file in a folder that exists")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens}: expected at least one token for each of "
            f"{options.max_num_seqs} sequences"
        )


def settings_of(options: argparse.Namespace, num_requests: int) -> Settings:
    """Return the settings of the flags.

    Raises:
        ValueError: A number is out of its range.
    """
    preset = PRESETS[options.model]
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(CostModel)}
    cost = dataclasses.replace(preset.cost, **{name: value for name, value in given.items() if value is not None})
    num_pages = options.num_pages or (options.kv_tokens or preset.kv_tokens) // options.page_size
    if options.max_model_len > num_pages * options.page_size:
        raise ValueError(
            f"--max-model-len {options.max_model_len}: the pages hold {num_pages * options.page_size} tokens"
        )
    priorities = ()
    if options.policy == "priority":
        priorities = tuple(np.random.default_rng(options.seed or 0).integers(0, NUM_PRIORITIES, num_requests).tolist())
    return Settings(
        cost,
        num_pages,
        options.page_size,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.long_prefill_token_threshold,
        options.is_caching,
        options.depth,
        priorities,
    )


def main() -> None:
    """Run the command."""
    parser = make_parser()
    options = parser.parse_args()
    try:
        check_flags(options)
        if options.host_cost is not None:
            report_host_cost(options)
        elif options.trace is None:
            raise ValueError("pass --trace FILE or --host-cost")
        else:
            report_simulation(options)
    except ValueError as error:
        parser.error(str(error))


def report_host_cost(options: argparse.Namespace) -> None:
    """Measure and print the host cost of decode steps."""
    found = host_cost(options.host_cost, settings_of(options, 0))
    line = f"schedule + complete of {found['rows']} decoding sequences: best {found['best_us']:.1f} us"
    line += f" ({found['best_us_per_row']:.3f} us per row), median {found['median_us']:.1f} us"
    print(json.dumps(found) if options.json else line)


def report_simulation(options: argparse.Namespace) -> None:
    """Replay the trace at each rate, print the figures and plots them where asked."""
    if options.plot is not None:
        figure_class()
    read = read_trace(options.trace, options.requests)
    settings = settings_of(options, len(read.requests))
    trace, num_cut = cut_trace(read, options.max_model_len)
    reuse = trace_reuse(trace, options.page_size)
    head = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "requests_cut": num_cut,
        "prompt_tokens": reuse.num_prompt_tokens,
        "endless_cache_hit_rate": reuse.rate,
        "model": options.model,
        "settings": dataclasses.asdict(dataclasses.replace(settings, priorities=())),
    }
    if not options.json:
        print(
            f"{trace.name}: {len(trace.requests)} requests, {num_cut} truncated to {options.max_model_len} tokens; "
            f"{reuse.num_prompt_tokens} prompt tokens, an unlimited cache would hit {reuse.rate:.2%}\n"
            f"step times are those of the model {options.model}, not measured; "
            f"{settings.num_pages} pages of {settings.page_size} tokens"
        )
    results = []
    for rate in sorted(options.rate):
        results.append(simulate(trace, rate, settings))
        if not options.json:
            print("\n".join(lines_of(results[-1][1])), flush=True)
    if options.json:
        print(json.dumps(head | {"rates": [figures for _, figures in results]}))
    if options.plot is not None:
        plot(options.plot, f"{trace.name}, {len(trace.requests)} requests, model {options.model}", reuse.rate, results)


if __name__ == "__main__":
    main()
