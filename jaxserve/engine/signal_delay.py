"""Delay signal handlers, which may raise anything anywhere, until an engine is between two steps."""

import collections
import signal
import threading
from types import FrameType
from typing import Any

_NAMES = "HUP INT QUIT USR1 USR2 ALRM TERM CHLD CONT XCPU VTALRM PROF WINCH".split()
_SIGNALS = tuple(number for name in _NAMES if (number := getattr(signal, f"SIG{name}", None)) is not None)


class SignalDelay:
    """Delays the Python handlers of signals inside a ``with`` block until ``run_pending``, or the end of the block.

    Python runs them on the main thread between any two instructions. An exception of one, such as the KeyboardInterrupt
    of Ctrl-C or the timeout of an alarm, would leave a step half done. On other threads the block has no effect.

    Attributes:
        is_held: Whether handlers are delayed. Set it to False around a function that waits or is the user's, and to
            True in a ``finally`` clause: an assignment cannot be interrupted there, but a call could.

    Example:
        >>> with SignalDelay() as signals:
        ...     while engine.num_unfinished:
        ...         engine.step()
        ...         signals.run_pending()
    """

    def __init__(self) -> None:
        self.is_held = False
        self._handlers: dict[int, Any] = {}
        self._pending: collections.deque[tuple[int, FrameType | None]] = collections.deque()

    def __enter__(self) -> "SignalDelay":
        if threading.current_thread() is not threading.main_thread():
            return self
        self.is_held = True
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # a handler raised before it was replaced
            self.is_held = False
            self._restore()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_held = False
        try:
            self._restore()
        finally:
            self._run_all()

    def run_pending(self) -> None:
        """Run the handlers of the signals that have arrived; an exception of theirs is raised here."""
        if self._pending:
            self.is_held = False
            try:
                self._run_all()
            finally:
                self.is_held = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_held:
            self._pending.append((number, frame))
        else:
            self._handlers[number](number, frame)

    def _run_all(self) -> None:
        """Run the pending handlers, also those after one that raises."""
        try:
            while self._pending:
                number, frame = self._pending.popleft()
                self._handlers[number](number, frame)
        finally:
            if self._pending:
                self._run_all()

    def _restore(self) -> None:
        """Restore the handlers, unless the block has set others.

        A handler that raises meanwhile prevents its own replacement only: ``_note`` then passes its signal on.
        """
        first: BaseException | None = None
        for number, handler in self._handlers.items():
            try:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
