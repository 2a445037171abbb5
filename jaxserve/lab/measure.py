"""Measures matmuls and collectives on the devices of this machine."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxserve.lab.links import Link, collective_seconds
from pallas_kernels import choose
from pallas_kernels.linear import Fused, LinearKernel
from sharding import MeshShape, data_slices, make_mesh, whole_and_split
from sharding.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_SIZES = {"cpu": (512, 2048), "gpu": (4096, 16384)}  # features of hidden states and within MLPs
_WEIGHT_BYTES = {"cpu": 128 << 20, "gpu": 2 << 30}  # on all devices of a CPU, on each GPU; more than caches hold
COLLECTIVE_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_CHAIN = 16  # collectives, one after the other
_ROUNDS, _CALLS = 7, 5
_LEAST_SHARE = 0.3  # of the time of MLPs that is not all-reduces, however slow these were when they were measured

_Key = TypeVar("_Key")
Exchange = Callable[[Float[Array, " n"], int], Float[Array, " n"]]

_COLLECTIVES: dict[str, Exchange] = {
    "all-reduce": lambda x, count: all_reduce(x, "tensor") / count,
    "all-gather": lambda x, count: all_gather(x[: len(x) // count], "tensor", 0),
    "reduce-scatter": lambda x, count: jnp.tile(reduce_scatter(x, "tensor", 0) / count, count),
    "all-to-all": lambda x, count: all_to_all(x.reshape(count, -1), "tensor").reshape(-1),
    "collective-permute": lambda x, count: lax.ppermute(x, "tensor", [(i, (i + 1) % count) for i in range(count)]),
}


def matmul_rates(devices: Sequence[Any], dtype: str, link: Link) -> Iterator[tuple[int, int, float]]:
    """Yield how fast the MLPs of tensor parallelism run: a weight split by outputs, one by inputs, and an all-reduce.

    All devices take part at the same time, in groups that each run a program of their own, as replicas do. The time of
    the all-reduce does not count, but that in which devices wait for each other there does.

    Args:
        devices: The devices. Those of a CPU share its arithmetic.
        dtype: Element type of the weights.
        link: Measured times of collectives.

    Yields:
        Devices of a program, rows, and multiplications and additions per second of each GPU, or of the CPU.
    """
    width, inner = _SIZES[devices[0].platform]
    programs = {count: _blocks(devices, count, dtype) for count in _group_sizes(devices)}
    cases = {(count, rows): partial(program, rows) for count, (program, _) in programs.items() for rows in ROWS}
    for (count, rows), time_s in _seconds_of(cases).items():
        num_blocks = programs[count][1]
        exchanged_s = num_blocks * collective_seconds("all-reduce", 4 * rows * width, count, link)
        share = len(devices) / count if devices[0].platform == "cpu" else 1 / count
        flops = 4 * rows * width * inner * num_blocks * share
        yield count, rows, flops / max(time_s - exchanged_s, _LEAST_SHARE * time_s)


def _blocks(devices: Sequence[Any], count: int, dtype: str) -> tuple[Callable[[int], Any], int]:
    """Return a function that computes a chain of MLPs, in each group of ``count`` devices, for a number of rows, and
    how many MLPs these are."""
    platform, total, meshes = devices[0].platform, len(devices), data_slices(_groups(devices, count))
    choice = choose("linear", platform=platform, device_kind=devices[0].device_kind, dtype=dtype)
    kernel, (width, inner) = cast(LinearKernel, choice.implementation), _SIZES[platform]
    inner //= count
    block_bytes = 2 * width * inner * jnp.dtype(dtype).itemsize * (total if platform == "cpu" else 1)
    num_blocks = max(1, _WEIGHT_BYTES[platform] // block_bytes)

    def weights(mesh: Mesh, outer: int, inner: int, scale: int) -> list[Array]:
        first, *rest = kernel.packed_shape(outer, inner, dtype)
        shape, (_, split) = (count * first, *rest), whole_and_split(mesh)
        make = jax.jit(lambda key: jax.random.normal(key, shape, dtype) / scale**0.5, out_shardings=split)
        return [make(key) for key in jax.random.split(jax.random.key(0), num_blocks)]

    def multiply(x: Array, blocks: Sequence[tuple[Array, Array]]) -> Array:
        for first, second in blocks:
            y = kernel.matmul(x, first, inner, fused=Fused()).astype(x.dtype)
            x = all_reduce(kernel.matmul(y, second, width, fused=Fused()), "tensor").astype(x.dtype)
        return x

    def chain(mesh: Mesh) -> Callable[[int], Array]:
        whole, split = whole_and_split(mesh)
        specs = whole.spec, split.spec
        program = jax.jit(jax.shard_map(multiply, mesh=mesh, in_specs=specs, out_specs=split.spec, check_vma=False))
        given = {rows: jax.device_put(jnp.ones((rows, width), dtype), whole) for rows in ROWS}
        first, second = weights(mesh, inner, width, width), weights(mesh, width, inner, inner * count)
        blocks = list(zip(first, second, strict=True))
        return lambda rows: program(given[rows], blocks)

    chains = [chain(mesh) for mesh in meshes]
    return lambda rows: [run(rows) for run in chains], num_blocks


def collective_times(devices: Sequence[Any]) -> Iterator[tuple[str, int, int, float]]:
    """Yield the time of each kind of collective over 2, 4, … devices.

    All devices take part, in groups, at the same time; if they belong to several processes, each calls this.

    Yields:
        The kind, the number of devices, bytes of the result on each device, and seconds.
    """
    cases = {
        (kind, count, num_bytes): _exchanges(devices, count, exchange, num_bytes)
        for count in _group_sizes(devices)[1:]
        for kind, exchange in _COLLECTIVES.items()
        for num_bytes in COLLECTIVE_BYTES
    }
    for (kind, count, num_bytes), time_s in _seconds_of(cases).items():
        yield kind, count, num_bytes // count if kind == "reduce-scatter" else num_bytes, time_s / _CHAIN


def hand_over_times(devices: Sequence[Any]) -> Iterator[tuple[str, int, int, float]]:
    """Yield the time of a copy from one device to another of this process, as ``collective_times`` does."""
    if len(devices) < 2:
        return
    given = {
        num_bytes: jax.device_put(np.ones(num_bytes // 4, np.float32), devices[0]) for num_bytes in COLLECTIVE_BYTES
    }
    copies = {num_bytes: partial(jax.device_put, x, devices[1]) for num_bytes, x in given.items()}
    for num_bytes, time_s in _seconds_of(copies).items():
        yield "hand-over", 2, num_bytes, time_s


def _exchanges(devices: Sequence[Any], count: int, exchange: Exchange, num_bytes: int) -> Callable[[], Any]:
    """Return a function that runs a chain of collectives in groups of ``count`` devices."""
    mesh = _groups(devices, count)

    def chain(x: Array) -> Array:
        for _ in range(_CHAIN):
            x = exchange(x, count)
        return x

    whole, split = whole_and_split(mesh)
    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=whole.spec, out_specs=split.spec, check_vma=False))
    return partial(program, jnp.ones(num_bytes // 4))


def _group_sizes(devices: Sequence[Any]) -> list[int]:
    """Return the sizes of groups that the devices can be divided into, ascending."""
    return [count for count in range(1, len(devices) + 1) if len(devices) % count == 0]


def _groups(devices: Sequence[Any], count: int) -> Mesh:
    """Return a mesh of groups of ``count`` devices along ``tensor``."""
    return make_mesh(MeshShape(data=len(devices) // count, tensor=count), list(devices))


def _seconds_of(cases: Mapping[_Key, Callable[[], Any]]) -> dict[_Key, float]:
    """Return the time of each function: of several rounds through all of them the median, of a round that of calls.

    A machine that is slow for a moment is so in one round of each.
    """
    for function in cases.values():
        jax.block_until_ready(function())  # compiles
    found = [{key: _median_seconds(function) for key, function in cases.items()} for _ in range(_ROUNDS)]
    return {key: statistics.median(times[key] for times in found) for key in cases}


def _median_seconds(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
