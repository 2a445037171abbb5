"""Deliver a step's tokens to their requests: detokenize, collect logprobs, detect stop strings."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.errors import own_failure
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.sequence import Sequence
from jaxserve.text.detokenizer import StopVerdict
from jaxserve.text.tokenizer import Tokenizer


class Stop(NamedTuple):
    """A stop string found in a completion.

    Attributes:
        request: The request.
        sample: The sample.
        stop_string: The stop string.
        length: Length in tokens, prompt included, up to the token that completed the stop string.
    """

    request: RequestState
    sample: Sample
    stop_string: str
    length: int


class Failure(NamedTuple):
    """A request whose tokens could not be delivered."""

    request: RequestState
    error: Exception


class Delivery(NamedTuple):
    """Results of delivering a step's tokens. Times are in seconds of ``time.monotonic()``.

    Attributes:
        changed: Requests that got tokens, each once.
        started: Requests that got their first token.
        ended: Requests that may have finished, once per finished sample.
        stopped: Stop strings found; the caller must finish the sequences.
        failures: Requests that failed, with the error.
        previous_s: For each sample that got tokens, the time of its previous tokens; 0 if there are none.
        num_tokens: Number of delivered tokens.
    """

    changed: list[RequestState]
    started: list[RequestState]
    ended: list[RequestState]
    stopped: list[Stop]
    failures: list[Failure]
    previous_s: list[float]
    num_tokens: int


def deliver(
    sampled: Collection[tuple[Sequence, int, list[int]]],
    owners: Mapping[str, tuple[RequestState, Sample]],
    scores: TokenLogprobs | None,
    tokenizer: Tokenizer | None,
    now: float,
    has_drafts: bool = False,
) -> Delivery:
    """Deliver a step's tokens to their samples.

    Args:
        sampled: ``Completion.sampled`` of the step.
        owners: Request and sample of each sequence id; tokens of other sequences are dropped.
        scores: Logprobs of the step's samples, if requested.
        tokenizer: Decodes the tokens of logprobs.
        now: Time of the tokens, in seconds of ``time.monotonic()``.
        has_drafts: Whether sequences may have several new tokens.
    """
    changed: dict[RequestState, None] = {}
    delivery = Delivery([], [], [], [], [], [], 0)
    started, previous_s = delivery.started, delivery.previous_s
    for sequence, first, tokens in sampled:
        owner = owners.get(sequence.sequence_id)
        if owner is None:
            continue
        request, sample = owner
        changed[request] = None
        last_s = sample.last_token_s
        sample.last_token_s = now
        previous_s.append(last_s)
        if not last_s and request.first_token_s is None:
            request.first_token_s = now
            started.append(request)
        is_finished = sequence.finish_reason is not None
        try:
            verdict, shown, params = None, tokens, request.params
            if sample.detokenizer is not None:
                shown = sample.shown_tokens(tokens, params.include_stop_str_in_output) if is_finished else tokens
                verdict = sample.detokenizer.push_tokens(shown)
            if sample.logprobs is not None:
                assert scores is not None
                kept = tokens if verdict is None else _up_to(verdict, sequence, tokens)
                sample.score(kept, first, scores, params, tokenizer, len(shown))
        except BaseException as error:
            delivery.failures.append(Failure(request, own_failure(error)))
            continue
        if verdict is not None:
            length = sequence.num_prompt_tokens + verdict.num_tokens
            delivery.stopped.append(Stop(request, sample, verdict.stop_string, length))
        if verdict is not None or is_finished:
            delivery.ended.append(request)
    delivery.changed.extend(changed)
    return delivery._replace(num_tokens=_num_tokens(sampled, delivery.stopped) if has_drafts else len(previous_s))


def _num_tokens(sampled: Collection[tuple[Sequence, int, list[int]]], stopped: list[Stop]) -> int:
    """Return the number of sampled tokens without those after a stop string."""
    num_late = sum(len(stop.sample.sequence.token_ids) - stop.length for stop in stopped)
    return sum(len(tokens) for _, _, tokens in sampled) - num_late


def _up_to(verdict: StopVerdict, sequence: Sequence, tokens: list[int]) -> list[int]:
    """Return those of a sequence's last tokens up to the one that completed a stop string."""
    return tokens[: len(tokens) - (sequence.num_output_tokens - verdict.num_tokens)]
