"""A load test of a server, like ``vllm bench serve``: over HTTP for any server with OpenAI's API, or over our gRPC.

Once the server is ready (``ready``), it sends a test request, warm-up requests, then requests at precomputed
times (``schedule``). Each chunk of a response is recorded with its time, and vLLM's metrics are computed from
these records (``metrics``).
"""

import argparse
import asyncio
import contextlib
import gc
import math
from typing import Any

from tqdm import tqdm

from jaxserve.bench.serve.arguments import add_arguments, complete, read_pairs
from jaxserve.bench.serve.datasets import make_requests
from jaxserve.bench.serve.drafts import draft_figures, read_drafts
from jaxserve.bench.serve.effects import has_trace_times
from jaxserve.bench.serve.files import check_files, save, time_text
from jaxserve.bench.serve.grpc import extra_fields
from jaxserve.bench.serve.load import run_load
from jaxserve.bench.serve.metrics import (
    Selection,
    banner_lines,
    figures,
    read_goodput,
    read_metrics,
    read_percentiles,
)
from jaxserve.bench.serve.plot import plot
from jaxserve.bench.serve.ready import ReadyCheck
from jaxserve.bench.serve.records import BenchRequest, BenchResponse, BenchServeError
from jaxserve.bench.serve.schedule import Rate, arrival_times
from jaxserve.bench.serve.target import Target, grpc_target, http_target, request_headers
from jaxserve.bench.serve.tokens import local_tokens

__all__ = ["HELP", "NAME", "add_arguments", "measure", "run"]

NAME = "serve"
HELP = "load test a server over HTTP or gRPC: throughput and client-side latency"
MAX_ERRORS = 10


def run(options: argparse.Namespace) -> None:
    """Run the load test, print vLLM's report, and write the requested files."""
    options = complete(options)
    found = asyncio.run(measure(options))
    if options.save_result or options.append_result:
        save(options, found)
    if options.plot is not None:
        plot(found, options.plot)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run a load test, print its progress and report, and return all metrics.

    Raises:
        BenchServeError: Settings or data are invalid, or the server does not respond.
    """
    rate = Rate(
        options.request_rate,
        options.burstiness,
        options.ramp_up_strategy,
        options.ramp_up_start_rps,
        options.ramp_up_end_rps,
    )
    selection = Selection(
        read_metrics(options.percentile_metrics),
        read_percentiles(options.metric_percentiles),
        read_goodput(options.goodput),
        options.max_concurrency,
        options.request_rate,
    )
    extra = extra_fields(options.extra_body)
    metadata = read_pairs("--metadata", options.metadata)
    for name in metadata.keys() & {*_about(options, "", 0), *figures([], 1.0, selection)}:
        raise BenchServeError(f"--metadata: {name} is a key of the result; choose another name")
    headers = request_headers(options)
    check_files(options)
    tokens = local_tokens(options.tokenizer) if options.tokenizer is not None else None
    ready = ReadyCheck(float(options.ready_check_timeout_sec))
    async with contextlib.AsyncExitStack() as stack:
        find_target = grpc_target if options.backend == "grpc" else http_target
        target = await find_target(options, headers, extra, ready, stack)
        target.tokens.found = tokens
        requests = await make_requests(options, target.tokens, options.backend == "openai-chat")
        found = await _measure(options, target, requests, rate, selection, ready)
    has_words = target.tokens.found is not None and target.tokens.found.are_words
    return {**_about(options, target.model, len(requests), has_words), **metadata, **found}


async def _measure(
    options: argparse.Namespace,
    target: Target,
    requests: list[BenchRequest],
    rate: Rate,
    selection: Selection,
    ready: ReadyCheck,
) -> dict[str, Any]:
    backend, client = target.backend, target.client
    print("Starting initial single prompt test run...")
    await ready.wait_for_response(backend, requests[0])
    print("Initial test run completed.")
    if options.num_warmups:
        print(f"Warming up with {options.num_warmups} requests...")
        warmups = [requests[0]] * options.num_warmups
        await run_load(backend, warmups, [0.0] * len(warmups), options.max_concurrency)
        print("Warmup run completed.")
    print("Starting main benchmark run...")
    recorded_s = [request.arrival_s for request in requests if request.arrival_s is not None]
    due_s = recorded_s or arrival_times(len(requests), rate, options.seed)
    print("\n".join(_traffic_lines(rate, bool(recorded_s), options.max_concurrency)))
    before = None if client is None else await read_drafts(client)
    gc.collect()
    gc.freeze()  # so that collections during the measurement skip existing objects
    with tqdm(total=len(requests), disable=options.disable_tqdm) as bar:
        try:
            result = await run_load(backend, requests, due_s, options.max_concurrency, lambda _: bar.update())
        finally:
            gc.unfreeze()
    _print_errors(result.responses)
    found = figures(result.responses, result.duration_s, selection)
    if before is not None and client is not None:
        found |= draft_figures(before, await read_drafts(client))
    print("\n".join(banner_lines(found, selection)), flush=True)
    return found


def _traffic_lines(rate: Rate, is_recorded: bool, max_concurrency: int | None) -> list[str]:
    last = f"Maximum request concurrency: {max_concurrency}"
    if is_recorded:
        return ["Traffic: the times of the trace", last]
    if rate.ramp_up is not None:
        speed = f"Traffic ramp-up strategy: {rate.ramp_up}, from {rate.start_rps} to {rate.end_rps} requests/s"
    else:
        speed = f"Traffic request rate: {rate.request_rate}"
    process = "Poisson process" if rate.burstiness == 1.0 else "Gamma distribution"
    return [speed, f"Burstiness factor: {rate.burstiness} ({process})", last]


def _print_errors(responses: list[BenchResponse]) -> None:
    errors = [response.error for response in responses if not response.is_success]
    if errors:
        print(f"Failed requests during benchmark run detected (capping to {MAX_ERRORS}):")
        print("\n".join(f"Error {i}: {error}" for i, error in enumerate(errors[:MAX_ERRORS])))


def _about(options: argparse.Namespace, model: str, num_prompts: int, has_words: bool = False) -> dict[str, Any]:
    """Return the settings of the measurement, under vLLM's keys. With a trace's own times there is no rate."""
    about: dict[str, Any] = {
        "date": time_text(),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": "words" if has_words else options.tokenizer,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if has_trace_times(options):
        about |= {"request_rate": None, "burstiness": None, "trace_speed": options.trace_speed}
    for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"):
        if options.ramp_up_strategy is not None:
            about[name] = getattr(options, name)
    return about
