"""Where a device's memory goes: planned before a byte is loaded, and accounted for afterwards."""

import bisect
import ctypes
import ctypes.util
import dataclasses
import os
from pathlib import Path

from jaxserve.errors import MemoryPlanError
from jaxserve.scheduling.page_allocator import KVWindow, max_held_pages
from sharding.mesh import Device

GIB = 1 << 30
_CPU_POOL_BYTES = GIB
_RESERVE_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30}
_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_USUAL_SHARE = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What a device has to hold, in bytes, known from shapes alone.

    Attributes:
        weights: Parameters.
        page: One KV page, in all pools.
        temporaries: Estimate of what the largest step takes while it runs.
        slots: What is kept of running sequences beside their pages.
        page_size: Tokens per page.
        max_model_len: Longest context.
        max_num_seqs: Most sequences at once.
        windows: For each page table, what its layers see; None for all.
    """

    weights: int
    page: int
    temporaries: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    slots: int = 0
    windows: tuple[KVWindow | None, ...] = (None,)

    @property
    def table_pages(self) -> int:
        """Pages that the longest context is long."""
        return -(-self.max_model_len // self.page_size)

    @property
    def request_pages(self) -> int:
        """Pages that one request of the longest length holds at most."""
        return max_held_pages(self.table_pages, self.windows)

    def longest_request(self, num_pages: int) -> int:
        """Return the tokens of the longest single request that fits into this many pages."""
        lengths = range(self.table_pages + 1)
        longest = bisect.bisect_right(lengths, num_pages, key=lambda length: max_held_pages(length, self.windows)) - 1
        return min(longest * self.page_size, self.max_model_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Memory of one device, line by line, in bytes."""

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
        """Tokens that all pages hold, of contexts that no sliding window cuts."""
        return self.num_pages // self.num_tables * self.page_size

    @property
    def max_concurrency(self) -> float:
        """Requests of the longest length that all pages hold at once."""
        return self.num_pages / self.request_pages

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        rows = [f"  {name:<{width}}  {size / GIB:8.3f} GiB" for name, size in self.lines]
        request = self.request_pages * self.page_size // self.num_tables
        mean = "" if self.num_tables == 1 else ", on average over the layers"
        window = f"Sliding window: a request holds pages of {request:,} tokens at most{mean}"
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


def ask_for_gpu_memory(share: float) -> None:
    """Lets JAX take this share of each GPU's memory, unless the environment says otherwise.

    JAX takes its share all at once when its backend starts, three quarters by itself, and hands out none beyond it;
    to a backend that runs already this comes too late, and the engine uses what that has taken.
    """
    if not any(os.environ.get(name) for name in _SHARE_VARIABLES):
        os.environ[_SHARE_VARIABLES[0]] = str(share)


def device_memory_bytes(device: Device) -> int:
    """Memory of a device, all of it: what the platform reports, or for a CPU the machine's or the container's."""
    if device.platform != "cpu":
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            return int(stats["bytes_limit"] / _gpu_share())
        raise MemoryPlanError(f"{device.device_kind} does not report its memory; give kv_cache_memory_bytes")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path)
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def resident_bytes() -> int:
    """Memory this process holds (Linux; 0 elsewhere)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usable_share(device: Device, utilization: float) -> float:
    """The share of a device's memory that an engine may use: what is asked for, on GPUs as far as JAX has it."""
    return utilization if device.platform == "cpu" else min(utilization, _gpu_share())


def _gpu_share() -> float:
    """The share of each GPU's memory that JAX takes."""
    return next((float(os.environ[name]) for name in _SHARE_VARIABLES if os.environ.get(name)), _USUAL_SHARE)


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
    """How many KV pages each device gets.

    Args:
        needs: What a device has to hold.
        total: The device's memory in bytes.
        utilization: Share of it to use.
        platform: JAX's platform name.
        pool_bytes: Memory of the pages, where given.
        num_pages: Number of pages, where given.
        devices_sharing: Devices that share that memory (virtual CPU devices do).

    Raises:
        MemoryPlanError: The weights, or the pages of one request of the longest length, do not fit; the message has the
            numbers and the settings that would fit.
    """
    usable = int(total * utilization) // devices_sharing
    reserve = _RESERVE_BYTES.get(platform, _RESERVE_BYTES["gpu"]) // devices_sharing
    left = usable - reserve - needs.weights - needs.temporaries - needs.slots
    less = "A smaller dtype" if platform == "cpu" else "A larger tensor_parallel_size, a smaller dtype"
    if left <= 0:
        raise MemoryPlanError(
            f"the model does not fit: {_gib(needs.weights)} of weights, {_gib(needs.temporaries + needs.slots)} for "
            f"the largest step and {_gib(reserve)} of reserve on each device, which may use {_gib(usable)} "
            f"(gpu_memory_utilization={utilization} of {_gib(total)}). {less} or a smaller max_num_batched_tokens "
            "takes less"
        )
    if num_pages is None:
        num_pages = _default_pages(needs, left, platform, pool_bytes)
    if num_pages * needs.page > left:
        raise MemoryPlanError(
            f"{num_pages} KV pages take {_gib(num_pages * needs.page)} on each device, {_gib(left)} is left of the "
            f"{_gib(usable)} it may use; at most num_gpu_blocks_override={left // needs.page} or "
            f"kv_cache_memory_bytes={left} fits"
        )
    if num_pages < needs.request_pages:
        longest = needs.longest_request(num_pages)
        hint = f"max_model_len={longest} would fit; or g" if longest else "G"
        raise MemoryPlanError(
            f"one request of max_model_len={needs.max_model_len} tokens needs {needs.request_pages} KV pages "
            f"({_gib(needs.request_pages * needs.page)} on each device), but there are {num_pages} "
            f"({_gib(num_pages * needs.page)}). {hint}ive more with kv_cache_memory_bytes, num_gpu_blocks_override "
            "or gpu_memory_utilization"
        )
    return num_pages


def _default_pages(needs: MemoryNeeds, left: int, platform: str, pool_bytes: int | None) -> int:
    """Pages where no number is given: never more than all sequences at full length could use."""
    most = needs.request_pages * needs.max_num_seqs
    if pool_bytes is not None:
        return min(most, pool_bytes // needs.page)
    if platform != "cpu":
        pages = min(most, left // needs.page)
        return max(pages // 16 * 16, min(pages, 16))  # rounded, so that the next start finds the same shapes compiled
    return min(most, max(_CPU_POOL_BYTES // needs.page, needs.request_pages), left // needs.page)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system (glibc); compiling leaves hundreds of megabytes of it."""
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)
