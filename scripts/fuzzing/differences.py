"""Compare what requests return without drafts and with them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve import RequestOutput
from jaxserve.api.outputs import CompletionOutput
from scripts.fuzzing.requests import Asked

_CLOSE = 2e-3
"""Most by which log-probabilities of float32 differ where sums depend on the batch."""


def differences(
    asked: Sequence[Asked], without: Sequence[RequestOutput], drafted: Sequence[RequestOutput], is_exact: bool
) -> Iterator[dict[str, Any]]:
    """Yield a description of each request whose outputs differ.

    Args:
        asked: The requests.
        without: Their outputs without drafts.
        drafted: Their outputs with drafts.
        is_exact: Whether the bits of log-probabilities must be the same.
    """
    for each, one, other in zip(asked, without, drafted, strict=True):
        found = _difference(each, one, other, is_exact)
        if found is not None:
            yield {"request": one.request_id, "what": found, "asked": str(each)}


def _difference(asked: Asked, one: RequestOutput, other: RequestOutput, is_exact: bool) -> str | None:
    if one.error != other.error:
        return f"error: {one.error!r} without drafts, {other.error!r} with"
    if one.error is not None:  # what a request had returned before it failed depends on the step
        return None
    if not _same_numbers(one.embedding, other.embedding, is_exact):
        return f"embedding: {one.embedding} without drafts, {other.embedding} with"
    is_cut = asked.aborts_after is not None
    if not is_cut and (found := _logprobs("prompt_logprobs", one.prompt_logprobs, other.prompt_logprobs, is_exact)):
        return found
    for plain, drafted in zip(one.outputs, other.outputs, strict=True):
        found = _of_completion(plain, drafted, is_exact, is_cut)
        if found is not None:
            return f"completion {plain.index}, {found}"
    return None


def _of_completion(one: CompletionOutput, other: CompletionOutput, is_exact: bool, is_cut: bool) -> str | None:
    """Return what differs; of a request that may have been aborted, only tokens that both have count."""
    pairs = [*zip(one.token_ids, other.token_ids, strict=False)]
    wrong = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if wrong is not None:
        rests = f"{one.token_ids[wrong:]} without drafts, {other.token_ids[wrong:]} with"
        return f"token {wrong}: {rests}{_margin(one, wrong)}"
    if is_cut:
        one_scores, other_scores = (each.logprobs and each.logprobs[: len(pairs)] for each in (one, other))
        return _logprobs("logprobs", one_scores, other_scores, is_exact)
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            return f"{name}: {a!r} without drafts, {b!r} with"
    return _logprobs("logprobs", one.logprobs, other.logprobs, is_exact)


def _margin(one: CompletionOutput, index: int) -> str:
    """Return the log-probabilities without drafts at a position."""
    return f"; without: {one.logprobs[index]}" if one.logprobs else ""


def _logprobs(name: str, one: Any, other: Any, is_exact: bool) -> str | None:
    if is_exact or one is None or other is None:
        return None if str(one) == str(other) else f"{name}: {_first_apart(one, other)}"
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if a is not None and not _close_entries(a, b):
            return f"{name} {index}: {a} without drafts, {b} with"
    return None


def _first_apart(one: Any, other: Any) -> str:
    if one is None or other is None:
        return f"{one} without drafts, {other} with"
    pairs = itertools.zip_longest(one, other)
    index, pair = next((index, pair) for index, pair in enumerate(pairs) if str(pair[0]) != str(pair[1]))
    return f"at {index}: {pair[0]} without drafts, {pair[1]} with"


def _close_entries(one: dict[int, Any], other: dict[int, Any]) -> bool:
    """Whether the values are close; near the last of the most likely tokens, the tokens may be others."""
    if next(iter(one)) != next(iter(other)):
        return False
    values = ([each.logprob for each in entry.values()] for entry in (one, other))
    return all(_is_close(a, b) for a, b in itertools.zip_longest(*map(sorted, values)))


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return one == other or abs(one - other) <= _CLOSE * max(1.0, abs(one)) or (math.isnan(one) and math.isnan(other))


def _same_numbers(one: list[float] | None, other: list[float] | None, is_exact: bool) -> bool:
    if one is None or other is None or is_exact:
        return one == other
    return all(_is_close(a, b) for a, b in zip(one, other, strict=True))
