"""An engine's steps, let through one by one: what happens between two of them is then no matter of time."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.server_child import RunningServer
from tests.faults.talk import ended, total, wait_until, wait_until_idle
from tests.hooks import injected


class StepGate:
    """Holds an engine before each of its steps.

    Args:
        server: Its server, which has the faults of ``injected``.
        switches: The folder that switches them on.
    """

    def __init__(self, server: RunningServer, switches: Path):
        self._server = server
        self._folder = switches / injected.GATE
        self._waiting = switches / injected.WAITING
        self._numbers = itertools.count()

    @property
    def num_steps(self) -> float:
        """Steps launched so far; exact while one waits."""
        return total(self._server, "jaxserve:steps_total")

    def let_through(self, count: int = 1, still: Callable[[], bool] = lambda: True) -> bool:
        """Lets so many steps through, and waits for the next.

        Returns:
            Whether it waits: it need not where ``still`` turns false before.
        """
        for number in itertools.islice(self._numbers, count):
            if not self._wait(still):
                return False
            ticket = self._folder / str(number)
            ticket.touch()
            wait_until(lambda ticket=ticket: not ticket.exists(), "a step takes its ticket")
        return self._wait(still)

    def let_through_until(self, condition: Callable[[], bool], what: str, most: int = 60) -> None:
        """Lets steps through until something is so; each may take a while to show."""
        for _ in range(most):
            self.let_through()
            with contextlib.suppress(AssertionError):
                wait_until(condition, what, limit_s=0.2)
                return
        raise AssertionError(f"after {most} steps it is still not so that {what}")

    def open(self) -> None:
        """Lets all steps through from now on."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, still: Callable[[], bool]) -> bool:
        wait_until(lambda: self._waiting.exists() or not still(), "a step waits")
        return still()


@contextlib.contextmanager
def closed_gate(server: RunningServer, switches: Path) -> Iterator[StepGate]:
    """Steps wait while the block runs."""
    (switches / injected.GATE).mkdir()
    gate = StepGate(server, switches)
    try:
        yield gate
    finally:
        gate.open()


@contextlib.contextmanager
def one_more_step(server: RunningServer, switches: Path, outcome: str) -> Iterator[StepGate]:
    """Steps wait while the block runs, in which the only request ends in some way.

    Behind it all pages must be free after one step more: the one that had its turn when the request ended.
    """
    before = ended(server, outcome)
    with closed_gate(server, switches) as gate:
        yield gate
        wait_until(lambda: ended(server, outcome) > before, f"a request has ended as {outcome!r}")
        num_steps = gate.num_steps
    wait_until_idle(server)
    assert total(server, "jaxserve:steps_total") == num_steps + 1
    assert ended(server, outcome) == before + 1


@contextlib.contextmanager
def slow_steps(switches: Path, seconds: float) -> Iterator[None]:
    """Each step takes so much longer while the block runs."""
    file = switches / injected.PAUSE
    file.write_text(str(seconds))
    try:
        yield
    finally:
        file.unlink()
