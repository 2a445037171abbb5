"""Finds tool calls inside reasoning that was not closed."""

from collections.abc import Callable, Collection

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.message import MessageBuilder
from jaxserve.parsers.source import MAX_HELD_LENGTH, Reading, Source


class _Opened(Exception):
    """A call opened."""


class _Refused(Exception):
    """The text does not begin with a call of an offered tool."""


class CallFinder:
    """Finds calls of offered tools by reading them in their format.

    Args:
      run: Reads a completion: `ToolFormat.run`.
      names: Names of the offered tools.
    """

    def __init__(self, run: Callable[[CallReader], Reading[None]], names: Collection[str]) -> None:
        self._run = run
        self._names = names

    def find(self, source: Source) -> Reading[int]:
        """Return 0 if the unread text begins with a call of an offered tool.

        Returns:
          Otherwise how many of the unread characters were tried; at most `MAX_HELD_LENGTH`.
        """
        trial = Source()
        reading = self._run(CallReader(trial, MessageBuilder(self._check), str))
        num_fed = 0
        while True:
            text = source.rest()
            trial.feed(text[num_fed:MAX_HELD_LENGTH])
            num_fed = min(len(text), MAX_HELD_LENGTH)
            if source.is_ended and num_fed == len(text):
                trial.end()
            try:
                next(reading, None)
            except _Opened:
                return 0
            except _Refused:
                break
            if trial.is_ended or num_fed == MAX_HELD_LENGTH:
                break
            yield
        return max(1, num_fed - len(trial.rest()))

    def _check(self, name: str | None) -> None:
        """End the trial at the first part of the message."""
        raise _Opened if name in self._names else _Refused
