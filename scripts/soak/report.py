"""Results of a soak test: responses by kind, failures, and growth of resources."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WARM_UP_SHARE = 1 / 3
MAX_PROBLEMS = 50
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sample:
    """State of a server at one time.

    Attributes:
        time_s: Since the start of the run.
        values: Numbers by name: of both processes ``*_rss_bytes``, ``*_fds`` (under load the front end's without its
            established connections), ``*_threads``; how many ``children`` the engine has, and their memory; and those
            of ``/metrics``.
    """

    time_s: float
    values: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Limit:
    """How far a number may rise over the measured part of a run, by the line that fits its samples best.

    Attributes:
        name: Of the number.
        absolute: Rise that is always fine.
        relative: Further rise, as a share of the mean.
    """

    name: str
    absolute: float
    relative: float = 0.0


# Thousands of requests a minute: what leaks once in a hundred is far above these. Below them is what caches and
# allocators still take, and what pools of threads (of a fixed size, filled when they are first busy) still start.
LIMITS = (
    Limit("front_rss_bytes", 4 * MIB, 0.03),
    Limit("engine_rss_bytes", 16 * MIB, 0.03),
    Limit("front_fds", 8.0),
    Limit("engine_fds", 4.0),
    Limit("front_threads", 6.0),
    Limit("engine_threads", 6.0),
    Limit("children_rss_bytes", 32 * MIB, 0.03),
    Limit("children", 1.0),
)
# What must be as it was before, once all is quiet: name, and how much more there may be.
QUIET = {"front_fds": 4.0, "engine_fds": 2.0, "front_threads": 6.0, "engine_threads": 6.0, "children": 1.0}
ZERO = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "requests_in_flight", "texts_in_flight")


@dataclasses.dataclass
class Report:
    """The outcome of a run.

    Attributes:
        duration_s: How long there was load.
        outcomes: How often each kind of request ended in each way.
        problems: What must not happen, the first ones.
        num_problems: All of them.
        rises: Rise of each number over the measured part, and what it may be.
        before: State before the load.
        after: State once all was quiet.
        samples: State during the load.
    """

    duration_s: float = 0.0
    outcomes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    num_problems: int = 0
    rises: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    before: dict[str, float] = dataclasses.field(default_factory=dict)
    after: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: list[Sample] = dataclasses.field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Return whether there were no problems."""
        return self.num_problems == 0

    @property
    def num_requests(self) -> int:
        """Return the number of requests."""
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    def note(self, kind: str, outcome: str, count: int = 1) -> None:
        """Count requests."""
        counts = self.outcomes.setdefault(kind, {})
        counts[outcome] = counts.get(outcome, 0) + count

    def complain(self, text: str) -> None:
        """Record a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text[:1000])

    def judge(self, has_rises: bool = True) -> None:
        """Compare the state before, during and after; if ``has_rises``, also what rises during a run."""
        if has_rises:
            self.judge_rises(LIMITS)
        for name, allowed in QUIET.items():
            if self.after[name] > self.before[name] + allowed:
                self.complain(f"{name} was {self.before[name]:.0f} before the load and is {self.after[name]:.0f} now")
        self.judge_zeros(self.after)

    def judge_rises(self, limits: Sequence[Limit]) -> None:
        """Complain of numbers that rise during a run."""
        for limit in limits:
            found = rise(self.samples, limit.name)
            allowed = limit.absolute + limit.relative * found["mean"]
            self.rises[limit.name] = {**found, "allowed": allowed}
            if found["rise"] > allowed:
                self.complain(f"{limit.name} rose by {found['rise']:.0f}, more than {allowed:.0f}")

    def judge_zeros(self, quiet: Mapping[str, float]) -> None:
        """Complain of what a quiet server still holds, and of programs that it compiled while it served."""
        for name in ZERO:
            if quiet[name] != 0:
                self.complain(f"{name} is {quiet[name]} on a quiet server")
        if quiet["compiles_after_ready_total"]:
            self.complain(f"{quiet['compiles_after_ready_total']:.0f} programs were compiled after the start")

    def as_json(self) -> dict[str, Any]:
        """Return all results, for a file."""
        return {"is_clean": self.is_clean, "num_requests": self.num_requests, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return a summary."""
        lines = [f"{self.num_requests} requests in {self.duration_s:.0f} s"]
        for kind, counts in sorted(self.outcomes.items()):
            lines.append(f"  {kind:<26}" + ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items())))
        for name, found in self.rises.items():
            scale, unit = (MIB, " MiB") if name.endswith("bytes") else (1, "")
            numbers = [found[key] / scale for key in ("mean", "rise", "allowed")]
            lines.append("{:<20} mean {:.1f}{u}, rise {:+.2f}{u} (at most {:.2f}{u})".format(name, *numbers, u=unit))
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return [*lines, "clean" if self.is_clean else f"{self.num_problems} problems"]


def rise(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Return the mean of a number after the warm-up, and the rise of its best-fit line from there to the end."""
    if not samples:
        return {"mean": 0.0, "rise": 0.0}
    start_s = samples[0].time_s + WARM_UP_SHARE * (samples[-1].time_s - samples[0].time_s)
    measured = [(sample.time_s, sample.values[name]) for sample in samples if sample.time_s >= start_s]
    times, values = np.array(measured).T
    if len(times) < 3:
        return {"mean": float(values.mean()), "rise": 0.0}
    slope = np.polyfit(times - times[0], values, 1)[0]
    return {"mean": float(values.mean()), "rise": float(slope * (times[-1] - times[0]))}
