"""Seconds from starting a process to the first token, without compiled programs and with the cache of an earlier
start."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from jaxserve.bench.workload import add_output_arguments, check_output, report
from jaxserve.cli_arguments import engine_arguments

NAME = "startup"
HELP = "measure the seconds from process start to the first token, cold and warm"
_CHILD = """
import json, sys, time
start = time.time()
from jaxserve import LLM, SamplingParams
llm = LLM(**json.load(sys.stdin))
ready = time.time()
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate({"prompt_token_ids": [llm.vocab_size // 2] * 8}, params, use_tqdm=False)
print(json.dumps({"ready": ready, "first_token": time.time(), "compile_s": llm.compile_s, "load_s": llm.load_s}))
llm.close()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags."""
    parser.add_argument("--num-iters-cold", type=int, default=1, help="cold starts (default: %(default)s)")
    parser.add_argument("--num-iters-warm", type=int, default=3, help="warm starts (default: %(default)s)")
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Start new processes and print their start-up times."""
    check_output(options)
    arguments = engine_arguments(options)
    figures: dict[str, Any] = {}
    lines = []
    for phase, count in (("cold", options.num_iters_cold), ("warm", options.num_iters_warm)):
        starts = []
        for _ in range(count):
            with tempfile.TemporaryDirectory() as empty:
                cache = empty if phase == "cold" else arguments.get("compilation_cache_dir")
                starts.append(_start({**arguments, "compilation_cache_dir": cache}))
        for name in ("first_token_s", "ready_s", "compile_s", "load_s"):
            values = [start[name] for start in starts]
            if values:
                figures[f"{phase}_{name}"] = {"avg": float(np.mean(values)), "all": values}
                lines.append(
                    f"Avg {phase} {name.removesuffix('_s').replace('_', ' ')} time: {np.mean(values):.2f} seconds"
                )
    report(options, figures, lines)


def _start(arguments: dict[str, Any]) -> dict[str, float]:
    """Measure one start in a separate process."""
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"the start failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else '?'}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "first_token_s": found["first_token"] - start,
        "ready_s": found["ready"] - start,
        "compile_s": found["compile_s"],
        "load_s": found["load_s"],
    }
