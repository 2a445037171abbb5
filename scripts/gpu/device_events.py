"""Measure how long the device was busy, by its own clock: events of JAX's profiler, not the host's time.

Programs stay CUDA graphs under the profiler with ``--xla_enable_command_buffers_during_profiling=true`` in XLA_FLAGS;
the engine part's processes have it.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

XLA_FLAGS = "--xla_enable_command_buffers_during_profiling=true"
_DEVICE_PLANE, _STREAM_LINE = "/device:GPU:", "Stream"


_NUM_KERNELS = 12


class KernelTime(NamedTuple):
    """How often kernels of one name ran, numbers at the end of the name left out, and their seconds in all."""

    name: str
    num_runs: int
    total_s: float


class DeviceTime(NamedTuple):
    """What a device did from its first event to its last: seconds, seconds busy, events, the longest kernels."""

    span_s: float
    busy_s: float
    num_events: int
    kernels: tuple[KernelTime, ...] = ()

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing ran."""
        return self.span_s - self.busy_s


def device_time(work: Callable[[], None]) -> DeviceTime | None:
    """Profile some work and return the first GPU's time; None where the profile has no event of a GPU.

    Args:
        work: Must wait for what it starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        return busy_time(jax.profiler.ProfileData.from_file(str(files[0])).planes) if files else None


def busy_time(planes: Iterable[Any]) -> DeviceTime | None:
    """Add up the first GPU's time: events of several streams that overlap count once.

    Args:
        planes: Of a profile: ``name`` and ``lines``, these with ``name`` and ``events``, and these with ``start_ns``
            and ``duration_ns``.
    """
    gpus = sorted((plane for plane in planes if plane.name.startswith(_DEVICE_PLANE)), key=lambda plane: plane.name)
    if not gpus:
        return None
    lines = [line for line in gpus[0].lines if line.name.startswith(_STREAM_LINE)]
    spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for line in lines for event in line.events)
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return DeviceTime((end - spans[0][0]) / 1e9, busy / 1e9, len(spans), _longest(lines))


def _longest(lines: Iterable[Any]) -> tuple[KernelTime, ...]:
    """Add up the events of each name; those with the longest sums first."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        for event in line.events:
            found[re.sub(r"[._\d]+$", "", event.name) or event.name].append(event.duration_ns / 1e9)
    times = [KernelTime(name, len(each), sum(each)) for name, each in found.items()]
    return tuple(sorted(times, key=lambda each: -each.total_s)[:_NUM_KERNELS])
