"""Plan the memory of an engine's devices before loading, and report its use afterwards."""

import bisect
import ctypes
import ctypes.util
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import MemoryPlanError
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.layers.kv_layout import attended
from jaxserve.scheduling.page_allocator import KVWindow, max_held_pages
from sharding.mesh import Device, PlannedDevice

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_POOL_BYTES = GIB
_RESERVE_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30}
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT_FRACTION = 0.75
_LOGITS_BYTES = 256 << 20  # of the samples of a step with drafts, in float32
STEPS_IN_FLIGHT = 2
"""Steps in flight with async scheduling in which one sequence can sample; each further stage adds one for others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Memory that an engine needs per device, derived from shapes.

    Attributes:
        weights: Bytes of the parameters.
        drafter: Those of them that are the drafter's.
        page: Bytes of one KV page, over all pools.
        temporaries: Estimated temporary bytes of the largest step.
        trials: Bytes in which XLA tries kernels out for the largest product on a GPU while weights are loaded around
            them: they can leave a gap that nothing else fits into.
        slots: Bytes of the slots' state besides pages.
        state: Bytes of the state page of one sequence, over all recurrent layers.
        states_per_sequence: State pages of a running sequence.
        num_checkpoints: State pages of the prefix cache, besides those of running sequences.
        page_size: Tokens per page.
        max_model_len: Maximum context length in tokens.
        max_num_seqs: Most running sequences.
        windows: Sliding window of each page table; None for full attention.
    """

    weights: int
    page: int
    temporaries: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    slots: int = 0
    state: int = 0
    states_per_sequence: int = 1
    num_checkpoints: int = 0
    trials: int = 0
    drafter: int = 0
    windows: tuple[KVWindow | None, ...] = (None,)

    @property
    def num_states(self) -> int:
        """Number of state pages; 0 for a model without recurrent layers."""
        return self.max_num_seqs * self.states_per_sequence + self.num_checkpoints if self.state else 0

    @property
    def table_pages(self) -> int:
        """Pages of the longest context in one table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def request_pages(self) -> int:
        """The most pages that one request of ``max_model_len`` holds, over all tables."""
        return max_held_pages(self.table_pages, self.windows)

    def longest_request(self, num_pages: int) -> int:
        """Return the length in tokens of the longest request that fits into ``num_pages`` pages."""
        lengths = range(self.table_pages + 1)
        longest = bisect.bisect_right(lengths, num_pages, key=lambda length: max_held_pages(length, self.windows)) - 1
        return min(longest * self.page_size, self.max_model_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Memory use of one device; ``lines`` are pairs of a name and bytes."""

    lines: tuple[tuple[str, int], ...]
    total: int
    num_pages: int
    page_size: int
    max_model_len: int
    request_pages: int
    num_tables: int
    device: str

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit into all pages, without sliding windows."""
        return self.num_pages // self.num_tables * self.page_size

    @property
    def max_concurrency(self) -> float:
        """Number of requests of ``max_model_len`` that fit into all pages."""
        return self.num_pages / self.request_pages

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        rows = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in self.lines]
        request = self.request_pages * self.page_size // self.num_tables
        mean = "" if self.num_tables == 1 else " (mean over layers)"
        window = f"Sliding window: a request holds pages for at most {request:,} tokens{mean}"
        return "\n".join(
            [
                f"Memory of each {self.device} device:",
                *rows,
                f"  {'total':<{width}}  {self.total / GIB:8.3f} GiB",
                f"{self.device} KV cache size: {self.num_tokens:,} tokens",
                *([window] if request < self.max_model_len else []),
                f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
            ]
        )


def set_gpu_memory_fraction(fraction: float) -> None:
    """Set the fraction of each GPU's memory that JAX preallocates, unless an environment variable sets it.

    JAX preallocates when its backend starts, 75% by default, and never grows. If the backend is already running, this
    has no effect and the engine uses what is preallocated.
    """
    if not any(os.environ.get(name) for name in _FRACTION_VARIABLES):
        os.environ[_FRACTION_VARIABLES[0]] = str(fraction)


def device_memory_bytes(device: Device) -> int:
    """Return the total memory of a device in bytes; for CPUs that of the machine or the container."""
    if isinstance(device, PlannedDevice):
        return device.memory_bytes
    if device.platform != "cpu":
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            return int(stats["bytes_limit"] / _gpu_fraction())
        raise MemoryPlanError(f"{device.device_kind} does not report its memory; set kv_cache_memory_bytes")
    return machine_memory_bytes()


def machine_memory_bytes() -> int:
    """Return the memory of the machine or the container in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path)
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (0 if not on Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usable_fraction(device: Device, utilization: float) -> float:
    """Return the fraction of a device's memory that an engine may use: on GPUs at most what JAX preallocates."""
    is_free = device.platform == "cpu" or isinstance(device, PlannedDevice)
    return utilization if is_free else min(utilization, _gpu_fraction())


def _gpu_fraction() -> float:
    """Return the fraction of each GPU's memory that JAX preallocates."""
    return next((float(os.environ[name]) for name in _FRACTION_VARIABLES if os.environ.get(name)), _DEFAULT_FRACTION)


class PageBudget(NamedTuple):
    """How much of a device's memory is for pages, in bytes.

    Attributes:
        usable: What an engine may use.
        reserve: What it leaves to XLA and the driver of that.
        left: What is left for pages; negative if the rest does not fit.
    """

    usable: int
    reserve: int
    left: int


def page_budget(
    needs: MemoryNeeds, total: int, utilization: float, platform: str, devices_sharing: int = 1
) -> PageBudget:
    """Return the memory for pages; the arguments are those of :func:`plan_pages`."""
    usable = int(total * utilization) // devices_sharing
    reserve = _RESERVE_BYTES["cpu"] if platform == "cpu" else _RESERVE_BYTES["gpu"] + needs.trials
    reserve //= devices_sharing
    others = needs.weights + needs.temporaries + needs.slots + needs.num_states * needs.state
    return PageBudget(usable, reserve, usable - reserve - others)


def _too_large(needs: MemoryNeeds, platform: str, reserve: str, allowed: str) -> str:
    """Return the message about a model that does not fit.

    Args:
        needs: Memory needs of the engine.
        platform: JAX platform name.
        reserve: Memory in reserve, in words.
        allowed: Memory that may be used, in words.
    """
    remedy, states = "a smaller dtype", ""
    if platform != "cpu":
        remedy = "a larger tensor_parallel_size or pipeline_parallel_size, a smaller dtype"
    if needs.state:
        states = f"{gib(needs.num_states * needs.state)} for the states of max_num_seqs={needs.max_num_seqs} sequences"
        states += f" and {needs.num_checkpoints} of the prefix cache, " if needs.num_checkpoints else ", "
        remedy += ", a smaller max_num_seqs or prefix_cache_state_bytes"
    drafter = f" ({gib(needs.drafter)} of them of the draft model)" if needs.drafter else ""
    return (
        f"the model does not fit: each device needs {gib(needs.weights)} for weights{drafter}, {states}"
        f"{gib(needs.temporaries + needs.slots)} for the largest step and {reserve} in reserve, but may use {allowed}; "
        f"use {remedy} or a smaller max_num_batched_tokens"
    )


def plan_pages(
    needs: MemoryNeeds,
    *,
    total: int,
    utilization: float,
    platform: str,
    pool_bytes: int | None,
    num_pages: int | None,
    devices_sharing: int = 1,
) -> int:
    """Return the number of KV pages per device.

    Args:
        needs: Memory needs of the engine.
        total: The device's memory in bytes.
        utilization: Fraction of ``total`` to use.
        platform: JAX platform name.
        pool_bytes: Bytes for the pages; None for the default.
        num_pages: Number of pages; None for the default.
        devices_sharing: Number of devices that share the memory, as virtual CPU devices do.

    Raises:
        MemoryPlanError: The weights, or the pages of one request of ``max_model_len``, do not fit. The message has the
            sizes, and settings that would fit.
    """
    usable, reserve, left = page_budget(needs, total, utilization, platform, devices_sharing)
    if left <= 0:
        allowed = f"{gib(usable)} (gpu_memory_utilization={utilization} of {gib(total)})"
        raise MemoryPlanError(_too_large(needs, platform, gib(reserve), allowed))
    if num_pages is None:
        num_pages = _default_pages(needs, left, platform, pool_bytes)
    if num_pages * needs.page > left:
        raise MemoryPlanError(
            f"{num_pages} KV pages need {gib(num_pages * needs.page)} on each device, but only {gib(left)} of the "
            f"usable {gib(usable)} are left; use at most num_gpu_blocks_override={left // needs.page} or "
            f"kv_cache_memory_bytes={left}"
        )
    if num_pages < needs.request_pages:
        longest = needs.longest_request(num_pages)
        hint = f"use max_model_len={longest}, or " if longest else ""
        raise MemoryPlanError(
            f"one request of max_model_len={needs.max_model_len} tokens needs {needs.request_pages} KV pages "
            f"({gib(needs.request_pages * needs.page)} on each device), but there are {num_pages} "
            f"({gib(num_pages * needs.page)}); {hint}raise kv_cache_memory_bytes, num_gpu_blocks_override or "
            "gpu_memory_utilization"
        )
    return num_pages


def _default_pages(needs: MemoryNeeds, left: int, platform: str, pool_bytes: int | None) -> int:
    """Return the default number of pages: at most what ``max_num_seqs`` sequences of full length can use."""
    limit = needs.request_pages * needs.max_num_seqs
    if pool_bytes is not None:
        return min(limit, pool_bytes // max(needs.page, 1))
    if platform != "cpu":
        pages = min(limit, left // max(needs.page, 1))
        return max(pages // 16 * 16, min(pages, 16))  # rounded, so that the next start hits the compilation cache
    page = max(needs.page, 1)
    return min(limit, max(CPU_POOL_BYTES // page, needs.request_pages), left // page)


def gib(size: int) -> str:
    """Return a size in GiB, for messages."""
    return f"{size / GIB:.2f} GiB"


def most_samples(sharded: ShardedModel, max_num_batched_tokens: int, max_samples: int, num_stages: int) -> int:
    """Return the most samples of a step: one per row, and one per draft as far as all logits stay small."""
    num_rows = -(-sharded.num_slots // num_stages)
    affordable = max(num_rows, _LOGITS_BYTES // (4 * sharded.config.vocab_size))
    return min(num_rows * max_samples, affordable, max_num_batched_tokens)


def memory_needs(
    sharded: ShardedModel, max_num_batched_tokens: int, max_samples: int, max_step_samples: int
) -> MemoryNeeds:
    """Return the memory that one stage needs on each of its devices."""
    assert sharded.max_model_len is not None
    model, abstract = sharded.config, sharded.abstract_model
    page = sharded.placed(sharded.mesh, sharded.num_pages + 1).pool_bytes - sharded.pool_bytes
    token = 3 * abstract.layer_width
    itemsize = jnp.dtype(sharded.policy.activations).itemsize
    step_tokens = max_num_batched_tokens + STEPS_IN_FLIGHT * max_samples + sharded.num_drafts
    scores = model.vocab_size  # of each sample; processors see whole rows
    if sharded.parallel.keeps_logits and not sharded.processors:
        scores = sharded.vocab_width // sharded.parallel.parts(sharded.parallel.vocab)
    logits = max_step_samples * scores * 4 * 4 if sharded.is_last else 0
    return MemoryNeeds(
        weights=sharded.weight_bytes,
        drafter=0 if sharded.drafter is None else sharded.drafter.sharded.weight_bytes,
        page=page,
        temporaries=max_num_batched_tokens * (token * itemsize + _exchanged_per_token(sharded)) + logits,
        page_size=sharded.page_size,
        max_model_len=sharded.max_model_len,
        max_num_seqs=sharded.num_slots,
        slots=sharded.slot_state_bytes,
        state=sharded.state_bytes,
        states_per_sequence=max(1, sharded.num_states // sharded.num_slots),
        trials=sharded.largest_weight_bytes + max_num_batched_tokens * abstract.layer_width * itemsize,
        windows=tuple(
            None if window is None else KVWindow(window, sharded.page_size, step_tokens)
            for window in sharded.kv_layout.windows
        ),
    )


def _exchanged_per_token(sharded: ShardedModel) -> int:
    """Return the bytes per token of a layer's queries of all heads, and of their partial attention as computed, as sent
    and as received, in float32; 0 if no devices share tokens."""
    if sharded.parallel.num_token_parts == 1:
        return 0
    specs = attended(sharded.abstract_model.kv_specs)
    return 4 * max(each.num_heads * (each.head_dim + 3 * ((each.value_dim or each.head_dim) + 2)) for each in specs)


def fit_to_memory(
    config: EngineConfig, stages: Sequence[MemoryNeeds], device: Device, num_devices: int
) -> tuple[MemoryNeeds, int]:
    """Return the needs of the stage that leaves room for the fewest pages, and their number, which all stages have.

    With max_model_len=-1, the context length is reduced to what fits.
    """
    total = device_memory_bytes(device)
    sharing = num_devices if device.platform == "cpu" else 1
    settings = {
        "total": total,
        "utilization": usable_fraction(device, config.gpu_memory_utilization),
        "platform": device.platform,
        "pool_bytes": config.kv_cache_memory_bytes,
        "num_pages": config.num_gpu_blocks_override,
        "devices_sharing": sharing,
    }
    longest = stages[0].max_model_len
    if config.max_model_len == -1:
        for needs in stages:
            single_token = dataclasses.replace(needs, max_model_len=1)
            pages = plan_pages(dataclasses.replace(single_token, max_num_seqs=needs.request_pages), **settings)
            longest = min(longest, needs.longest_request(pages))
        if longest < stages[0].max_model_len:
            logger.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit in available memory",
                stages[0].max_model_len,
                longest,
            )
    fitted = [dataclasses.replace(needs, max_model_len=longest) for needs in stages]
    planned = [(plan_pages(needs, **settings), needs) for needs in fitted]
    num_pages, needs = min(planned, key=lambda stage: (stage[0], -stage[1].weights))
    return needs, num_pages


def return_freed_memory() -> None:
    """Return freed heap memory to the system (glibc only); compiling leaves hundreds of MiB."""
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)
