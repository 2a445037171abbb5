"""How a request can end, as counters, log and traces name it."""

import asyncio
from collections.abc import Iterable
from types import MappingProxyType

from jaxserve.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, RequestFailedError
from jaxserve.server.errors import NotImplementedRequestError, UnavailableError, UnknownModelError

OUTCOMES = ("ok", "client_error", "failed", "overloaded", "cancelled", "deadline", "engine_dead")
"""All that there are."""
SERVERS_FAULT = ("failed", "engine_dead")
"""Those that an operator should look at."""

# The first class that an error is an instance of decides; any other error is "failed".
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (RequestFailedError, "failed"),
    (RequestError, "client_error"),
    (UnknownModelError, "client_error"),
    (NotImplementedRequestError, "client_error"),
    (OverloadedError, "overloaded"),
    (DeadlineError, "deadline"),
    (EngineDeadError, "engine_dead"),
    (UnavailableError, "engine_dead"),
    (asyncio.CancelledError, "cancelled"),
    (GeneratorExit, "cancelled"),
)
_OUTCOME_OF_REASON = MappingProxyType({"abort": "cancelled", "error": "failed"})
# A surface may see a deadline before the engine says so, and cancel the request: that is a deadline all the same.
_DEADLINE_SLACK_S = 0.05


def outcome_of(
    error: BaseException | None,
    finish_reasons: Iterable[str],
    *,
    is_finished: bool,
    elapsed_s: float,
    timeout_s: float | None,
) -> str:
    """How a request has ended.

    Args:
        error: What ended the work for it; None where nothing did.
        finish_reasons: Of the texts that have ended.
        is_finished: Whether the last output came; what a reader does behind it changes nothing.
        elapsed_s: Seconds since it began.
        timeout_s: Seconds that it had; None for any number.
    """
    outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")
    if error is None or (outcome == "cancelled" and is_finished):
        return next((_OUTCOME_OF_REASON[one] for one in finish_reasons if one in _OUTCOME_OF_REASON), "ok")
    if outcome == "cancelled" and timeout_s is not None and elapsed_s >= timeout_s - _DEADLINE_SLACK_S:
        return "deadline"
    return outcome
