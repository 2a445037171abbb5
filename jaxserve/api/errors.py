"""Exceptions of the public API. Messages say what was expected and what was given; most are `ValueError`s."""

from typing import Any


class JaxserveError(Exception):
    """Base class of all errors that jaxserve raises deliberately."""


class ConfigError(JaxserveError, ValueError):
    """An engine setting, a model directory or one of its files is wrong or unsupported."""


class UnsupportedModelError(ConfigError):
    """jaxserve does not support the checkpoint's architecture."""


class MemoryPlanError(ConfigError):
    """The model, or one request of the longest length, does not fit into memory."""


class RequestError(JaxserveError, ValueError):
    """A prompt or a sampling parameter is invalid. Only this request fails; the engine continues.

    Args:
      message: What was expected and what was given.
      parameter: Name of the invalid argument. When given, the text ends in "(parameter=…, value=…)" as in vLLM.
      value: The argument's value, None if it adds nothing to the message; long values are shortened in the message
          only.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        self.parameter = parameter
        self.value = value
        if parameter is not None:
            shown = "" if value is None else f", value={_shortened(value)}"
            message = f"{message} (parameter={parameter}{shown})"
        super().__init__(message)


class RequestFailedError(RequestError):
    """The engine failed on a valid request. Only this request fails; the engine continues."""


class OverloadedError(JaxserveError):
    """A queue limit is reached; the request was rejected without any work.

    Args:
      message: The limit and the current number.
      retry_after_s: Seconds after which to retry.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineError(JaxserveError, TimeoutError):
    """The request timed out before it finished."""


SHUT_DOWN = "the engine stopped: it was shut down"
"""The message of an engine that was shut down."""


class EngineDeadError(JaxserveError, RuntimeError):
    """The engine stopped after a failure; the first failure is the `__cause__`. Create a new engine to continue."""


class EngineBusyError(JaxserveError, RuntimeError):
    """A finalizer, a callback or a trace function has called an engine inside one of its steps; nothing has changed."""


def own_failure(error: BaseException) -> Exception:
    """Return the error that fails a single request: an ``Exception``, or a panic of a library written in Rust.

    Any other ``BaseException``, such as a ``KeyboardInterrupt``, is no failure of a request and is raised again.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__module__ != "pyo3_runtime":  # that of PanicException, which cannot be imported
        raise error
    failure = RuntimeError("a library panicked")
    failure.__cause__ = error
    return failure


def unforeseen(error: BaseException) -> str:
    """Return the message for an unexpected error: its details may be internal, so they are only in the log."""
    return f"{type(error).__name__}, see the log"


def _shortened(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
