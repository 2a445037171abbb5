"""A pytest plugin that samples what the tests spend their time on; ``--profile-costs FILE`` turns it on.

Fifty times a second a signal looks at the stack of the main thread, and names what it is doing: compiling, tracing,
running the oracle's model, waiting for a process, and so on. ``scripts/test_costs.py`` prints the file as tables.
"""

import collections
import json
import linecache
import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_PERIOD_S = 0.02
_SIGNAL = signal.SIGUSR2

# The innermost frame whose file contains the first text, and whose function contains the second, names the cost.
_KINDS: tuple[tuple[str, str, str], ...] = (
    ("jaxserve/device/stage.py", "compile", "compilation"),
    ("jax/_src/compilation_cache.py", "", "compilation cache"),
    ("jax/_src/compiler.py", "", "compilation"),
    ("jax/_src/interpreters/mlir.py", "", "lowering"),
    ("jax/_src/interpreters/partial_eval.py", "trace", "tracing"),
    ("jax/_src/pjit.py", "_trace", "tracing"),
    ("jax/_src/pallas/", "", "Pallas interpreter and tracing"),
    ("/torch/", "", "oracle (torch)"),
    ("/transformers/models/", "", "oracle (torch)"),
    ("/transformers/", "", "transformers"),
    ("<frozen importlib", "", "imports"),
    ("/subprocess.py", "", "processes"),
    ("scripts/server_child.py", "", "processes"),
    ("/socket.py", "", "waiting for a socket"),
    ("/selectors.py", "", "waiting for a socket"),
    ("/grpc/", "", "gRPC"),
    ("/hypothesis/internal/", "", "hypothesis"),
    ("/hypothesis/strategies/", "", "hypothesis"),
    ("/beartype/", "", "shape checks"),
    ("/jaxtyping/", "", "shape checks"),
    ("/jax/_src/", "", "other JAX"),
    ("/flax/", "", "flax"),
    (f"{Path(__file__).resolve().parent.parent}/.venv/", "", "pytest and other packages"),
    (f"{Path(__file__).resolve().parent.parent}/", "", "the project and its tests"),
)


def kind_of(frame: FrameType | None) -> str:
    """Return the name of what a thread with this stack is doing."""
    if frame is not None:
        path = frame.f_code.co_filename
        if "sleep(" in linecache.getline(path, frame.f_lineno or 0):
            return "sleeping"
    is_waiting = frame is not None and frame.f_code.co_filename.endswith("/threading.py")
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        for part, function, kind in _KINDS:
            if part in path and function in name:
                return "waiting for a thread" if is_waiting and kind.startswith("the project") else kind
        frame = frame.f_back
    return "pytest and other packages"


class Sampler:
    """Samples the stack of the main thread: a thread sends it a signal, since looking at its frames from outside can
    crash Python 3.11.

    Attributes:
        seconds: Time spent on each kind so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._last = time.perf_counter()
        signal.signal(_SIGNAL, self._sample)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self.seconds[kind_of(frame)] += now - self._last
        self._last = now


class Profile:
    """The plugin of a process that runs tests: attaches to the last report of each what it cost."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._before: dict[str, float] = {}
        self._cpu_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Note what was spent before the test."""
        self._before, self._cpu_s = dict(self._sampler.seconds), _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the difference once the test's teardown is over."""
        report = yield
        if report.when == "teardown":
            spent = {kind: total - self._before.get(kind, 0.0) for kind, total in dict(self._sampler.seconds).items()}
            kinds = {kind: round(seconds, 3) for kind, seconds in spent.items() if seconds > 0}
            report.user_properties.append(("costs", {"cpu": round(_cpu_seconds() - self._cpu_s, 3), "kinds": kinds}))
        return report


class ProfileFile:
    """The plugin of the process that reports: writes ``{test: {"wall": s, "cpu": s, "kinds": {name: s}}}``.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        test = self._tests.setdefault(report.nodeid, {"wall": 0.0, "cpu": 0.0, "kinds": {}})
        test["wall"] = round(test["wall"] + report.duration, 3)
        test.update(*(costs for name, costs in report.user_properties if name == "costs"))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self._tests, indent=0))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
