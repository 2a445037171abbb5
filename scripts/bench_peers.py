"""Runs jaxserve on the workloads of the comparison with other engines: one JSON line per workload, in their format.

    python scripts/bench_peers.py --model CHECKPOINT --dtype float32 --workloads AB --workloads-dir
    ../shared/bench/peers

A is one request of 128 + 128 tokens, B 32 ragged requests at once, C 32 requests with a shared prefix. ``--attention``
prints instead how a decode step grows with the context, beside the time that reading those keys and values
takes.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.api.request import parse_prompt
from jaxserve.engine.request_state import RequestState


def main() -> None:
    """Parse the flags, start the engine and run the workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", default="AB")
    parser.add_argument("--workloads-dir", default=str(Path(__file__).parents[2] / "shared" / "bench" / "peers"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--no-async-scheduling", dest="async_scheduling", action="store_false")
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="as the engine's option")
    parser.add_argument("--kernels", choices=("native", "xla"), help="as the engine's option")
    parser.add_argument("--quantization-config", type=json.loads, help="as the engine's option, JSON")
    parser.add_argument("--attention", action="store_true", help="time decode steps at contexts 128 to 4096")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "max_num_seqs": 1 if options.attention else options.max_num_seqs,
        "max_model_len": 8192 if options.attention else options.max_model_len,
        "async_scheduling": options.async_scheduling,
        "enable_prefix_caching": options.enable_prefix_caching,
        "deterministic": options.deterministic,
        "kernels": options.kernels,
        "kv_cache_memory_bytes": 2 << 30,
    }
    if options.quantization_config:
        settings["quantization_config"] = options.quantization_config
    if options.max_num_batched_tokens:
        settings["max_num_batched_tokens"] = options.max_num_batched_tokens
    with LLM(options.model, **settings) as llm:
        if options.attention:
            print(json.dumps(time_contexts(llm, options.runs)))
            return
        workloads = load_workloads(Path(options.workloads_dir))
        options.threads = 0
        name = "jaxserve" + {None: "", True: " deterministic", False: " not deterministic"}[options.deterministic]
        name += f" {options.kernels}" if options.kernels else ""
        name += f" {json.dumps(options.quantization_config)}" if options.quantization_config else ""
        name += "" if options.enable_prefix_caching else " without prefix caching"
        workloads.measure(name, importlib.metadata.version("jaxserve"), options.dtype, options, Driver(llm))


def load_workloads(folder: Path) -> ModuleType:
    """Return the workload definitions, by path."""
    spec = importlib.util.spec_from_file_location("workloads", folder / "workloads.py")
    if spec is None or spec.loader is None or not (folder / "workloads.py").exists():
        sys.exit(f"{folder} has no workloads.py; pass --workloads-dir")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Driver:
    """Runs a list of (prompt ids, output length) and returns times of first tokens and numbers of tokens."""

    def __init__(self, llm: LLM):
        self._engine = llm.engine

    def __call__(self, requests: list[tuple[list[int], int]]) -> tuple[list[float], list[int]]:
        start = time.monotonic()
        states = [self._submit(prompt, new) for prompt, new in requests]
        while self._engine.num_unfinished:
            self._engine.step()
        first = [(state.first_token_s or 0.0) - start for state in states]
        return first, [state.samples[0].sequence.num_output_tokens for state in states]

    def _submit(self, prompt: list[int], new: int) -> RequestState:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        return self._engine.submit(parse_prompt(prompt, params))


def time_contexts(llm: LLM, runs: int) -> dict[str, Any]:
    """Measure the median milliseconds of a decode step at several contexts, and the time to read their KV cache."""
    found: dict[str, Any] = {"engine": "jaxserve", "ms_per_step": {}}
    for context in (128, 512, 1024, 2048, 4096):
        times = []
        for _ in range(runs):
            prompt = np.random.default_rng(context).integers(3, 32000, context - 16).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
            request = llm.engine.submit(parse_prompt(prompt, params))
            while request.first_token_s is None:
                llm.engine.step()
            while not request.is_finished():
                start = time.perf_counter()
                llm.engine.step()
                times.append(time.perf_counter() - start)
        found["ms_per_step"][context] = round(statistics.median(times) * 1e3, 3)
    plan = llm.plan
    found["kv_bytes_per_token"] = len(plan.needs.windows) * plan.needs.page // plan.needs.page_size
    found["step_bytes_of_4096_less_128"] = found["kv_bytes_per_token"] * (4096 - 128)
    bandwidth = read_bandwidth()
    found["read_gb_per_s"] = round(bandwidth / 1e9, 1)
    floor_ms = found["step_bytes_of_4096_less_128"] / bandwidth * 1e3
    grown = found["ms_per_step"][4096] - found["ms_per_step"][128]
    return found | {"floor_ms": round(floor_ms, 3), "grown_ms": round(grown, 3), "ratio": round(grown / floor_ms, 2)}


def read_bandwidth() -> float:
    """Measure the bytes per second that XLA reads in a sum over an array larger than the caches."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones(100_000_000, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return array.nbytes / min(times)


if __name__ == "__main__":
    main()
