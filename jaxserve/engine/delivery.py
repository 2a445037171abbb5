"""From a step's tokens to the texts of the requests they belong to: the loop that every generated token passes."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.sampling.logprobs import TokenLogprobs


class Stop(NamedTuple):
    """A text that a stop string ended."""

    request: RequestState
    sample: Sample
    stop_string: str


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
        previous_s: For each token, when the token before it in the same text came; 0 for the first.
    """

    changed: list[RequestState]
    started: list[RequestState]
    ended: list[RequestState]
    stopped: list[Stop]
    failures: list[Failure]
    previous_s: list[float]


def deliver(
    sampled: Iterable[tuple[Sequence, int, list[int]]],
    owners: Mapping[str, tuple[RequestState, Sample]],
    scores: TokenLogprobs | None,
    tokenizer: Tokenizer | None,
    now: float,
) -> Delivery:
    """Gives a step's tokens to the samples they belong to.

    Args:
        sampled: Each sequence that got tokens, its row in the step, and the tokens; see ``Completion``.
        owners: Sequence id -> request and sample; tokens of others are dropped.
        scores: Logprobs of the step's rows, where any row asked for them.
        tokenizer: For the texts of single tokens in logprobs.
        now: The time of all these tokens, in seconds of ``time.monotonic()``.
    """
    changed: dict[RequestState, None] = {}
    delivery = Delivery([], [], [], [], [], [])
    started, previous_s = delivery.started, delivery.previous_s
    for sequence, row, tokens in sampled:
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
                for token in tokens:
                    sample.score(token, row, scores, request.params, tokenizer)
        except Exception as error:
            delivery.failures.append(Failure(request, error))
            continue
        if verdict is not None:
            delivery.stopped.append(Stop(request, sample, verdict.stop_string))
        if verdict is not None or is_finished:
            delivery.ended.append(request)
    delivery.changed.extend(changed)
    return delivery
