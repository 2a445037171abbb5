"""What a comparison found: a table, the recommendation, and what would change it."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.lab import report
from jaxserve.lab.compare.candidates import Candidate, Excluded
from jaxserve.lab.compare.picture import Bar, draw, svg
from jaxserve.lab.compare.rank import Change, Workload, changes, changes_text, ranked, reason, tokens_per_s
from jaxserve.lab.compare.run import Measured
from jaxserve.lab.devices import Device
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.records import StepCost

_MOST_REASONS = 8  # groups of excluded combinations that the text names


class Row(NamedTuple):
    """A candidate, and what it did if it ran."""

    candidate: Candidate
    measured: Measured | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Meshes and layouts of a model, ranked.

    Attributes:
        model: Model as given.
        num_devices: Number of devices.
        device: Kind of device.
        batch_sizes: Batch sizes that were compared.
        workload: What the rows are ranked for.
        rows: The candidates.
        excluded: Meshes and layouts that are not valid, and why.
        weights: Which weights they ran with; "" if they did not run.
    """

    model: str
    num_devices: int
    device: Device
    batch_sizes: tuple[int, ...]
    workload: Workload
    rows: tuple[Row, ...]
    excluded: tuple[Excluded, ...]
    weights: str

    @property
    def ranked(self) -> list[Row]:
        """The rows, the one with the most tokens per second first, as predicted."""
        of = {row.candidate.name: row for row in self.rows}
        return [of[candidate.name] for candidate in ranked([row.candidate for row in self.rows], self.workload)]

    @property
    def best(self) -> Candidate | None:
        """The recommended mesh and layout; None if none fits into memory."""
        first = self.ranked[0].candidate
        return first if tokens_per_s(first.plan, self.workload) > 0 else None

    @property
    def changes(self) -> list[Change]:
        """The fastest candidate for other batch sizes, contexts and links."""
        return changes([row.candidate for row in self.rows], self.workload)

    @property
    def has_equal_tokens(self) -> bool | None:
        """Whether all candidates ran with equal greedy tokens; None if they did not run."""
        found = [row.measured.is_equal for row in self.rows if row.measured is not None]
        return all(found) if found else None

    @property
    def summary(self) -> str:
        """The model, the devices, and what was compared."""
        plan = self.rows[0].candidate.plan
        ran = f"; run with {self.weights}" if self.weights else ""
        model = f"{self.model}: {plan.architecture}, {plan.num_layers} layers, {plan.dtype}"
        compared = f"{len(self.rows)} meshes and layouts at {self.workload.context:,} tokens of context{ran}"
        return f"{model}, on {self.num_devices} x {self.device.name}\n{compared}"

    @property
    def table(self) -> report.Table:
        """A row per candidate, the fastest first."""
        names = ["mesh and layout", "weights", "KV tokens", "exchanged"]
        names += [f"step B={size}" for size in self.batch_sizes] + ["tokens/s"]
        if self.weights:
            names += [f"measured B={size}" for size in self.batch_sizes] + ["tokens equal"]
        title = f"Per device, and per decode step at batch {' and '.join(map(str, self.batch_sizes))} (B), modelled"
        return title, names, [self._cells(row) for row in self.ranked]

    def _cells(self, row: Row) -> list[str]:
        plan, measured = row.candidate.plan, row.measured
        steps = [plan.decode_of(size) for size in self.batch_sizes]
        rate = tokens_per_s(plan, self.workload)
        cells = [
            row.candidate.name,
            report.size(max(stage.weights for stage in plan.stages)),
            f"{plan.kv_tokens:,}" if plan.fits else "does not fit",
            report.size(_exchanged(steps[-1])),
            *(report.seconds(step.step_s) for step in steps),
            f"{rate:,.0f}" if rate else "-",
        ]
        if measured is not None:
            cells += [report.seconds(measured.step_s[size]) if not measured.error else "-" for size in self.batch_sizes]
            cells.append(_equality(measured))
        return cells

    @property
    def verdict(self) -> str:
        """The recommendation with its reason, what would change it, and why other combinations are not valid."""
        best, order = self.best, [row.candidate for row in self.ranked]
        if best is None:
            plan = min((row.candidate.plan for row in self.rows), key=lambda plan: plan.fullest.weights)
            lines = [f"None fits on {self.num_devices} x {self.device.name}. {plan.problem or _no_room(self.workload)}"]
        else:
            lines = [f"Recommended: {best.name}. {reason(best, order[1:], self.workload)}."]
            lines += ["", "What would change it:"]
            lines += [f"  {line}" for line in changes_text(self.changes, best.name)]
        failed = [row for row in self.rows if row.measured is not None and row.measured.error]
        lines += [f"{row.candidate.name} did not run: {row.measured.error}" for row in failed if row.measured]
        if self.excluded:
            lines += ["", "Not valid for this model:", *(f"  {line}" for line in _reasons(self.excluded))]
        return "\n".join(lines)

    def _bars(self) -> list[Bar]:
        return [_bar(row, self.workload.batch) for row in self.ranked]

    def draw(self, path: str | Path) -> None:
        """Draw memory, communication and times of the fastest candidates to a file, in the format of its suffix.

        Raises:
            ConfigError: matplotlib is missing, or the file cannot be written.
        """
        draw(self._bars(), self.picture_title, self.device.memory_bytes, str(path))

    @property
    def picture_title(self) -> str:
        """The title of the picture."""
        plan = self.rows[0].candidate.plan
        devices = f"{self.num_devices} x {self.device.name}"
        return f"{Path(self.model).name} ({plan.dtype}) on {devices}, decode step at batch {self.workload.batch}"

    def __str__(self) -> str:
        return report.as_text(self.summary, [self.table], self.verdict)

    def _repr_html_(self) -> str:
        picture = svg(self._bars(), self.picture_title, self.device.memory_bytes)
        return report.as_html(self.summary, [self.table], self.verdict) + picture

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can hold."""
        return {
            "model": self.model,
            "num_devices": self.num_devices,
            "device": self.device.as_dict(),
            "batch_sizes": self.batch_sizes,
            "context": self.workload.context,
            "weights": self.weights,
            "has_equal_tokens": self.has_equal_tokens,
            "candidates": [
                {
                    "name": row.candidate.name,
                    "tokens_per_s": tokens_per_s(row.candidate.plan, self.workload),
                    "measured": None if row.measured is None else row.measured._asdict(),
                    "plan": row.candidate.plan.as_dict(),
                }
                for row in self.ranked
            ],
            "recommended": None if self.best is None else self.best.name,
            "changes": [change._asdict() for change in self.changes],
            "excluded": [each._asdict() for each in self.excluded],
        }


def _exchanged(step: StepCost) -> int:
    """Return the bytes of the results of a step's collectives on each device, in all stages."""
    return sum(each.total_bytes for each in step.communication)


def _equality(measured: Measured) -> str:
    if measured.error:
        return "did not run"
    return "yes" if measured.is_equal else f"{measured.num_different} of {measured.num_prompts} differ"


def _no_room(workload: Workload) -> str:
    return f"No KV pages are left for a sequence of {workload.context:,} tokens; use more devices"


def _bar(row: Row, batch: int) -> Bar:
    plan: Plan = row.candidate.plan
    stage, step = plan.fullest, plan.decode_of(batch)
    exchanged = dict[str, int]()
    for each in step.communication:
        exchanged[each.kind] = exchanged.get(each.kind, 0) + each.total_bytes
    measured = None if row.measured is None else row.measured.step_s.get(batch)
    memory = {
        "weights": stage.weights,
        "largest step": stage.step_reserve,
        "state": stage.slots + stage.num_states * stage.state_bytes + stage.reserve,
        "KV pages": max(0, stage.left),
    }
    return Bar(row.candidate.name, memory, exchanged, step.step_s, measured, plan.fits)


def _reasons(excluded: Sequence[Excluded]) -> list[str]:
    """Return a line for each kind of reason, with the number of combinations that it excludes; numbers may differ."""
    groups: dict[str, list[Excluded]] = {}
    for each in excluded:
        groups.setdefault(re.sub(r"\d+|layout='\w+'$", "", each.reason), []).append(each)
    lines = []
    for group in [*groups.values()][:_MOST_REASONS]:
        first = group[0]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"{first.mesh} {first.layout}{more}: {first.reason}")
    left = len(groups) - _MOST_REASONS
    return [*lines, f"and {left} other reasons (--json has all)"] if left > 0 else lines
