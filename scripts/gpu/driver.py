"""Run items in processes of their own, so that one that breaks, hangs or loses the device costs no other its turn."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

from scripts.gpu.figures import Deadline, Figure, Results, line
from scripts.gpu.parts import Context, Item, Part, SkippedError, Working, environment

MARK = "@gpu_check "
_START = Working("starting or ending its process", 90.0)
CLOSING_S = 5.0  # kept free at the end of the time limit
_LOST = ("CUDA_ERROR", "illegal", "misaligned", "device-side", "CUDNN_STATUS", "launch failed", "INTERNAL:")


class CompilationError(RuntimeError):
    """A program did not compile."""


@dataclasses.dataclass
class _Progress:
    """How far a process is with its items: which it runs, what it does, since when, and which it is done with."""

    items: dict[str, Item]
    current: str | None = None
    doing: Working = _START
    since: float = dataclasses.field(default_factory=time.monotonic)
    answered: set[str] = dataclasses.field(default_factory=set)

    def now(self, doing: Working) -> None:
        """Reset the watchdog."""
        self.doing, self.since = doing, time.monotonic()

    def left_s(self) -> float:
        """Return the seconds until what runs is taken to hang."""
        return self.doing.limit_s - (time.monotonic() - self.since)


@dataclasses.dataclass
class Driver:
    """Run the items of parts and keep what they give.

    Attributes:
        results: Where figures go.
        command: Starts a process that calls ``serve``; the name of a part follows it.
        show: Takes a line for the user.
    """

    results: Results
    command: Sequence[str]
    show: Callable[[str], None] = print

    def run_part(self, name: str, part: Part, context: Context, deadline: Deadline) -> None:
        """Run what is neither done nor failed yet, as long as it fits into the time that is left."""
        settled = {*self.results.done, *self.results.failed}
        waiting = [item for item in part.items(context) if f"{name}/{item.name}" not in settled]
        while waiting:
            fitting = [item for item in waiting if deadline.fits(item.estimate_s + CLOSING_S)]
            for item in waiting:
                if item not in fitting:
                    reason = f"needs about {item.estimate_s:.0f} s, {deadline.left_s():.0f} s were left"
                    self._skip(f"{name}/{item.name}", reason)
            batch = fitting[:1] if part.IS_ALONE else fitting
            if not batch:
                return
            answered = self._run_process(name, part, batch, context, deadline)
            # A process that dies before it begins anything would begin nothing the next time either.
            waiting = [item for item in fitting if item.name not in (answered or {each.name for each in batch})]

    def _run_process(self, name: str, part: Part, items: list[Item], context: Context, deadline: Deadline) -> set[str]:
        """Run some items in one process; return the names of those that are done with, one way or another."""
        ends = None if deadline.left_s() == float("inf") else time.time() + deadline.left_s() - CLOSING_S
        context = dataclasses.replace(context, spawned=time.time(), ends=ends)
        job = {"items": items, "context": dataclasses.asdict(context)}
        process = subprocess.Popen(
            [*self.command, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=environment(os.environ, part, context),
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(job))
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
        progress = _Progress({item.name: item for item in items})
        try:
            while True:
                try:
                    text = lines.get(timeout=max(0.0, min(progress.left_s(), deadline.left_s() - CLOSING_S / 2)))
                except queue.Empty:
                    is_over = not deadline.fits(CLOSING_S)
                    what, limit_s = progress.doing
                    hung = f"hung: nothing came for {limit_s:g} s while {what}"
                    self._stop(name, progress, "the time limit was reached" if is_over else hung, is_over)
                    break
                if text is None:
                    reason = f"the process ended with code {process.wait()} while {progress.doing.what}"
                    self._stop(name, progress, reason, False)
                    break
                self._take(name, text, progress)
        finally:
            _end(process)
        return progress.answered

    def _take(self, name: str, text: str, progress: "_Progress") -> None:
        """Take what a process says: that it begins or ends an item, what it does next, a figure, or anything else."""
        if not text.startswith(MARK):
            self.show(text.rstrip())
            return
        kind, _, rest = text.removeprefix(MARK).partition(" ")
        content = json.loads(rest)
        if kind == "begin":
            progress.current = content
            progress.now(Working(f"beginning {content}"))
        elif kind == "working":
            progress.now(Working(**content))
        elif kind == "figure":
            self._add(Figure(**content, item=f"{name}/{progress.current}"))
            progress.now(Working(f"going on after {content['name']}"))
        else:
            progress.current = None
            progress.now(_START)
            progress.answered.add(content["item"])
            self._close(f"{name}/{content['item']}", kind, content.get("reason", ""))

    def _stop(self, name: str, progress: "_Progress", reason: str, is_skipped: bool) -> None:
        """Note why a process ended within an item, or before it began any."""
        left = progress.items.keys() - progress.answered
        stopped = (
            [progress.current] if progress.current else [] if progress.answered and not is_skipped else sorted(left)
        )
        for item in stopped:
            self._break(f"{name}/{item}", reason, is_skipped)
            progress.answered.add(item)

    def _add(self, figure: Figure) -> None:
        self.results.add(figure)
        self.show(line(figure))

    def _close(self, item: str, kind: str, reason: str) -> None:
        if kind == "done":
            self.results.finish(item)
        else:
            self._break(item, reason, is_skipped=kind == "skipped")

    def _break(self, item: str, reason: str, is_skipped: bool) -> None:
        if is_skipped:
            self._skip(item, reason)
            return
        self.results.fail(item, reason)
        self.show(f"FAILED {item}: {reason}")

    def _skip(self, item: str, reason: str) -> None:
        self.results.skip(item, reason)
        self.show(f"skipped {item}: {reason}")


def serve(part: Part, source: IO[str], say: Callable[[str], Any] = print) -> int:
    """Read a job, run its items, and tell the driver; this is what the process of some items does.

    Returns:
        The exit code: 3 where an error may have cost it the device, so that another process must do the rest.
    """
    job = json.load(source)
    context = Context(**job["context"])

    def tell(kind: str, content: Any) -> None:
        say(f"{MARK}{kind} {json.dumps(content)}")

    for name, estimate_s in job["items"]:
        if estimate_s > context.left_s():
            reason = f"needs about {estimate_s:.0f} s, {context.left_s():.0f} s were left"
            tell("skipped", {"item": name, "reason": reason})
            continue
        tell("begin", name)
        try:
            for told in part.run(name, context):
                if isinstance(told, Working):
                    tell("working", told._asdict())
                else:
                    tell("figure", {key: value for key, value in dataclasses.asdict(told).items() if key != "item"})
        except SkippedError as error:
            tell("skipped", {"item": name, "reason": str(error)})
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            reason = f"{type(error).__name__}: {first_line(error)}"
            tell("failed", {"item": name, "reason": reason})
            if is_device_lost(error):
                return 3
        else:
            tell("done", {"item": name})
    return 0


def is_device_lost(error: Exception) -> bool:
    """Return whether an error may have cost the process its device; what does not compile never got there."""
    return not isinstance(error, CompilationError) and any(word in str(error) for word in _LOST)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, cut to what a table can hold."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _read_lines(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    for text in stream:
        lines.put(text)
    lines.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
