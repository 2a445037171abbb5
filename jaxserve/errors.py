"""The errors that users meet. Each says what was expected and what came; all but one are `ValueError`s."""

from typing import Any


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An engine setting, a model directory or one of its files is wrong or unsupported."""


class UnsupportedModelError(ConfigError):
    """The checkpoint's architecture is not one that jaxserve can run."""


class MemoryPlanError(ConfigError):
    """The model, or one request of the longest length, does not fit into the memory there is."""


class RequestError(JaxserveError, ValueError):
    """A prompt or a sampling parameter is wrong. Only this request fails; the engine goes on.

    Args:
      message: What was expected and what came.
      parameter: Name of the argument at fault. When given, the text ends in "(parameter=…, value=…)" as in vLLM.
      value: The argument's value, None where it says nothing more; long ones are shortened in the text alone.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        self.parameter = parameter
        self.value = value
        if parameter is not None:
            shown = "" if value is None else f", value={_shortened(value)}"
            message = f"{message} (parameter={parameter}{shown})"
        super().__init__(message)


class RequestFailedError(RequestError):
    """The engine failed at a request that was good. Only this request fails; the engine goes on."""


class OverloadedError(JaxserveError):
    """The queue is full; nothing of the request was done.

    Args:
      message: Which limit, and what came.
      retry_after_s: Seconds after which another try makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineError(JaxserveError, TimeoutError):
    """The request's time was up before it ended."""


SHUT_DOWN = "the engine stopped: it was shut down"
"""What an engine says that was closed."""


class EngineDeadError(JaxserveError, RuntimeError):
    """The engine stopped after a failure; the first failure is the `__cause__`. Make a new engine."""


def unforeseen(error: BaseException) -> str:
    """What users are told of an error that nobody foresaw: its text may be of the inside, and is in the log alone."""
    return f"{type(error).__name__}, see the log"


def _shortened(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
