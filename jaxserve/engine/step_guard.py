"""Keep changes of an engine's state apart, and notice one that was not completed."""

import inspect
import threading
from collections.abc import Callable
from types import FrameType

from jaxserve.api.errors import EngineBusyError


class StepGuard:
    """Runs one ``with`` block at a time: threads wait for each other, and a block inside another one is an error.

    A block that an exception leaves may have changed a part of the state only. The next block then begins with
    ``mend``, until that succeeds. The frame that runs a block is noted from before the first change to after the last
    one, so that no exception, wherever it is raised, leaves a half-done change unnoticed.

    Args:
        mend: Restores a consistent state, whatever the block had done. May be called again if it is interrupted.
    """

    def __init__(self, mend: Callable[[], None]):
        self._mend = mend
        self._lock = threading.RLock()
        self._frame: FrameType | None = None
        self._is_torn = False

    @property
    def is_inside(self) -> bool:
        """Whether the caller runs inside a block of its own thread: in a finalizer, a callback or a trace function."""
        running = self._frame
        frame = None if running is None else inspect.currentframe()
        while frame is not None and frame is not running:
            frame = frame.f_back
        return frame is not None

    def check_outside(self) -> None:
        """Check that the caller is not inside a block of its own thread.

        Raises:
            EngineBusyError: It is.
        """
        if self.is_inside:
            raise EngineBusyError("this call comes from inside a step of the same engine; call it between two steps")

    def __enter__(self) -> None:
        self.check_outside()
        self._lock.acquire()
        frame = inspect.currentframe()
        self._begin(None if frame is None else frame.f_back)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._end(is_complete=kind is None)

    def run_if_free(self, function: Callable[[], None]) -> bool:
        """Run a function as a block unless another one runs; return whether it ran."""
        if self.is_inside or not self._lock.acquire(blocking=False):
            return False
        self._begin(inspect.currentframe())
        is_complete = False
        try:
            function()
            is_complete = True
        finally:
            self._end(is_complete)
        return True

    def _begin(self, frame: FrameType | None) -> None:
        try:
            if self._is_torn or self._frame is not None:
                self._is_torn = True
                self._mend()
                self._is_torn = False
            self._frame = frame
        except BaseException:
            self._end(is_complete=False)
            raise

    def _end(self, is_complete: bool) -> None:
        if not is_complete:
            self._is_torn = True
        self._frame = None
        while True:  # more than once if an exception has prevented an earlier release by this thread
            try:
                self._lock.release()
            except RuntimeError:
                return
