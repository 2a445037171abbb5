"""A thread that runs what other threads ask it to."""

import abc
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from jaxserve.api.errors import EngineBusyError, EngineDeadError

T = TypeVar("T")


class CommandThread(abc.ABC):
    """Runs commands of other threads, one after the other.

    The inbox is a ``SimpleQueue``, which a signal handler that raises cannot leave locked: a caller may be interrupted
    anywhere.

    Args:
        name: Name of the thread, which the subclass starts.
        ending: Why the thread ends without a failure, for error messages.

    Attributes:
        failure: The error that stopped the engine; None if it runs or was shut down.
        num_done: Number of steps and commands so far; grows while the engine makes progress.
        is_idle: Whether the engine has no work, so that ``num_done`` need not grow.
    """

    def __init__(self, name: str, ending: str):
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopped = False
        self._ending = ending
        self.failure: BaseException | None = None
        self.num_done = 0
        self.is_idle = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def _run(self) -> None:
        """Run the thread."""

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a function on the engine's thread, between two steps.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._is_stopped:
                    raise self._dead()
                future.set_result(function())
            except BaseException as error:  # a caller waits for the future, whatever happens
                future.set_exception(error)
                if isinstance(error, EngineDeadError) and not self._is_stopped:
                    raise  # the function has stopped the engine

        self._post(run)
        return future

    def run(self, function: Callable[[], T]) -> T:
        """Call a function as ``call`` does, and wait for it to end, even if a signal handler raises meanwhile.

        Raises:
            EngineBusyError: The caller is on the engine's thread.
            EngineDeadError: The engine failed or was shut down.
        """
        self.check_outside()
        future = self.call(function)
        try:
            return future.result()
        except BaseException:
            concurrent.futures.wait([future])
            raise

    def check_outside(self) -> None:
        """Check that the caller may wait for the engine.

        Raises:
            EngineBusyError: It runs on the engine's thread, where nothing would go on.
        """
        if self._is_own_thread:
            raise EngineBusyError("this call comes from inside a step of the same engine; call it between two steps")

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command for the thread.

        Raises:
            EngineDeadError: The thread has ended.
        """
        if self._is_stopped:
            raise self._dead()
        self._inbox.put(command)
        if self._is_stopped:  # perhaps since then
            self._run_leftovers()

    def _dead(self) -> EngineDeadError:
        """Return the error of what comes after the end of the thread."""
        error = EngineDeadError(f"the engine stopped: {self.failure or self._ending}")
        error.__cause__ = self.failure
        return error

    def _run_leftovers(self) -> None:
        """Run the commands in the inbox of a loop that has stopped, on any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                command()

    def _next_command(self, waits: bool, timeout_s: float | None) -> Callable[[], None] | None:
        """Return the next command, if there is one.

        Args:
            waits: Whether to wait for one.
            timeout_s: For how many seconds at most; None: without limit.
        """
        self.is_idle = True
        try:
            return self._inbox.get(waits, timeout_s)
        except queue.Empty:
            return None
        finally:
            self.is_idle = False
