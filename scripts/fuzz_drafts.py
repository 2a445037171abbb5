"""Compare the outputs of random engines without and with speculative decoding, on the same random requests.

    python scripts/fuzz_drafts.py --requests 10000 --output FILE

Each configuration is a tiny random model, a mesh of CPU devices, settings of the engine, a method and its settings. Its
requests use every option; some are aborted, and some engines move to another mesh in the middle. Tokens, texts, finish
reasons and log-probabilities must be the same, bit for bit in deterministic mode. FILE gets a line of JSON for each
configuration; run again with the same FILE, the script goes on after the last of them. The exit status is 1 if anything
differs. What differs is printed with the command that repeats it; where a method chooses how many drafts it verifies by
measured times, the steps of the second run may be others.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Programs are small and run a few times: compiling fast matters more than fast code. Without fusion emitters, as tests
# compile, it would be faster still, but rows of Gemma 4 on several devices then depend on the shape of the step.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (after the environment that it reads)

from jaxserve.api.errors import ConfigError, MemoryPlanError  # noqa: E402
from pallas_kernels import UnsupportedKernelError  # noqa: E402
from scripts.fuzzing.checkpoints import write_drafter, write_target  # noqa: E402
from scripts.fuzzing.configurations import Configuration, draw  # noqa: E402
from scripts.fuzzing.differences import differences  # noqa: E402
from scripts.fuzzing.requests import draw_requests  # noqa: E402
from scripts.fuzzing.serving import engine_config, serve  # noqa: E402
from sharding import LayoutError  # noqa: E402

REFUSED = (ConfigError, MemoryPlanError, LayoutError, UnsupportedKernelError)
"""Errors that say that a configuration is not supported; nothing runs then."""
NUM_DEVICES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run configurations until they have had enough requests; return the exit status."""
    options = parser().parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    lines = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    if any(line["seed"] != options.seed for line in lines):
        raise SystemExit(f"{options.output} has configurations of another seed; use another file for each seed")
    number = max((line["configuration"] + 1 for line in lines), default=options.first)
    num_requests, num_configurations = sum(line["requests"] for line in lines), 0
    while num_requests < options.requests and num_configurations < (options.configurations or number + 1_000_000):
        line = run_configuration(draw(options.seed, number), options.each)
        with options.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines.append(line)
        report(line, options)
        num_requests += line["requests"]
        number, num_configurations = number + 1, num_configurations + 1
    print(summary(lines), flush=True)
    return int(any(line["differences"] or line["problems"] for line in lines))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    made.add_argument("--requests", type=int, default=10_000, help="requests in all (default: %(default)s)")
    made.add_argument("--each", type=int, default=120, help="requests per configuration (default: %(default)s)")
    made.add_argument("--first", type=int, default=0, help="first configuration (default: %(default)s)")
    made.add_argument("--configurations", type=int, default=0, help="most configurations; 0: no limit")
    made.add_argument("--output", type=Path, default=Path("fuzz_drafts.jsonl"), help="file of results")
    return made


def run_configuration(configuration: Configuration, num_requests: int) -> dict[str, Any]:
    """Run a configuration's engines, and return what to write about it."""
    line: dict[str, Any] = {
        "seed": configuration.seed,
        "configuration": configuration.number,
        "requests": 0,
        "differences": [],
        "problems": [],
    }
    start_s = time.monotonic()
    try:
        line |= _compare(configuration, num_requests)
    except REFUSED as error:
        line["refused"] = f"{type(error).__name__}: {error}"
    except Exception:
        line["problems"] = [traceback.format_exc()]
    jax.clear_caches()
    gc.collect()
    about = {name: getattr(configuration, name) for name in ("family", "drafter", "replay", "reshard", "settings")}
    about["speculation"] = configuration.speculation
    return {**line, "seconds": round(time.monotonic() - start_s, 1), **about}


def _compare(configuration: Configuration, num_requests: int) -> dict[str, Any]:
    """Return what the requests of a configuration have shown."""
    asked = draw_requests(configuration, num_requests)
    with tempfile.TemporaryDirectory(prefix="jaxserve-fuzz-") as name:
        folder, family, seed = Path(name), configuration.family, configuration.number
        target = write_target(folder, family, seed, configuration.is_foreseeable)
        speculation = dict(configuration.speculation)
        drafter = write_drafter(folder, target, family, speculation["method"], configuration.drafter, seed)
        if drafter is not None:
            speculation["model"] = str(drafter)
        configs = [engine_config(configuration, target, each) for each in (None, speculation)]
        without = serve(configs[0], configuration, asked)
        drafted = serve(configs[1], configuration, asked, without.outputs)
    found = [*differences(asked, without.outputs, drafted.outputs, without.is_exact and drafted.is_exact)]
    return {
        "requests": num_requests,
        "differences": found,
        "problems": [*without.problems, *drafted.problems],
        "is_exact": without.is_exact and drafted.is_exact,
        "tokens": sum(len(one.token_ids) for each in drafted.outputs for one in each.outputs),
        "errors": sum(each.error is not None for each in drafted.outputs),
        "drafted": drafted.num_draft_tokens,
        "accepted": drafted.num_accepted,
        "preemptions": drafted.num_preemptions,
    }


def report(line: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the result of a configuration."""
    number, result = line["configuration"], line.get("refused")
    if result is None:
        keys = ("requests", "tokens", "drafted", "accepted", "preemptions", "errors")
        result = ", ".join(f"{line[key]} {key}" for key in keys if key in line)
    method = line["speculation"]["method"] if line["replay"] is None else "known text"
    print(f"{number}: {line['family']}, {method}: {result}; {line['seconds']} s", flush=True)
    for each in line["differences"]:
        print(f"  request {each['request']}: {each['what']}\n    {each['asked']}")
    for problem in line["problems"]:
        print(f"  {problem}")
    if line["differences"] or line["problems"]:
        print(f"  settings: {line['settings']}, {line['speculation']}, {line['drafter']}, {line['reshard']}")
        command = f"python scripts/fuzz_drafts.py --seed {options.seed} --first {number} --configurations 1"
        print(f"  repeat with: {command} --each {options.each} --output /tmp/repeated-{number}.jsonl", flush=True)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return the counts of all configurations."""
    totals = {key: sum(line.get(key, 0) for line in lines) for key in ("requests", "tokens", "drafted", "accepted")}
    num_refused = sum("refused" in line for line in lines)
    num_different = sum(len(line["differences"]) for line in lines)
    num_problems = sum(len(line["problems"]) for line in lines)
    return (
        f"{len(lines) - num_refused} configurations ({num_refused} more were refused), {totals['requests']} requests, "
        f"{totals['tokens']} tokens, {totals['drafted']} drafts of which {totals['accepted']} were accepted: "
        f"{num_different} requests differ, {num_problems} other problems"
    )


if __name__ == "__main__":
    sys.exit(main())
