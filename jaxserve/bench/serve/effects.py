"""Rejects flags of ``jaxserve bench serve`` that would have no effect."""

import argparse
import math
import urllib.parse
from pathlib import Path
from typing import NamedTuple

from jaxserve.bench.serve.records import BenchServeError

_DEFAULTS = {"burstiness": 1.0}


class _Rule(NamedTuple):
    """Flags that have no effect if ``is_idle``, and the reason."""

    names: tuple[str, ...]
    is_idle: bool
    reason: str


def check_effects(given: argparse.Namespace, options: argparse.Namespace) -> None:
    """Reject each flag that has no effect together with the others.

    Args:
        given: The flags as given.
        options: The flags with all defaults.

    Raises:
        BenchServeError: A flag has no effect.
    """
    for rule in (*_server_rules(options), *_data_rules(options), *_traffic_rules(options), *_output_rules(options)):
        for name in rule.names if rule.is_idle else ():
            value = getattr(given, name)
            if value is not None and value is not False and value != _DEFAULTS.get(name):
                raise BenchServeError(f"--{name.replace('_', '-')} has no effect: {rule.reason}")


def has_trace_times(options: argparse.Namespace) -> bool:
    """Return whether requests are sent at the times of a trace."""
    return options.dataset_name == "trace" and math.isinf(options.request_rate)


def is_secure(options: argparse.Namespace) -> bool:
    """Return whether the connection uses TLS."""
    return urllib.parse.urlsplit(options.base_url).scheme == "https"


def _server_rules(options: argparse.Namespace) -> list[_Rule]:
    headers = {pair.partition("=")[0].strip().lower() for pair in options.header or ()}
    return [
        _Rule(("insecure", "ssl_ca_certs"), not is_secure(options), "--base-url does not begin with https://"),
        _Rule(("ssl_ca_certs",), options.insecure, "--insecure disables the check of certificates"),
        _Rule(("api_key",), "authorization" in headers, "--header sets Authorization"),
    ]


def _data_rules(options: argparse.Namespace) -> list[_Rule]:
    name = options.dataset_name
    has_fixed_times = options.request_rate == math.inf and options.ramp_up_strategy is None
    draws_times = not has_fixed_times and not math.isinf(options.burstiness)
    draws_tokens = name in ("random", "trace") or (name == "sharegpt" and Path(options.dataset_path).suffix == ".csv")
    draws = draws_times or draws_tokens or not options.disable_shuffle
    return [
        _Rule(("disable_shuffle",), name in ("random", "trace"), f"--dataset-name {name} is never shuffled"),
        _Rule(("seed",), not draws, "neither prompts nor their order nor their times are random"),
    ]


def _traffic_rules(options: argparse.Namespace) -> list[_Rule]:
    is_trace, has_times = options.dataset_name == "trace", has_trace_times(options)
    is_at_once = math.isinf(options.request_rate) and options.ramp_up_strategy is None and not is_trace
    ramp = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return [
        _Rule(ramp, is_trace, "a trace is sent at its own times, or at --request-rate"),
        _Rule(("burstiness",), has_times, "a trace is sent at its own times without --request-rate"),
        _Rule(
            ("burstiness",), is_at_once, "all requests are sent at once without --request-rate or --ramp-up-strategy"
        ),
        _Rule(("trace_speed",), is_trace and not has_times, "--request-rate replaces the trace's times"),
    ]


def _output_rules(options: argparse.Namespace) -> list[_Rule]:
    is_saved = options.save_result or options.append_result
    names = ("save_detailed", "result_dir", "result_filename", "label", "metadata")
    has_whole_path = options.result_filename is not None and Path(options.result_filename).is_absolute()
    return [
        _Rule(names, not is_saved, "nothing is saved without --save-result or --append-result"),
        _Rule(("result_dir",), has_whole_path, "--result-filename is an absolute path"),
    ]
