"""Throughput of many requests submitted at once."""

import argparse
import time

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.bench.workload import add_output_arguments, check_output, draft_figures, random_prompts, report
from jaxserve.cli_arguments import engine_arguments
from jaxserve.llm import LLM

NAME = "throughput"
HELP = "measure the throughput of many requests submitted at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags."""
    parser.add_argument("--num-prompts", type=int, default=100, help="requests (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens per request (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens per request (default: %(default)s)")
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Run all requests and print vLLM's line."""
    check_output(options)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    with LLM(**engine_arguments(options)) as llm:
        prompts = random_prompts(options.num_prompts, options.input_len, llm.vocab_size, seed=llm.config.seed)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not options.json)
        elapsed = time.perf_counter() - start
        draft_values, draft_lines = draft_figures(DraftTotals.of(llm.get_metrics()))
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        **draft_values,
    }
    line = (
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    totals = [f"Total num prompt tokens:  {num_input}", f"Total num output tokens:  {num_output}"]
    report(options, figures, [line, *totals, *draft_lines])
