"""Measures models with recurrent layers beside dense ones that read as many bytes per token, with random weights.

    python scripts/bench_recurrent.py --rounds 3
    python scripts/bench_recurrent.py --shapes lfm2-1.2b --rounds 5
    python scripts/bench_recurrent.py --write ~/.cache/jaxserve-bars --tokenizer ~/.cache/jaxserve-bars/1b-bf16

Each shape has a dense Llama of the same width, depth and vocabulary, whose MLPs are as wide as its step reads as many
bytes: those of the hybrid's weights, and its states read and written. The two take turns, each in a process of its own
(bfloat16, one stream). ``decode`` is the ratio of their speeds after 128 tokens, ``growth`` what a step of the hybrid
takes after 8,192 tokens relative to one after 128, in turns in one process. Medians over rounds, with the least and the
most. ``--write`` measures nothing: it writes the hybrids with random weights, ``SHAPE-bf16`` each, which
``bench_quantized.py --size SHAPE`` runs in other engines; llama.cpp needs a tokenizer with merges, which that of the
demo model lacks.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax.numpy as jnp
import numpy as np

from checkpoints import TensorInfo
from checkpoints.safetensors_writer import save_safetensors
from checkpoints.tensor_info import whole_index
from jaxserve import LLM, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.device.build import plan_engine
from jaxserve.models.dummy_weights import DummyReader
from jaxserve.models.loading import known_listings

_SHORT, _LONG = 128, 8192
_STEPS = 64
_REPETITIONS = 3
_BFLOAT16 = np.dtype(jnp.bfloat16)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-0.8b": {
        **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320},
        **{"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "head_dim": 256},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"layer_types": [*["linear_attention"] * 3, "full_attention"] * 6},
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
    },
    "lfm2-1.2b": {
        **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536},
        **{"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 12288},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "conv_dim": 2048, "norm_eps": 1e-5},
        **{"block_dim": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    },
    "granite-4-h-350m": {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100352},
        **{"hidden_size": 768, "num_hidden_layers": 32, "intermediate_size": 2048, "shared_intermediate_size": 2048},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 0, "num_experts_per_tok": 0},
        **{"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
        **{"mamba_expand": 2, "position_embedding_type": "nope"},
        "layer_types": ["attention" if layer % 9 == 8 or layer == 31 else "mamba" for layer in range(32)],
    },
}
_ALL = {
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def _write(folder: Path, fields: Mapping[str, Any], tokenizer: Path = MODEL_DIRECTORY) -> Path:
    """Write a checkpoint without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_ALL, **fields}))
    for file in tokenizer.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_weights(model: Path) -> None:
    """Write random weights beside a config.json: matrices from -0.02 to 0.02, vectors from 0.98 to 1.02."""
    listings = known_listings(model)
    assert listings is not None
    reader = DummyReader(listings()[0])

    def source(name: str, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            values = 20 * reader.read(name, whole_index(shape))
            return (values if len(shape) > 1 else 1 + values).astype(_BFLOAT16)

        return read

    shapes = {name: info.shape for name, info in reader.tensors.items()}
    save_safetensors(
        model, [(name, TensorInfo(shape, _BFLOAT16), source(name, shape)) for name, shape in shapes.items()]
    )


def _settings(**others: Any) -> dict[str, Any]:
    fixed = {"dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": 1, "kv_cache_memory_bytes": 2 << 30}
    return {**fixed, "max_model_len": _LONG + 2 * _STEPS, "generation_config": "vllm", **others}


def dense_twin(fields: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    """Return a Llama like a hybrid, whose weights have about as many bytes."""
    width, layers = fields["hidden_size"], fields["num_hidden_layers"]
    heads = width // 64
    kv_heads = max(number for number in (1, 2, 4, 8) if heads % number == 0)
    attention = width * 64 * (2 * heads + 2 * kv_heads)
    left = num_bytes / 2 - width * fields["vocab_size"] - layers * attention
    return {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": fields["vocab_size"]},
        **{"hidden_size": width, "num_hidden_layers": layers, "rope_theta": 10000.0, "head_dim": 64},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads},
        "intermediate_size": round(left / layers / width / 3 / 32) * 32,
    }


def _step_s(llm: LLM, num_tokens: int) -> float:
    """Return the seconds of a decode step after a prompt: what more tokens take, over their number."""
    prompt = [[5 + (7 * i) % 300 for i in range(num_tokens)]]
    taken = []
    for count in (1, 1 + _STEPS):  # before each the prompt may be cached or not, for both alike
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(prompt, params, use_tqdm=False)
        start = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        taken.append(time.perf_counter() - start)
    return (taken[1] - taken[0]) / _STEPS


def measure(model: Path, caches: bool, lengths: list[int], turns: int) -> list[dict[str, float]]:
    """Return the seconds of a step after prompts of some lengths, which take turns."""
    with LLM(str(model), **_settings(enable_prefix_caching=caches)) as llm:
        _step_s(llm, _SHORT)
        return [{str(length): _step_s(llm, length) for length in lengths} for _ in range(turns)]


def _in_child(model: Path, caches: bool, turns: int, *lengths: int) -> list[dict[str, float]]:
    command = [sys.executable, __file__, "--measure", str(model), "--rounds", str(turns)]
    command += ["--lengths", *map(str, lengths), *(["--caches"] if caches else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _short_s(model: Path) -> float:
    """Return the seconds of a step after a short prompt, in a process of its own."""
    return statistics.median(turn[str(_SHORT)] for turn in _in_child(model, False, _REPETITIONS, _SHORT))


def _row(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    hybrid = _write(folder / name, SHAPES[name])
    needs = plan_engine(EngineConfig.from_arguments(str(hybrid), **_settings())).needs
    num_bytes = needs.weights + 2 * needs.state
    dense = _write(folder / f"{name}-dense", dense_twin(SHAPES[name], num_bytes))
    found: dict[str, list[float]] = {"decode": [], "tokens per second": []}
    for _ in range(rounds):
        own = _short_s(hybrid)
        found["decode"].append(_short_s(dense) / own)
        found["tokens per second"].append(1 / own)
    turns = _in_child(hybrid, True, rounds, _SHORT, _LONG)
    found["growth"] = [turn[str(_LONG)] / turn[str(_SHORT)] for turn in turns]
    figures = {key: [round(f(values), 3) for f in (statistics.median, min, max)] for key, values in found.items()}
    return {"shape": name, "MB a step": round(num_bytes / 1e6), "MB of states": round(needs.state / 1e6, 2), **figures}


def main() -> None:
    """Measure and print a JSON line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the shapes' checkpoints, and end")
    parser.add_argument("--tokenizer", type=Path, default=MODEL_DIRECTORY, metavar="FOLDER", help="what --write copies")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--caches", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.caches, options.lengths, options.rounds)))
        return
    if options.write is not None:
        for name in options.shapes:
            write_weights(_write(options.write / f"{name}-bf16", SHAPES[name], options.tokenizer))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.shapes:
            print(json.dumps(_row(name, options.rounds, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
