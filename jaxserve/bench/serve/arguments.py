"""Flags of ``jaxserve bench serve``, named as those of ``vllm bench serve``."""

import argparse
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.api.sampling_options import SAMPLING_OPTIONS
from jaxserve.bench.serve.effects import check_effects
from jaxserve.bench.serve.metrics import GOODPUT_METRICS, HEADERS
from jaxserve.bench.serve.records import BenchServeError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
BACKENDS = (*ENDPOINTS, "grpc")
DATASETS = ("random", "sharegpt", "custom", "trace")


class _DataFlag(NamedTuple):
    """A flag of one kind of data set, with its default."""

    dataset: str
    kind: type
    default: Any
    help: str


_DATA_FLAGS = {
    "random_input_len": _DataFlag("random", int, 1024, "prompt tokens after the prefix"),
    "random_output_len": _DataFlag("random", int, 128, "new tokens"),
    "random_range_ratio": _DataFlag("random", float, 0.0, "lengths vary from (1 - RATIO) to (1 + RATIO) of these"),
    "random_prefix_len": _DataFlag("random", int, 0, "tokens of a prefix that all prompts share"),
    "sharegpt_output_len": _DataFlag(
        "sharegpt", int, None, "output tokens (default: lengths of the recorded responses)"
    ),
    "custom_output_len": _DataFlag("custom", int, 256, "output tokens; -1: output_tokens of each line"),
    "trace_speed": _DataFlag("trace", float, 1.0, "replay this many times as fast as recorded"),
    "trace_piece_tokens": _DataFlag("trace", int, None, "scale lengths so that a piece of 512 tokens has this many"),
    "trace_max_len": _DataFlag("trace", int, None, "truncate requests to this many tokens, prompt and output together"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags."""
    _add_server(parser.add_argument_group("server"))
    _add_data(parser.add_argument_group("requests"))
    _add_traffic(parser.add_argument_group("traffic"))
    sampling = parser.add_argument_group("sampling (defaults are the server's)")
    for name, option in SAMPLING_OPTIONS.items():
        kind = type(option.neutral)
        sampling.add_argument(_flag(name), type=kind, metavar=kind.__name__.upper(), help=f"{name} of each request")
    sampling.add_argument("--logprobs", type=int, metavar="INT", help="number of logprobs per position")
    help_ = "continue after the end-of-sequence token (default: with random prompts and traces)"
    sampling.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=None, help=help_)
    sampling.add_argument("--extra-body", metavar="JSON", help="further fields of each request; they override others")
    _add_output(parser.add_argument_group("output"))


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with the defaults that depend on others.

    Raises:
        BenchServeError: Flags that exclude each other, or have no effect together.
    """
    found = argparse.Namespace(**vars(options))
    for name, flag in _DATA_FLAGS.items():
        if found.dataset_name == flag.dataset:
            if getattr(found, name) is None:
                setattr(found, name, flag.default)
        elif getattr(found, name) is not None:
            raise BenchServeError(f"{_flag(name)} applies to --dataset-name {flag.dataset}, not {found.dataset_name}")
    if (found.dataset_name == "random") != (found.dataset_path is None):
        raise BenchServeError(f"--dataset-path: --dataset-name {found.dataset_name} goes "
                              + ("without it" if found.dataset_name == "random" else "with it"))  # fmt: skip
    _complete_lengths(found, options)
    found.seed = 0 if found.seed is None else found.seed
    _check_ranges(found)
    if found.ignore_eos is None:
        found.ignore_eos = found.dataset_name in ("random", "trace")
    _complete_server(found)
    check_effects(options, found)
    return found


def _complete_lengths(found: argparse.Namespace, given: argparse.Namespace) -> None:
    """Copy the general lengths to the flags of the data set."""
    for general in ("input_len", "output_len"):
        value, name = getattr(found, general), f"{found.dataset_name}_{general}"
        if value is None:
            continue
        if name not in _DATA_FLAGS:
            raise BenchServeError(f"{_flag(general)} has no effect with --dataset-name {found.dataset_name}")
        if getattr(given, name) is not None:
            raise BenchServeError(f"{_flag(general)} and {_flag(name)} set the same value: pass only one")
        setattr(found, name, value)


def _complete_server(found: argparse.Namespace) -> None:
    is_grpc = found.backend == "grpc"
    if found.base_url is not None and (found.host is not None or found.port is not None):
        raise BenchServeError("--base-url and --host, --port exclude each other")
    if found.base_url is None:
        port = found.port if found.port is not None else 8001 if is_grpc else 8000
        host = found.host or "127.0.0.1"
        found.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    elif "://" not in found.base_url:
        found.base_url = f"http://{found.base_url}"
    parts = urllib.parse.urlsplit(found.base_url)
    if parts.query or parts.fragment or (is_grpc and (parts.path.strip("/") or parts.scheme not in ("http", "https"))):
        form = "http://HOST:PORT or https://HOST:PORT" if is_grpc else "http://HOST:PORT/PATH without ? and #"
        raise BenchServeError(f"--base-url: expected {form}, got {found.base_url}")
    if is_grpc and (found.endpoint is not None or found.insecure):
        raise BenchServeError("--endpoint and --insecure apply to HTTP, not --backend grpc")
    if is_grpc:
        return
    if found.endpoint is None:
        found.endpoint = ENDPOINTS[found.backend]
    if found.endpoint.endswith("chat/completions") != (found.backend == "openai-chat"):
        raise BenchServeError(
            f"--endpoint: {found.endpoint} does not match --backend {found.backend}; chats need openai-chat"
        )


def _check_ranges(found: argparse.Namespace) -> None:
    least: dict[str, float] = {"num_prompts": 1, "max_concurrency": 1, "num_warmups": 0, "random_prefix_len": 0}
    least |= {"random_input_len": 0, "random_output_len": 1, "sharegpt_output_len": 1, "ready_check_timeout_sec": 0}
    least |= {"trace_piece_tokens": 1, "trace_max_len": 2, "seed": 0}
    for name, low in least.items():
        value = getattr(found, name, None)
        if value is not None and value < low:
            raise BenchServeError(f"{_flag(name)}: expected at least {low}, got {value}")
    if found.random_range_ratio is not None and not 0 <= found.random_range_ratio < 1:
        raise BenchServeError(f"--random-range-ratio: expected 0 <= RATIO < 1, got {found.random_range_ratio}")
    if found.trace_speed is not None and not 0 < found.trace_speed < float("inf"):
        raise BenchServeError(f"--trace-speed: expected a number above 0, got {found.trace_speed}")


def read_pairs(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """Parse pairs such as ``name=value``.

    Raises:
        BenchServeError: A pair is malformed, or a name is repeated.
    """
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name.strip():
            raise BenchServeError(f"{flag}: expected NAME=VALUE, got {pair!r}")
        if name.strip() in found:
            raise BenchServeError(f"{flag}: {name.strip()} is repeated")
        found[name.strip()] = value.strip()
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_server(group: Any) -> None:
    group.add_argument("--backend", choices=BACKENDS, default="openai", help="API to use (default: %(default)s)")
    group.add_argument("--base-url", metavar="URL", help="server address, such as http://127.0.0.1:8000")
    group.add_argument("--host", help="server host, if there is no --base-url (default: 127.0.0.1)")
    group.add_argument("--port", type=int, help="server port, if there is no --base-url (default: 8000; for gRPC 8001)")
    group.add_argument(
        "--endpoint", metavar="PATH", help="path (default: /v1/completions; for openai-chat /v1/chat/completions)"
    )
    group.add_argument("--model", help="model name (default: the server's first)")
    help_ = "model directory or hub id of the tokenizer for random prompts (default: the server's own)"
    group.add_argument("--tokenizer", help=help_)
    group.add_argument("--api-key", metavar="KEY", help="API key (default: the environment variable OPENAI_API_KEY)")
    group.add_argument(
        "--header",
        nargs="*",
        action="extend",
        metavar="NAME=VALUE",
        help="HTTP header or gRPC metadata of each request",
    )
    group.add_argument("--insecure", action="store_true", help="do not verify the server's certificate")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="CA certificates that verify the server's")
    help_ = "seconds to wait until the server is ready and a test request succeeds (default: 0)"
    group.add_argument("--ready-check-timeout-sec", type=int, default=0, metavar="INT", help=help_)


def _add_data(group: Any) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: %(default)s)")
    help_ = "ShareGPT's JSON, or CSV of lengths; JSONL with prompts; a trace of Mooncake, Azure or BurstGPT"
    group.add_argument("--dataset-path", metavar="FILE", help=help_)
    group.add_argument("--num-prompts", type=int, default=1000, help="requests (default: %(default)s)")
    group.add_argument("--seed", type=int, help="seed of prompts and times (default: 0)")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of the file")
    group.add_argument("--input-len", type=int, help="alias of --random-input-len")
    group.add_argument(
        "--output-len", type=int, help="alias of --random-output-len, --sharegpt-output-len or --custom-output-len"
    )
    for name, flag in _DATA_FLAGS.items():
        default = "" if flag.default is None else f" (default: {flag.default})"
        group.add_argument(
            _flag(name),
            type=flag.kind,
            metavar=flag.kind.__name__.upper(),
            help=f"{flag.dataset}: {flag.help}{default}",
        )


def _add_traffic(group: Any) -> None:
    infinite = float("inf")
    help_ = "requests per second (default: inf, all at once; for traces: their own times)"
    group.add_argument("--request-rate", type=float, default=infinite, help=help_)
    help_ = "shape of the gamma distribution of gaps: 1 Poisson, below 1 bursts, inf even (default: %(default)s)"
    group.add_argument("--burstiness", type=float, default=1.0, help=help_)
    help_ = "limit of concurrent requests; others wait in the client (default: no limit)"
    group.add_argument("--max-concurrency", type=int, help=help_)
    group.add_argument("--num-warmups", type=int, default=0, help="warm-up requests before the measurement")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="how the rate grows")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="RPS", help="rate of the first request")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="RPS", help="rate of the last request")


def _add_output(group: Any) -> None:
    help_ = f"comma-separated metrics out of {', '.join(HEADERS)} (default: %(default)s)"
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help=help_)
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST", help="comma-separated (default: %(default)s)"
    )
    help_ = f"largest milliseconds of a good request, METRIC:MS, for {', '.join(GOODPUT_METRICS)}"
    group.add_argument("--goodput", nargs="+", action="extend", default=[], metavar="METRIC:MS", help=help_)
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--append-result", action="store_true", help="append the result as a line to the file")
    group.add_argument("--save-detailed", action="store_true", help="also write the metrics of each request")
    group.add_argument("--result-dir", metavar="DIRECTORY", help="directory of the result (default: current directory)")
    group.add_argument("--result-filename", metavar="FILE", help="(default: LABEL-RATEqps-MODEL-TIME.json)")
    group.add_argument("--label", help="start of the file name (default: the backend)")
    group.add_argument(
        "--metadata", nargs="*", action="extend", metavar="NAME=VALUE", help="further values of the result"
    )
    group.add_argument("--plot", metavar="FILE.png", help="plot the latencies; needs jaxserve[research]")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
