"""Refuse to time what gave a wrong result, and word failures for a figure's note."""

from pallas_kernels.operation import Comparison
from scripts.gpu.driver import first_line


class WrongResultError(Exception):
    """A result is not within its tolerance; the message says where."""


def require_right(comparison: Comparison, inputs: str = "") -> None:
    """Let only a right result be timed.

    Args:
        comparison: The result with its reference.
        inputs: Which inputs these were, such as ``", seed 3"``.

    Raises:
        WrongResultError: The result is wrong.
    """
    if not comparison.is_right:
        worst = f"worst row {comparison.worst:.2g} of what is allowed at {comparison.place}"
        raise WrongResultError(f"not timed: {worst}{inputs}")


def failure_note(error: Exception) -> str:
    """Return an error's first line, after the error's name unless it only tells of a wrong result."""
    kind = "" if isinstance(error, WrongResultError) else f"{type(error).__name__}: "
    return f"{kind}{first_line(error)}"
