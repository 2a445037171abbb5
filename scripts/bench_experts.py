"""Measures a small mixture of experts beside the dense model of the same active size, and beside other engines.

    python scripts/bench_experts.py --peers transformers vllm --vllm-python VENV/bin/python --machine "2 CPUs of …"
    python scripts/draw_charts.py

Both models have random weights in bfloat16; the mixture has 8 experts, 2 of them active per token, and the dense model
an MLP of twice an expert's width. jaxserve runs both in one process: the workloads in turns, and then single decode
steps in turns, whose ratio other programs on the machine hardly change. A mixture that reads only its active experts
takes as long for a step as the dense model. Then ``drive_hf.py`` and ``drive_vllm.py`` of the workloads' folder run the
mixture, each in a process of its own. A is one request of 128 + 128 tokens, B 32 ragged requests at once.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from jaxserve import LLM, SamplingParams  # noqa: E402
from jaxserve.api.request import parse_prompt  # noqa: E402
from jaxserve.layers.parallel import Scope  # noqa: E402
from jaxserve.models.abstract import abstract_model  # noqa: E402
from jaxserve.models.loading import read_model_config  # noqa: E402
from scripts.bench_peers import Driver, load_workloads, read_bandwidth  # noqa: E402

OUT = REPOSITORY / "scripts" / "charts" / "experts_measurements.json"
EXPERT_FFN, ACTIVE = 1536, 2
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": EXPERT_FFN,
        "num_local_experts": 8,
        "num_experts_per_tok": ACTIVE,
    },
    "dense": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "intermediate_size": ACTIVE * EXPERT_FFN,
    },
}
PEERS = {"transformers": "transformers", "vllm": "vLLM-CPU"}
TITLES = {"A": ("One stream: decode", "decode_tok_s"), "B": ("32 ragged requests: output", "output_tok_s")}


def main() -> None:
    """Parse the flags, measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads-dir", type=Path, default=REPOSITORY.parent / "shared" / "bench" / "peers")
    parser.add_argument("--workloads", default="AB")
    parser.add_argument("--runs", type=int, default=5, help="turns of each model in jaxserve; other engines take 1")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=["transformers"])
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--machine", default=f"{platform.machine()}, {platform.node()}", help="for the result")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if "vllm" in options.peers and options.vllm_python is None:
        parser.error("--peers vllm needs --vllm-python, the Python of an environment with vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            write_model(Path(folder) / name, SHAPE | config)
        workloads = load_workloads(options.workloads_dir)
        turns = take_turns(Path(folder), workloads, options.workloads, options.runs)
        steps = time_steps(Path(folder), workloads.requests("A", 0)[0], options.runs)
        pythons = {"transformers": Path(sys.executable), "vllm": options.vllm_python}
        peers = {
            peer: run_peer(peer, pythons[peer], options.workloads_dir, Path(folder) / "experts", options.workloads)
            for peer in options.peers
        }
    found = summary(turns, steps, peers, options.machine)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def write_model(directory: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint with random weights, and a tokenizer with a word per token."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    words = {str(index): index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0", "eos_token": "0", "pad_token": "0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    recipes = abstract_model(read_model_config(directory), Scope(), lambda axes: device).recipes
    shapes = dict(source for recipe in recipes.values() for source in recipe.sources)
    generator = np.random.default_rng(0)
    tensors = {name: random_tensor(shape, generator) for name, shape in sorted(shapes.items())}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def random_tensor(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return a matrix whose products are about as large as what it multiplies, or a norm's weight near 1."""
    values = generator.standard_normal(shape, np.float32)
    values = 1 + 0.1 * values if len(shape) == 1 else values * shape[-1] ** -0.5
    return values.astype(ml_dtypes.bfloat16)


def take_turns(folder: Path, workloads: ModuleType, names: str, runs: int) -> dict[str, dict[str, list[float]]]:
    """Run each workload on both models in turns; return tokens/s by workload and model."""
    settings = {"dtype": "bfloat16", "max_num_seqs": 32, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 29}
    found: dict[str, dict[str, list[float]]] = {}
    with LLM(str(folder / "experts"), **settings) as experts, LLM(str(folder / "dense"), **settings) as dense:
        drivers = {"experts": Driver(experts), "dense": Driver(dense)}
        for workload in names:
            found[workload] = {model: [] for model in drivers}
            for run in range(runs + 1):
                requests = workloads.requests(workload, run)
                for model in sorted(drivers, reverse=run % 2 == 0):
                    rate = tokens_per_second(drivers[model], requests, workload)
                    found[workload][model] += [rate] if run else []  # the first run warms up
    return found


def time_steps(folder: Path, request: tuple[list[int], int], runs: int) -> dict[str, list[float]]:
    """Decode one stream of each model in turns, step by step; return the milliseconds of each step by model."""
    settings = {"dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": 512, "async_scheduling": False}
    params = SamplingParams(temperature=0.0, max_tokens=request[1], ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {model: [] for model in MODELS}
    with LLM(str(folder / "experts"), **settings) as experts, LLM(str(folder / "dense"), **settings) as dense:
        engines = {"experts": experts.engine, "dense": dense.engine}
        for _ in range(runs):
            states = [engine.submit(parse_prompt(request[0], params)) for engine in engines.values()]
            while any(state.first_token_s is None for state in states):
                for engine in engines.values():
                    engine.step()
            while not any(state.is_finished() for state in states):
                for model, engine in engines.items():
                    start = time.perf_counter()
                    engine.step()
                    times[model].append((time.perf_counter() - start) * 1e3)
    return times


def tokens_per_second(driver: Driver, requests: list[tuple[list[int], int]], workload: str) -> float:
    """Return generated tokens per second: of one stream after its first token, or of all requests from their start."""
    start = time.perf_counter()
    first, made = driver(requests)
    wall = time.perf_counter() - start
    return (made[0] - 1) / (wall - first[0]) if workload == "A" else sum(made) / wall


def run_peer(peer: str, python: Path, folder: Path, model: Path, workloads: str) -> dict[str, dict[str, Any]]:
    """Run another engine on the mixture of experts; return its line of each workload."""
    script = {"transformers": "drive_hf.py", "vllm": "drive_vllm.py"}[peer]
    flags = ["--model", str(model), "--dtype", "bfloat16", "--workloads", workloads, "--runs", "1"]
    done = subprocess.run([str(python), str(folder / script), *flags], stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if done.returncode or len(lines) != len(workloads):
        sys.exit(f"{script} ended with {done.returncode} after {len(lines)} of {len(workloads)} workloads")
    return {line["workload"]: line for line in lines}


def summary(
    turns: Mapping[str, Mapping[str, Sequence[float]]],
    steps: Mapping[str, Sequence[float]],
    peers: Mapping[str, Mapping[str, Any]],
    machine: str,
) -> dict[str, Any]:
    """Return the result in the form that ``draw_charts.py`` draws, with the ratios of the models' decode steps."""
    versions = {name: importlib.metadata.version(name) for name in ("jaxserve", "jax")}
    versions |= {peer: next(iter(lines.values()))["version"] for peer, lines in peers.items()}
    ratios = [a / b for a, b in zip(steps["experts"], steps["dense"], strict=True)]
    panels = []
    for workload, rates in turns.items():
        title, key = TITLES[workload]
        values = [statistics.median(rates[model]) for model in ("experts", "dense")]
        values += [lines[workload][key] for lines in peers.values()]
        shown = [round(value, 1) for value in values]
        panels.append({"workload": workload, "title": title, "unit": "tokens/s", "better": "higher", "values": shown})
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{machine}, {read_bandwidth() / 1e9:.1f} GB/s memory read",
        "model": "Mixtral's form: 8 experts, 2 active, 8 layers of 768, bfloat16, random weights",
        "versions": versions | {"python": platform.python_version()},
        "engines": ["jaxserve", "jaxserve, dense", *(PEERS[peer] for peer in peers)],
        "panels": panels,
        "decode_step": {
            "ms": {model: round(statistics.median(times), 2) for model, times in steps.items()},
            "experts_to_dense": {
                "quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
                "num_pairs": len(ratios),
            },
        },
    }


if __name__ == "__main__":
    main()
