"""Decide whether tokens finish a sequence, and why."""

from typing import NamedTuple

from jaxserve.api.errors import RequestFailedError, own_failure
from jaxserve.api.outputs import FinishReason
from jaxserve.scheduling.sequence import Sequence


class Ending(NamedTuple):
    """Why a sequence finishes.

    Attributes:
        reason: The finish reason.
        stop_reason: The stop token or other cause that is reported to the user.
        error: For the reason "error", the exception that fails the sequence.
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    error: Exception | None = None


def find_ending(sequence: Sequence, token: int) -> Ending | None:
    """Return how a sequence finishes with its newest token, or None if it continues.

    Advances the sequence's constraint by the token, unless it is a stop token.

    Args:
        sequence: Sequence whose ``token_ids`` end in ``token``.
        token: Newest token.
    """
    length = len(sequence.token_ids)
    if sequence.error is not None:
        return Ending("error", error=sequence.error)
    if token in sequence.stop_ids and length >= sequence.min_length:
        return Ending("stop", sequence.stop_ids[token])
    if sequence.constraint is not None:
        try:
            if sequence.constraint.accept(token):
                return Ending("stop")
        except BaseException as error:  # a failing constraint must not stop the other sequences
            return Ending("error", error=constraint_failure(error))
    if length >= sequence.max_length:
        return Ending("length")
    if sequence.repetition is not None:
        try:
            if ends_in_repetition(sequence):
                return Ending("repetition", "repetition_detected")
        except Exception as error:
            return Ending("error", error=error)
    return None


def constraint_failure(error: BaseException) -> Exception:
    """Return the error that fails the request of a constraint: a RuntimeError says why the constraint cannot go on."""
    failure = own_failure(error)
    return RequestFailedError(str(failure)) if type(failure) is RuntimeError else failure


def find_stop_string(sequence: Sequence, num_new: int, ending: Ending | None) -> Ending | None:
    """Detokenize the newest tokens of a sequence that has stop strings; return how it finishes, if it does.

    A stop string takes precedence over the ending of a later token or of the one that completes it. Tokens after that
    one are removed from the sequence.

    Args:
        sequence: The sequence.
        num_new: Number of its newest tokens.
        ending: How the newest token finishes the sequence, apart from stop strings.
    """
    assert sequence.stop_strings is not None
    if ending is not None and ending.reason == "error":
        return ending
    reason = None if ending is None else ending.reason
    shown = sequence.token_ids[len(sequence.token_ids) - num_new : shown_end(sequence, reason)]
    try:
        found = sequence.stop_strings.push_tokens(shown)
    except BaseException as error:  # a failing detokenizer must not stop the other sequences
        return Ending("error", error=own_failure(error))
    if found is None:
        return ending
    stop_string, num_kept = found
    del sequence.token_ids[sequence.num_prompt_tokens + num_kept :]
    return Ending("stop", stop_string)


def shown_end(sequence: Sequence, reason: FinishReason | None) -> int:
    """Return the length of a sequence that finishes for ``reason`` without its final stop token, if that is hidden."""
    length = len(sequence.token_ids)
    is_hidden = reason == "stop" and not sequence.request.params.include_stop_str_in_output
    return length - 1 if is_hidden and sequence.token_ids[-1] in sequence.stop_ids else length


def ends_in_repetition(sequence: Sequence) -> bool:
    """Whether the output ends in copies of a pattern; false before the minimum length."""
    search = sequence.repetition
    if search is None:
        return False
    is_found = search.ends_in_copies(sequence.token_ids, sequence.num_prompt_tokens)
    return is_found and len(sequence.token_ids) >= sequence.min_length
