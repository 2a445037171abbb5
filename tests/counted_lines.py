"""How much Python does: a measure of work that no load of the machine changes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_lines(work: Callable[[], object]) -> int:
    """The lines that run during some work."""
    found = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal found
        found += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return found
