"""Products with quantized weights, beside what the machine allows: for ``bench_quantized.py``, one JSON object.

    python scripts/quantized_products.py --megabytes 512 --turns 9

A product at 1 row reads a weight that no cache holds: as many weights as ``--megabytes`` allow follow one another. Its
share is of the bandwidth that threads read with (``machine_limits.c``, in each turn: on shared machines it changes by
the minute) or, for float activations, of the lower of that and of what 1.5 cycles for 16 weights at the measured clock
allow. Products at 512 rows are compared with bfloat16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import linear_native, quantized_linear_native
from pallas_kernels.linear import Fused
from pallas_kernels.native_library import instructions, num_threads
from pallas_kernels.quantized import Form, random_records
from pallas_kernels.quantized_linear import INT4_CHANNEL, W8A8

_LIMITS = Path(__file__).with_name("machine_limits.c")
_CYCLES, _AT_ONCE = 1.5, 16  # of products with float activations, for weights
_INT4 = INT4_CHANNEL._replace(span=32, group=128)
_FORMS: dict[str, Form | None] = {
    "bf16": None,
    "int8": W8A8,
    "int4, int8 activations": _INT4._replace(activations="group"),
    "int4, float activations": _INT4._replace(activations="bfloat16"),
}


def _limits_program(folder: str) -> list[str]:
    """Compile what measures the machine's limits; return the command without the megabytes."""
    program = str(Path(folder) / "limits")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-mavx2", "-pthread", str(_LIMITS), "-o", program], check=True)
    return [program, str(num_threads())]


def _measured_limits(program: list[str], megabytes: int) -> dict[str, float]:
    """Return the bandwidth of reads in GB/s, and the clock in GHz."""
    done = subprocess.run([*program, str(megabytes)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _packed(form: Form | None, outer: int, inner: int) -> np.ndarray:
    if form is None:
        weight = np.random.default_rng(0).standard_normal((outer, inner)).astype(jnp.bfloat16)
        return linear_native.pack(weight)
    return quantized_linear_native.pack(np.asarray(random_records(form, outer, inner, jax.random.key(0))), form)


def _runner(form: Form | None, rows: int, outer: int, inner: int, count: int) -> tuple[Callable[[], Any], int]:
    """Return what multiplies by ``count`` weights, one after the other, and the bytes of all."""
    first = _packed(form, outer, inner)
    weights = [jnp.asarray(first if number == 0 else first.copy()) for number in range(count)]
    x = jax.random.normal(jax.random.key(1), (rows, inner))

    @jax.jit
    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for weight in weights:
            if form is None:
                y = linear_native.matmul(x, weight, outer, fused=Fused())
            else:
                y = quantized_linear_native.matmul(x, weight, outer, form, fused=Fused())
            x = x + 0 * y[:, :1]  # the next product waits for this one
        return x

    run(x, *weights).block_until_ready()
    return lambda: run(x, *weights).block_until_ready(), count * first.nbytes


def in_turns(runners: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(turns):
        for name, run in runners.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return taken


def measure(outer: int, inner: int, megabytes: int, turns: int) -> dict[str, Any]:
    """Return the limits, and for each form shares of them at 1 row and speeds at 512 rows."""
    counts, runners, sizes = dict[str, int](), dict[str, Callable[[], Any]](), dict[str, int]()
    for name, form in _FORMS.items():
        one = _packed(form, outer, inner).nbytes
        counts[name] = max(2, (megabytes << 20) // one)
        runners[name], sizes[name] = _runner(form, 1, outer, inner, counts[name])
    cold: dict[str, list[float]] = {name: [] for name in _FORMS}
    limits = []
    with tempfile.TemporaryDirectory() as folder:
        program = _limits_program(folder)
        for _ in range(turns):
            limits.append(_measured_limits(program, megabytes))
            for name, seconds in in_turns(runners, 1).items():
                cold[name] += seconds
    many = in_turns({name: _runner(form, 512, outer, inner, 1)[0] for name, form in _FORMS.items()}, turns)
    found: dict[str, Any] = {"instructions": instructions(), "threads": num_threads(), "forms": {}}
    for field in ("read_gb_s", "clock_ghz"):
        found[field] = round(statistics.median(each[field] for each in limits), 2)
    for name in _FORMS:
        num_weights = counts[name] * outer * inner if "float" in name else 0
        shares = [_share(*each, sizes[name], num_weights) for each in zip(cold[name], limits, strict=True)]
        seconds = statistics.median(cold[name])
        flops = 2 * 512 * outer * inner / statistics.median(many[name]) / 1e9
        ratios = [one / other for one, other in zip(many["bf16"], many[name], strict=True)]
        found["forms"][name] = {
            "cold_gb_s": round(sizes[name] / seconds / 1e9, 2),
            "cold_us": round(1e6 * seconds / counts[name], 1),
            **{"cold_share": round(statistics.median(shares), 3), "gop_s_512": round(flops, 1)},
            "times_bf16_512": round(statistics.median(ratios), 3),
        }
    return found


def _share(seconds: float, limits: dict[str, float], num_bytes: int, num_weights: int) -> float:
    """Return the share of the limit: of reading bytes, or, if it is more, of computing with weights."""
    issue = num_threads() * limits["clock_ghz"] * _AT_ONCE / _CYCLES
    return max(num_bytes / limits["read_gb_s"], num_weights / issue) / seconds / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=512, help="of weights at 1 row, more than caches hold")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    print(json.dumps(measure(options.outer, options.inner, options.megabytes, options.turns)))


if __name__ == "__main__":
    main()
