"""What this process takes of its machine, as Prometheus' own clients name it."""

import os
import resource
import time
from pathlib import Path

from jaxserve.metric_types import Counter, Gauge, Metric

_PROC = Path("/proc/self")


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
