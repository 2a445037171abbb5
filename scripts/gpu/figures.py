"""Figures of a check, and the file that keeps them: JSON and a Markdown table, rewritten after every figure."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Value = float | int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One result.

    Attributes:
        part: Part of the check that it comes from.
        name: What was measured; unique in its part.
        value: The number, ``pass`` or ``fail`` of a check; None where nothing came of it (the note says why).
        unit: Of the value and of the roofline.
        roofline: What the ceilings measured in the same run allow, in the same unit.
        share: Share of the roofline that was reached, 1 at best.
        goal: What the project wants of it; empty where it wants nothing.
        note: How it was measured, or why it was not.
        item: The item that gave it, as ``part/item``.
    """

    part: str
    name: str
    value: Value
    unit: str = ""
    roofline: float | None = None
    share: float | None = None
    goal: str = ""
    note: str = ""
    item: str = ""

    @classmethod
    def timed(cls, part: str, name: str, seconds: float, best_s: float | None, **rest: str) -> "Figure":
        """Make a figure of a time in microseconds, with the time that the ceilings allow."""
        share = None if best_s is None else best_s / seconds
        roofline = None if best_s is None else rounded(best_s * 1e6)
        return cls(
            part=part, name=name, value=rounded(seconds * 1e6), unit="us", roofline=roofline, share=share, **rest
        )


class Results:
    """The figures of a run and the items that were done, skipped or failed, on disk at every moment.

    Args:
        directory: Made if it is not there.
        name: Of both files, without suffix.
        about: Device, versions, commit and date.
        resumes: Start from what the files hold already.
        retries: Forget what failed there, so that it runs again.
    """

    def __init__(
        self, directory: Path, name: str, about: Mapping[str, Any], resumes: bool = False, retries: bool = False
    ):
        self.json_path = directory / f"{name}.json"
        self.markdown_path = directory / f"{name}.md"
        self.about = dict(about)
        self.figures: list[Figure] = []
        self.done: list[str] = []
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.runs: list[dict[str, str]] = []
        directory.mkdir(parents=True, exist_ok=True)
        if resumes and self.json_path.exists():
            self._read()
            if retries:
                self._forget_failures()
        self.runs.append({key: str(self.about.get(key, "unknown")) for key in ("date", "commit")})
        self.write()

    def add(self, figure: Figure) -> None:
        """Keep a figure, in place of an earlier one of its name, and write the files."""
        if isinstance(figure.share, float):
            figure = dataclasses.replace(figure, share=round(figure.share, 4))
        places = [i for i, old in enumerate(self.figures) if (old.part, old.name) == (figure.part, figure.name)]
        if places:
            self.figures[places[0]] = figure
        else:
            self.figures.append(figure)
        if figure.value == "fail":
            self.failed[f"{figure.part}: {figure.name}"] = figure.note
        else:
            self.failed.pop(f"{figure.part}: {figure.name}", None)
        self.write()

    def finish(self, item: str) -> None:
        """Note an item that need not run again."""
        if item not in self.done:
            self.done.append(item)
        self.skipped.pop(item, None)
        self.failed.pop(item, None)
        self.write()

    def skip(self, item: str, reason: str) -> None:
        """Note an item that did not run."""
        self.skipped[item] = reason
        self.write()

    def fail(self, item: str, reason: str) -> None:
        """Note an item that broke."""
        self.failed[item] = reason
        self.skipped.pop(item, None)
        self.write()

    def value(self, part: str, name: str) -> Value:
        """Return the value of a figure; None where it is not there."""
        return next((figure.value for figure in self.figures if (figure.part, figure.name) == (part, name)), None)

    def broken_items(self) -> dict[str, str]:
        """Return the items that broke: they hung, ended their process or raised."""
        wrong = {f"{figure.part}: {figure.name}" for figure in self.figures}
        return {item: reason for item, reason in self.failed.items() if item not in wrong}

    def wrong_items(self) -> dict[str, str]:
        """Return the items with a figure that failed, and the first such figure of each."""
        found: dict[str, str] = {}
        for figure in self.figures:
            if figure.value == "fail":
                found.setdefault(figure.item, f"{figure.name} failed: {figure.note}")
        return found

    def write(self) -> None:
        """Write both files, each whole or not at all."""
        content = {
            **self.about,
            "runs": self.runs,
            "figures": [dataclasses.asdict(figure) for figure in self.figures],
            "done": self.done,
            "skipped": self.skipped,
            "failed": self.failed,
        }
        write_whole(self.json_path, json.dumps(content, indent=1) + "\n")
        write_whole(self.markdown_path, self.markdown())

    def markdown(self) -> str:
        """Return the figures as tables, a part each."""
        lines = [f"# {self.json_path.stem}", ""]
        for name, value in self.about.items():
            text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
            lines.append(f"- {name}: {text}")
        for part in dict.fromkeys(figure.part for figure in self.figures):
            lines += [
                "",
                f"## {part}",
                "",
                "| what | value | roofline | share | goal | note |",
                "|---|---:|---:|---:|---|---|",
            ]
            lines += [_row(figure) for figure in self.figures if figure.part == part]
        for title, items in (("Failed", self.failed), ("Skipped", self.skipped)):
            if items:
                lines += ["", f"## {title}", ""] + [f"- {name}: {_cell(reason)}" for name, reason in items.items()]
        return "\n".join(lines) + "\n"

    def _read(self) -> None:
        content = json.loads(self.json_path.read_text(encoding="utf-8"))
        self.figures = [Figure(**figure) for figure in content["figures"]]
        self.done, self.skipped, self.failed = content["done"], content["skipped"], content["failed"]
        self.runs = content["runs"]

    def _forget_failures(self) -> None:
        again = {*self.broken_items(), *self.wrong_items()}
        self.figures = [figure for figure in self.figures if figure.value != "fail"]
        self.done = [item for item in self.done if item not in again]
        self.failed = {}


class Deadline:
    """The end of a run.

    Args:
        limit_s: Seconds from now; None for no end.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = None if limit_s is None else clock() + limit_s

    def left_s(self) -> float:
        """Return the seconds to the end, never below 0."""
        return float("inf") if self._end is None else max(0.0, self._end - self._clock())

    def part(self, share: float) -> "Deadline":
        """Return the end of a share of the time that is left."""
        left_s = self.left_s()
        return Deadline(None if left_s == float("inf") else left_s * share, self._clock)

    def fits(self, estimate_s: float) -> bool:
        """Return whether something that takes so long would end in time."""
        return estimate_s <= self.left_s()


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a text in one move, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def rounded(value: float) -> float:
    """Round to four significant digits, or to one after the point."""
    return float(f"{value:.4g}") if abs(value) < 1000 else round(value, 1)


def line(figure: Figure) -> str:
    """Return a figure in one line."""
    share = "" if figure.share is None else f"  {figure.share:.0%} of {figure.roofline:g} {figure.unit}"
    goal = f"  (goal {figure.goal})" if figure.goal else ""
    note = f"  [{figure.note}]" if figure.note else ""
    value = "-" if figure.value is None else figure.value
    return f"{figure.part:10} {figure.name}: {value} {figure.unit}".rstrip() + f"{share}{goal}{note}"


def _row(figure: Figure) -> str:
    value = "-" if figure.value is None else f"{figure.value} {figure.unit}".strip()
    roofline = "" if figure.roofline is None else f"{figure.roofline:g}"
    share = "" if figure.share is None else f"{figure.share:.0%}"
    cells = (figure.name, value, roofline, share, figure.goal, figure.note)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
