"""What a layer's recurrence takes in a prefill, beside the layer's matmuls, on the CPU: a JSON line for each layer.

    python scripts/recurrence_share.py --turns 15

512 tokens in one row through the native kernel (convolution, recurrence, norm and gate), and through native matmuls
with the layer's bfloat16 weights (input and output projections, and the MLP), in turns; the ratio is the median over
turns, with the least and the most. *Kept states* is what the layer takes more where it keeps its state after every 64
tokens for the prefix cache, relative to both together.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import delta_net, delta_net_native, linear_native, mamba2, mamba2_native
from pallas_kernels.linear import Fused
from pallas_kernels.native_library import instructions, num_threads
from pallas_kernels.recurrent_states import States
from scripts.quantized_products import in_turns


class Layer(NamedTuple):
    """A recurrent layer: its operation and bench case, and the widths of the model and of its MLP."""

    operation: Any
    implementation: Any
    bench: str
    width: int
    mlp: int


_KEPT_EVERY = 64
LAYERS: Mapping[str, Layer] = {
    "Qwen3.5-0.8B": Layer(delta_net, delta_net_native, "qwen3.5_0.8b_prefill_512", 1024, 3584),
    "Granite-4-h-350m": Layer(mamba2, mamba2_native, "granite_350m_prefill_512", 768, 2048),
}


def _recurrence(layer: Layer, kept: Sequence[int] = ()) -> Callable[[], Any]:
    """Return a call of the kernel, which updates its states in place and keeps those after some numbers of tokens."""
    case = layer.operation.BENCHES[layer.bench]
    case = case._replace(rows=(case.rows[0]._replace(snapshots=tuple(kept)),))
    inputs = layer.operation.make_inputs(case, jax.random.key(0))
    prepared = layer.operation.prepare(layer.implementation, case, inputs)
    if layer.operation is mamba2:
        norm = mamba2.GroupNorm(prepared.norm_weight, 1e-5, case.norm_groups)
        settings: dict[str, Any] = {"limits": case.limits, "norm": norm}
    else:
        settings = {"eps": 1e-6}

    @partial(jax.jit, donate_argnums=0)
    def compute(states: States, projected: jax.Array, weights: Any, rows: Any) -> Any:
        return layer.implementation.update(projected, weights, states, rows, sizes=case.heads, **settings)

    latest = [prepared.states]

    def call() -> None:
        y, latest[0] = compute(latest[0], prepared.projected, prepared.weights, prepared.rows)
        jax.block_until_ready((y, latest[0]))

    return call


def _matmuls(sizes: Sequence[tuple[int, int]], num_rows: int) -> Callable[[], None]:
    """Return a call of matmuls with bfloat16 weights of these outputs and inputs."""
    random = np.random.default_rng(0)
    weights = [
        jnp.asarray(linear_native.pack(random.standard_normal(size).astype(np.dtype(jnp.bfloat16)))) for size in sizes
    ]
    rows = [jnp.asarray(random.standard_normal((num_rows, inner)), jnp.float32) for _, inner in sizes]

    @jax.jit
    def compute(rows: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        return [
            linear_native.matmul(x, weight, outer, fused=Fused())
            for x, weight, (outer, _) in zip(rows, weights, sizes, strict=True)
        ]

    return lambda: jax.block_until_ready(compute(rows, weights))


def _measure(layer: Layer, turns: int) -> dict[str, Any]:
    """Return the median microseconds of both for one token, and their ratio."""
    case = layer.operation.BENCHES[layer.bench]
    heads, num_tokens = case.heads, case.num_tokens
    projections = [(heads.width, layer.width), (layer.width, heads.inner)]
    sizes = [*projections, (2 * layer.mlp, layer.width), (layer.width, layer.mlp)]
    runners = {
        "recurrence": _recurrence(layer),
        "matmuls": _matmuls(sizes, num_tokens),
        "with kept states": _recurrence(layer, range(_KEPT_EVERY, num_tokens, _KEPT_EVERY)),
    }
    taken = [seconds[1:] for seconds in in_turns(runners, turns + 1).values()]  # the first turn compiles
    recurrence, matmuls, _ = (1e6 * statistics.median(seconds) / num_tokens for seconds in taken)
    ratios = [one / other for one, other, _ in zip(*taken, strict=True)]
    kept = [(more - one) / (one + other) for one, other, more in zip(*taken, strict=True)]
    return {
        "recurrence, µs per token": round(recurrence, 2),
        "matmuls, µs per token": round(matmuls, 2),
        "ratio": [round(f(ratios), 3) for f in (statistics.median, min, max)],
        "kept states": [round(f(kept), 4) for f in (statistics.median, min, max)],
    }


def main() -> None:
    """Measure and print a JSON line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    for name, layer in LAYERS.items():
        about = {"layer": name, "instructions": instructions(), "threads": num_threads()}
        print(json.dumps({**about, **_measure(layer, options.turns)}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
