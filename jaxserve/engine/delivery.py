"""From a step's tokens to the texts of the requests they belong to: the loop that every generated token passes."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.sequence import Sequence
from jaxserve.text.detokenizer import StopVerdict
from jaxserve.text.tokenizer import Tokenizer


class Stop(NamedTuple):
    """A text that a stop string ended.

    Attributes:
        request: Its request.
        sample: Its sample.
        stop_string: The stop string.
        length: Tokens up to the one that completed the stop string, those of the prompt included.
    """

    request: RequestState
    sample: Sample
    stop_string: str
    length: int


class Failure(NamedTuple):
    """A request whose token could not be delivered."""

    request: RequestState
    error: Exception


class Delivery(NamedTuple):
    """What a step's tokens changed.

    Attributes:
        changed: The requests that got a token, each once.
        started: Those of them whose first token it was.
        ended: Samples' requests that may have ended, once for each sample that has.
        stopped: Texts that a stop string ended; their sequences still have to be.
        failures: Requests that cannot go on, with the reason.
        previous_s: For each text that got tokens, when it got tokens before; 0 for the first time.
        num_tokens: Tokens delivered.
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
    """Gives a step's tokens to the samples they belong to.

    Args:
        sampled: Each sequence that got tokens, the index of the first among the step's samples, and the tokens.
        owners: Sequence id -> request and sample; tokens of others are dropped.
        scores: Logprobs of the step's samples, where any row asked for them.
        tokenizer: For the texts of single tokens in logprobs.
        now: The time of all these tokens, in seconds of ``time.monotonic()``.
        has_drafts: Whether a sequence may have got several tokens.
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
            verdict = None
            if sample.detokenizer is not None:
                params = request.params
                shown = sample.shown_tokens(tokens, params.include_stop_str_in_output) if is_finished else tokens
                verdict = sample.detokenizer.push_tokens(shown)
            if sample.logprobs is not None:
                assert scores is not None
                kept = tokens if verdict is None else _up_to(verdict, sequence, tokens)
                sample.score(kept, first, scores, request.params, tokenizer)
        except Exception as error:
            delivery.failures.append(Failure(request, error))
            continue
        if verdict is not None:
            length = sequence.num_prompt_tokens + verdict.num_tokens
            delivery.stopped.append(Stop(request, sample, verdict.stop_string, length))
        if verdict is not None or is_finished:
            delivery.ended.append(request)
    delivery.changed.extend(changed)
    return delivery._replace(num_tokens=_num_tokens(sampled, delivery.stopped) if has_drafts else len(previous_s))


def _num_tokens(sampled: Collection[tuple[Sequence, int, list[int]]], stopped: list[Stop]) -> int:
    """How many tokens were sampled but for those after a stop string."""
    num_late = sum(len(stop.sample.sequence.token_ids) - stop.length for stop in stopped)
    return sum(len(tokens) for _, _, tokens in sampled) - num_late


def _up_to(verdict: StopVerdict, sequence: Sequence, tokens: list[int]) -> list[int]:
    """The part of a sequence's last tokens up to the one that completed a stop string."""
    return tokens[: len(tokens) - (sequence.num_output_tokens - verdict.num_tokens)]
