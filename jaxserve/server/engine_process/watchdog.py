"""Says that the process lives, and ends it when the engine does not get on."""

import faulthandler
import threading
import time

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.server.engine_process.outbox import Outbox

_INTERVAL_S = 1.0


class Watchdog:
    """Sends heartbeats; where the engine's thread has work and does not get on, writes down all stacks and exits.

    Runs until the process ends.

    The end comes from a timer of C, which each look at the engine sets back: it comes too where no thread of Python
    can run any more.

    Args:
        thread: Runs the engine.
        outbox: To the front end.
        timeout_s: Seconds without progress; 0: any time.
    """

    def __init__(self, thread: EngineThread, outbox: Outbox, timeout_s: float):
        self._engine = thread
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._interval_s = min(_INTERVAL_S, timeout_s / 4) if timeout_s else _INTERVAL_S
        self._num_done = -1
        threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._look()
            self._outbox.send_heartbeat()
            time.sleep(self._interval_s)

    def _look(self) -> None:
        """Sets the timer back if the engine has got on, or has nothing to do."""
        num_done = self._engine.num_done
        if num_done == self._num_done and not self._engine.is_idle:
            return
        self._num_done = num_done
        if self._timeout_s:
            faulthandler.dump_traceback_later(self._timeout_s, exit=True)
