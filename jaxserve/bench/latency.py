"""Latency of one batch, from prompts to the last token."""

import argparse
import time

import numpy as np

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.bench.workload import add_output_arguments, check_output, draft_figures, random_prompts, report
from jaxserve.cli_arguments import engine_arguments
from jaxserve.llm import LLM

NAME = "latency"
HELP = "measure the latency of one batch of requests"
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags."""
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens per request (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens per request (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests per batch (default: %(default)s)")
    parser.add_argument("--num-iters-warmup", type=int, default=3, help="warm-up runs (default: %(default)s)")
    parser.add_argument("--num-iters", type=int, default=10, help="measured runs (default: %(default)s)")
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Run the batch repeatedly and print its latency."""
    check_output(options)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    latencies = []
    with LLM(**engine_arguments(options)) as llm:
        drafts = DraftTotals()
        for i in range(options.num_iters_warmup + options.num_iters):
            if i == options.num_iters_warmup:
                drafts = DraftTotals.of(llm.get_metrics())
            prompts = random_prompts(options.batch_size, options.input_len, llm.vocab_size, seed=i)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - start)
        draft_values, draft_lines = draft_figures(DraftTotals.of(llm.get_metrics()).since(drafts))
    counted = np.array(latencies[options.num_iters_warmup :])
    percentiles = {p: float(np.percentile(counted, p)) for p in _PERCENTILES}
    figures = {"avg_latency": float(counted.mean()), "latencies": counted.tolist(), "percentiles": percentiles}
    lines = [f"Avg latency: {counted.mean()} seconds"]
    lines += [f"{p}% percentile latency: {value} seconds" for p, value in percentiles.items()]
    report(options, figures | draft_values, lines + draft_lines)
