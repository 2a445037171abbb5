"""What a step measured of a token, as requests return it: one dict a position."""

from jaxserve.logprobs import Logprob
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer


def logprob_entry(
    token: int, row: int, scores: TokenLogprobs, count: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Return entries of a token and of the ``count`` most likely ones (-1: all that the step computed)."""
    entry = {token: Logprob(float(scores.chosen[row]), int(scores.ranks[row]), _text(tokenizer, token))}
    size = scores.top.shape[1] if count < 0 else count
    most_likely = zip(scores.top_ids[row, :size].tolist(), scores.top[row, :size].tolist(), strict=True)
    for rank, (token_id, logprob) in enumerate(most_likely, 1):
        if token_id not in entry:
            entry[token_id] = Logprob(logprob, rank, _text(tokenizer, token_id))
    return entry


def sample_entry(
    token: int, row: int, scores: TokenLogprobs, params: SamplingParams, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Return entries of a sampled token and of the requested ones: those listed, or the most likely."""
    named = params.logprob_token_ids
    if named is None:
        return logprob_entry(token, row, scores, params.logprobs or 0, tokenizer)
    entry = logprob_entry(token, row, scores, 0, tokenizer)
    for token_id, logprob in zip(named, scores.tracked[row, : len(named)].tolist(), strict=True):
        if token_id not in entry:
            entry[token_id] = Logprob(logprob, None, _text(tokenizer, token_id))
    return entry


def _text(tokenizer: Tokenizer | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token)
