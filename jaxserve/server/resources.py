"""What this process takes of its machine, as Prometheus' own clients name it, and how its memory is kept flat."""

import ctypes
import os
import resource
import time
from pathlib import Path

from jaxserve.metric_types import Counter, Gauge, Metric

LARGE_BUFFER_BYTES = 128 << 10
"""Where glibc's allocator begins to map buffers apart, if it is left alone."""
_PROC = Path("/proc/self")
_M_MMAP_THRESHOLD = -3  # of malloc.h


def process_metrics() -> list[Metric]:
    """Memory, processor time and file descriptors of this process; nothing where there is no ``/proc``."""
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


def map_large_buffers_apart() -> None:
    """Has glibc's allocator map every buffer of ``LARGE_BUFFER_BYTES`` and more apart from the heap, from now on.

    It begins so, but stops when the first of them is freed (``mallopt(3)``, ``M_MMAP_THRESHOLD``). The 256 KiB that
    asyncio reads a socket into are cut from the heap from then on, and the least thing that stays between two of them
    keeps their room from being used again: a server's memory rises with the calls that are cut off. Nothing is done
    where the environment sets that size, or the C library is another one.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)
