"""The files of a load test: checked before it, so that an error loses no measurement, and written after it."""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from jaxserve.api.text_files import check_output_file, file_errors
from jaxserve.bench.serve.effects import has_trace_times
from jaxserve.bench.serve.metrics import DETAILS
from jaxserve.pictures import check_format


def check_files(options: argparse.Namespace) -> None:
    """Check that all files can be read or written; creates the directory of the results, but no file.

    Raises:
        ConfigError: A file cannot be read or written.
    """
    for name in ("dataset_path", "ssl_ca_certs"):
        path = getattr(options, name)
        if path is not None:
            with file_errors(f"--{name.replace('_', '-')}", path, "read"), Path(path).open("rb"):
                pass
    if options.plot is not None:
        check_format("plot", options.plot)
        check_output_file("--plot", options.plot)
    if options.save_result or options.append_result:
        path = _result_path(options, "model", time_text())
        directory = Path(options.result_dir or ".")
        with file_errors("--result-dir", directory, "created"):
            directory.mkdir(parents=True, exist_ok=True)
        check_output_file("--result-filename", path)


def save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the result, with the metrics of each request if requested.

    Raises:
        ConfigError: The file cannot be written.
    """
    kept = {name: value for name, value in found.items() if options.save_detailed or name not in DETAILS}
    path = _result_path(options, found["model_id"], found["date"])
    has_lines = options.append_result and path.exists() and path.stat().st_size > 0
    with file_errors("--result-filename", path):
        with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
            file.write(("\n" if has_lines else "") + json.dumps(kept))


def time_text() -> str:
    """Return the current time in the form used in file names."""
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _result_path(options: argparse.Namespace, model: str, time: str) -> Path:
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    speed = f"{options.request_rate}qps"
    if options.ramp_up_strategy is not None:
        speed = f"ramp-up-{options.ramp_up_strategy}-{options.ramp_up_start_rps}qps-{options.ramp_up_end_rps}qps"
    elif has_trace_times(options):
        speed = f"trace-{options.trace_speed}x"
    name = f"{options.label or options.backend}-{speed}{limit}-{Path(model).name}-{time}.json"
    return Path(options.result_dir or ".") / (options.result_filename or name)
