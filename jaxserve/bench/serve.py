"""A load test of a server, as ``vllm bench serve``: over HTTP against any with OpenAI's API, and over our gRPC.

One test request, warm-ups, then requests at times fixed beforehand (``serve_schedule``); each chunk of an answer is
noted with its time, and what vLLM prints and saves is computed from the notes (``serve_metrics``).
"""

import argparse
import asyncio
import contextlib
import datetime
import gc
import json
import math
import os
import ssl
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxserve.bench.serve_answer import Backend, BenchAnswer, BenchRequest, BenchServeError
from jaxserve.bench.serve_arguments import SAMPLING, add_arguments, complete, read_pairs
from jaxserve.bench.serve_datasets import make_requests
from jaxserve.bench.serve_grpc import (
    MAX_CONNECTIONS,
    STREAMS_A_CONNECTION,
    GrpcBackend,
    extra_fields,
    grpc_model,
    grpc_tokens,
    open_channels,
)
from jaxserve.bench.serve_http import HttpClient
from jaxserve.bench.serve_load import run_load, wait_until_ready
from jaxserve.bench.serve_metrics import (
    DETAILS,
    Selection,
    banner_lines,
    figures,
    read_goodput,
    read_metrics,
    read_percentiles,
)
from jaxserve.bench.serve_openai import OpenAIBackend
from jaxserve.bench.serve_plot import check_can_plot, plot
from jaxserve.bench.serve_schedule import Rate, arrival_times
from jaxserve.bench.serve_tokens import TokenSource, local_tokens, server_tokens

__all__ = ["HELP", "NAME", "add_arguments", "measure", "run"]

NAME = "serve"
HELP = "load test of a server over HTTP or gRPC: throughput, and times as its users see them"
MAX_ERRORS = 10


class _Target(NamedTuple):
    """A server to measure: how to ask it, its model, and the tokens of random prompts."""

    backend: Backend
    model: str
    tokens: TokenSource


def run(options: argparse.Namespace) -> None:
    """Measures, prints vLLM's lines, and writes what was asked for."""
    options = complete(options)
    found = asyncio.run(measure(options))
    if options.plot is not None:
        plot(found, options.plot)
    if options.save_result or options.append_result:
        _save(options, found)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs a load test, prints its course and result, and returns all figures.

    Raises:
        BenchServeError: Settings or data are wrong, or the server does not answer.
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
    if options.plot is not None:
        check_can_plot()
    async with contextlib.AsyncExitStack() as stack:
        try:
            target = await _target(options, extra, stack)
        except OSError as error:
            raise BenchServeError(f"cannot reach {options.base_url}: {error}") from error
        requests = await make_requests(options, target.tokens, options.backend == "openai-chat")
        found = await _measure(options, target.backend, requests, rate, selection)
    return {**_about(options, target.model), **metadata, **found}


async def _target(options: argparse.Namespace, extra: dict[str, Any], stack: contextlib.AsyncExitStack) -> _Target:
    """The server that the flags name; what was opened is closed with the stack."""
    headers = read_pairs("--header", options.header)
    api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    if api_key and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {api_key}"
    names = (*SAMPLING, "logprobs")
    sampling = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.ignore_eos:
        sampling["ignore_eos"] = True
    is_secure = options.base_url.startswith("https://")
    if options.backend == "grpc":
        target = urllib.parse.urlsplit(options.base_url).netloc
        most = min(options.num_prompts, options.max_concurrency or options.num_prompts)
        count = min(MAX_CONNECTIONS, math.ceil(most / STREAMS_A_CONNECTION))
        channels = open_channels(target, count, is_secure, options.ssl_ca_certs)
        for channel in channels:
            stack.push_async_callback(channel.close)
        model = await grpc_model(channels[0], options.model or "", headers)
        backend: Backend = GrpcBackend(channels, model.id, sampling, extra, headers)
        tokens = grpc_tokens(channels[0], model.vocab_size, headers)
        return _Target(backend, model.id, local_tokens(options.tokenizer) if options.tokenizer else tokens)
    context = ssl.create_default_context(cafile=options.ssl_ca_certs) if is_secure else None
    if context is not None and options.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = HttpClient(options.base_url, headers, context)
    stack.push_async_callback(client.close)
    name = options.model or await _first_model(client)
    if options.backend == "openai-chat" and "logprobs" in sampling:
        sampling |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
    backend = OpenAIBackend(client, options.endpoint, name, {**sampling, **extra})
    tokens = local_tokens(options.tokenizer) if options.tokenizer else await server_tokens(client, name)
    return _Target(backend, name, tokens)


async def _first_model(client: HttpClient) -> str:
    answer = await client.request("GET", "/v1/models")
    models = answer.json().get("data") if answer.status == 200 else None
    if not models:
        raise BenchServeError(f"the server does not say its models (status {answer.status}): give --model")
    return models[0]["id"]


async def _measure(
    options: argparse.Namespace, backend: Backend, requests: list[BenchRequest], rate: Rate, selection: Selection
) -> dict[str, Any]:
    print("Starting initial single prompt test run...")
    await wait_until_ready(backend, requests[0], options.ready_check_timeout_sec)
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
    gc.collect()
    gc.freeze()  # what is there stays: no collection walks through it while times are taken
    with tqdm(total=len(requests), disable=options.disable_tqdm) as bar:
        try:
            result = await run_load(backend, requests, due_s, options.max_concurrency, lambda _: bar.update())
        finally:
            gc.unfreeze()
    _print_errors(result.answers)
    found = figures(result.answers, result.duration_s, selection)
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


def _print_errors(answers: list[BenchAnswer]) -> None:
    errors = [answer.error for answer in answers if not answer.is_success]
    if errors:
        print(f"Failed requests during benchmark run detected (capping to {MAX_ERRORS}):")
        print("\n".join(f"Error {i}: {error}" for i, error in enumerate(errors[:MAX_ERRORS])))


def _about(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """What was measured, under vLLM's keys."""
    about: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"):
        if options.ramp_up_strategy is not None:
            about[name] = getattr(options, name)
    return about


def _save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    kept = {name: value for name, value in found.items() if options.save_detailed or name not in DETAILS}
    directory = Path(options.result_dir or ".")
    directory.mkdir(parents=True, exist_ok=True)
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    speed = f"{options.request_rate}qps"
    if options.ramp_up_strategy is not None:
        speed = f"ramp-up-{options.ramp_up_strategy}-{options.ramp_up_start_rps}qps-{options.ramp_up_end_rps}qps"
    name = f"{options.label or options.backend}-{speed}{limit}-{Path(found['model_id']).name}-{found['date']}.json"
    path = directory / (options.result_filename or name)
    has_lines = options.append_result and path.exists() and path.stat().st_size > 0
    with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
        file.write(("\n" if has_lines else "") + json.dumps(kept))
