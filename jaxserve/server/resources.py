"""This process's use of the machine, named as in Prometheus' own clients, and a fix that keeps its memory flat."""

import asyncio
import contextlib
import ctypes
import os
import resource
import sys
import time
from pathlib import Path

from jaxserve.api.metric_types import Counter, Gauge, Metric

LARGE_BUFFER_BYTES = 128 << 10
"""glibc's initial threshold for buffers in mappings of their own."""
SWITCH_INTERVAL_S = 0.0005
RETURN_INTERVAL_S = 10.0
_PROC = Path("/proc/self")
_M_MMAP_THRESHOLD = -3  # of malloc.h
_M_ARENA_MAX = -8


def process_metrics() -> list[Metric]:
    """Return memory, CPU time and file descriptors of this process; empty if there is no ``/proc``."""
    try:
        # The name, in brackets, may hold spaces.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        num_open = len(os.listdir(_PROC / "fd")) - 1  # the listing itself is open meanwhile
    except OSError:
        return []
    used = resource.getrusage(resource.RUSAGE_SELF)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return [
        Gauge("process_resident_memory_bytes", {}, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")),
        Gauge("process_virtual_memory_bytes", {}, int(fields[20])),
        Counter("process_cpu_seconds", {}, used.ru_utime + used.ru_stime),
        Gauge("process_open_fds", {}, num_open),
        Gauge("process_max_fds", {}, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        Gauge("process_start_time_seconds", {}, time.time() - age_s),
    ]


def available_memory_bytes() -> int:
    """Return the memory that this machine has left, or this process's control group; 0 if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit, which reads "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found = min(found, max(limit - used, 0))
    return found


def switch_threads_often() -> None:
    """Let a thread that computes in Python hand over the interpreter ten times as often as by default.

    An event loop, or an engine's thread, gives up the interpreter at each system call, and must then wait for as long
    as one interval until it has it back.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def map_large_buffers_apart() -> None:
    """Let glibc's allocator put every buffer of ``LARGE_BUFFER_BYTES`` or more into a mapping of its own.

    By default glibc raises this threshold when the first such buffer is freed (``mallopt(3)``, ``M_MMAP_THRESHOLD``).
    asyncio's 256 KiB read buffers then come from the heap, where any small object between two of them keeps their space
    from being reused: a server's memory grows with every disconnecting client. ctypes, because Python has no call for
    it. Does nothing if the environment sets the threshold, or the C library is not glibc.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    _set_allocator(_M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)


def share_heap() -> None:
    """Let all threads allocate in one heap, unless the environment says how many there are.

    By default glibc gives threads heaps of their own (``mallopt(3)``, ``M_ARENA_MAX``), each of which keeps what the
    longest body or response read there has taken; Python's threads take turns anyway.
    """
    if "MALLOC_ARENA_MAX" not in os.environ and "arena_max" not in os.environ.get("GLIBC_TUNABLES", ""):
        _set_allocator(_M_ARENA_MAX, 1)


async def return_free_memory(interval_s: float = RETURN_INTERVAL_S) -> None:
    """Give free pages of the heap back to the system now and then, until the task is cancelled.

    glibc does so by itself only with those at the heap's end (``malloc_trim(3)``), so that a heap stays as large as
    what the bodies and responses of its worst minute have taken. Takes 20 ms for 100 MB, in a thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(trim, 0)


def _set_allocator(option: int, value: int) -> None:
    """Set an option of glibc's allocator, before threads are started; other C libraries have none."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(option, value)
