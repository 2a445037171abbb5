"""Measures matmuls and collectives on the devices of this machine."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels import choose
from pallas_kernels.linear import Fused, LinearKernel

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_FEATURES = {"cpu": 512, "gpu": 4096}  # of the weights that are multiplied, square as the projections of a model are
_WEIGHT_BYTES = {"cpu": 128 << 20, "gpu": 2 << 30}  # on all devices of a CPU, on each GPU; more than caches hold
COLLECTIVE_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_CHAIN = 16  # collectives, one after the other
_REPEATS = 7

Reduced = Callable[[Float[Array, " n"], int], Float[Array, " n"]]

_COLLECTIVES: dict[str, Reduced] = {
    "all-reduce": lambda x, count: lax.psum(x, "inner") / count,
    "all-gather": lambda x, count: lax.all_gather(x[: len(x) // count], "inner", tiled=True),
    "reduce-scatter": lambda x, count: jnp.tile(lax.psum_scatter(x, "inner", tiled=True) / count, count),
    "all-to-all": lambda x, count: lax.all_to_all(x, "inner", 0, 0, tiled=True),
    "collective-permute": lambda x, count: lax.ppermute(x, "inner", [(i, (i + 1) % count) for i in range(count)]),
}


def matmul_rates(devices: Sequence[jax.Device], dtype: str) -> list[tuple[int, float]]:
    """Return how fast matmuls run on all devices at the same time, by the number of rows.

    Args:
        devices: The devices. Those of a CPU share its arithmetic.
        dtype: Element type of the weights.

    Returns:
        Pairs of a number of rows, and multiplications and additions per second of each GPU, or of the CPU.
    """
    platform, count = devices[0].platform, len(devices)
    choice = choose("linear", platform=platform, device_kind=devices[0].device_kind, dtype=dtype)
    kernel, size = cast(LinearKernel, choice.implementation), _FEATURES[platform]
    mesh = Mesh(np.array(devices), ("device",))
    num_bytes = _WEIGHT_BYTES[platform] // (count if platform == "cpu" else 1)
    num_weights = max(1, num_bytes // (size * size * jnp.dtype(dtype).itemsize))
    first, *rest = kernel.packed_shape(size, size, dtype)
    split = NamedSharding(mesh, PartitionSpec("device"))
    make = jax.jit(lambda key: jax.random.normal(key, (count * first, *rest), dtype) / size**0.5, out_shardings=split)
    weights = [make(key) for key in jax.random.split(jax.random.key(0), num_weights)]

    def multiply(x: Array, weights: Sequence[Array]) -> Array:
        for weight in weights:
            x = kernel.matmul(x, weight, size, fused=Fused()).astype(x.dtype)
        return x

    specs = PartitionSpec(), PartitionSpec("device")
    program = jax.jit(jax.shard_map(multiply, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False))
    shared = count if platform == "cpu" else 1
    found = []
    for rows in ROWS:
        time_s = _median_seconds(program, jnp.ones((rows, size), dtype), weights)
        found.append((rows, 2 * rows * size * size * num_weights * shared / time_s))
    return found


def collective_times(devices: Sequence[jax.Device]) -> Iterator[tuple[str, int, int, float]]:
    """Yield the time of each kind of collective over 2, 4, … devices, and of a copy from one device to another.

    All devices take part, in groups, at the same time.

    Yields:
        The kind, the number of devices, bytes of the result on each device, and seconds.
    """
    total = len(devices)
    for count in (count for count in range(2, total + 1) if total % count == 0):
        mesh = Mesh(np.array(devices).reshape(total // count, count), ("outer", "inner"))
        for kind, exchange in _COLLECTIVES.items():
            for num_bytes in COLLECTIVE_BYTES:
                time_s = _collective_seconds(mesh, exchange, num_bytes)
                yield kind, count, num_bytes // count if kind == "reduce-scatter" else num_bytes, time_s
    if total > 1:
        for num_bytes in COLLECTIVE_BYTES:
            x = jax.device_put(np.ones(num_bytes // 4, np.float32), devices[0])
            yield "hand-over", 2, num_bytes, _median_seconds(jax.device_put, x, devices[1])


def _collective_seconds(mesh: Mesh, exchange: Reduced, num_bytes: int) -> float:
    count = mesh.shape["inner"]

    def chain(x: Array) -> Array:
        for _ in range(_CHAIN):
            x = exchange(x, count)
        return x

    specs = PartitionSpec(), PartitionSpec(("outer", "inner"))
    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))
    return _median_seconds(program, jnp.ones(num_bytes // 4)) / _CHAIN


def _median_seconds(function: Callable[..., Any], *given: Any) -> float:
    """Return the median time of several calls, after one that compiles."""
    jax.block_until_ready(function(*given))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(*given))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
