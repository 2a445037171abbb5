"""Notes the lines of the project that this process executes, for ``scripts/count_call_path.py``.

Python imports it at the start of each process whose ``PYTHONPATH`` has this folder, before anything else runs.
"""

import json
import mmap
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

OFF, ON, WRITE = 0, 1, 2


class Tracer:
    """Notes lines, functions and constructed classes while the first byte of a shared file says so.

    Args:
        folder: Has the file ``switch``; the notes are written beside it when the switch says so.
        root: Folder of the project.
        packages: Folders under it whose files count.
    """

    def __init__(self, folder: str, root: str, packages: tuple[str, ...]):
        self._folder = folder
        self._prefixes = tuple(os.path.join(root, package) + os.sep for package in packages)
        self._packages = tuple(packages)
        self._monitoring: Any = None
        with open(os.path.join(folder, "switch"), "rb") as file:
            self._switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[tuple[str, int, str]] = set()
        self.classes: set[str] = set()

    def start(self) -> None:
        """Trace all threads from now on."""
        threading.Thread(target=self._wait_to_write, daemon=True, name="path-tracer").start()
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _is_counted(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._prefixes)

    def _monitor(self) -> None:
        monitoring = self._monitoring = getattr(sys, "monitoring")  # noqa: B009  (Python 3.12 and newer)
        events = monitoring.events
        monitoring.use_tool_id(monitoring.PROFILER_ID, "path")
        callbacks = {events.LINE: self._on_line, events.PY_START: self._on_start, events.CALL: self._on_call}
        for event, callback in callbacks.items():
            monitoring.register_callback(monitoring.PROFILER_ID, event, callback)
        monitoring.set_events(monitoring.PROFILER_ID, events.LINE | events.PY_START | events.CALL)

    def _on_line(self, code: CodeType, line: int) -> Any:
        if not self._is_counted(code):
            return self._monitoring.DISABLE
        if self._switch[0] == ON:
            self.lines.add((code.co_filename, line))
        return None

    def _on_start(self, code: CodeType, _: int) -> Any:
        if not self._is_counted(code):
            return self._monitoring.DISABLE
        if self._switch[0] == ON:
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))
        return None

    def _on_call(self, code: CodeType, _: int, called: object, argument: object) -> Any:
        if not self._is_counted(code):
            return self._monitoring.DISABLE
        if self._switch[0] == ON and isinstance(called, type) and called.__module__.startswith(self._packages):
            self.classes.add(f"{called.__module__}.{called.__qualname__}")
        return None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not self._is_counted(frame.f_code):
            return None
        if self._switch[0] == ON:
            code = frame.f_code
            if event == "call":
                self.functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))
            elif event == "line":
                self.lines.add((code.co_filename, frame.f_lineno))
        return self._trace

    def _wait_to_write(self) -> None:
        while self._switch[0] != WRITE:
            time.sleep(0.02)
        found = {"lines": sorted(self.lines), "functions": sorted(self.functions), "classes": sorted(self.classes)}
        path = os.path.join(self._folder, f"{os.getpid()}.json")
        with open(path + ".partial", "w", encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(path + ".partial", path)


if os.environ.get("PYTHON_PATH_TRACE"):
    Tracer(**json.loads(os.environ["PYTHON_PATH_TRACE"])).start()
