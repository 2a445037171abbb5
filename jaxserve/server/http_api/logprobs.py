"""Log probabilities in the forms of completions and of chat completions. JSON has no infinity: -9999 stands for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.logprobs import Logprob, PromptLogprobs, SampleLogprobs

LEAST_LOGPROB = -9999.0

Position = Mapping[int, Logprob] | None


def completion_logprobs(
    token_ids: Sequence[int],
    positions: SampleLogprobs | PromptLogprobs,
    *,
    begin: int = 0,
    offset: int = 0,
    as_ids: bool = False,
    first_token: str = "",
) -> dict[str, Any]:
    """Return the object ``logprobs`` of completions: lists with one item per token.

    Args:
        token_ids: The tokens.
        positions: One per token; None (or empty) for the first token of a prompt.
        begin: Characters of the choice's text before that of the completion.
        offset: Characters of the choice's text before the first token, if its position has no offset.
        as_ids: Write tokens as ``token_id:7``.
        first_token: Text of a token without log probabilities.
    """
    tokens, sampled, tops = list[str](), list[float | None](), list[dict[str, float] | None]()
    offsets: list[int] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        own = position[token_id] if position else None
        if own is not None and own.text_offset is not None:
            offset = begin + own.text_offset
        offsets.append(offset)
        if not position or own is None:
            tokens.append(f"token_id:{token_id}" if as_ids else first_token)
            sampled.append(None)
            tops.append(None)
            offset += len(first_token)
            continue
        tokens.append(_token(token_id, own, as_ids))
        sampled.append(_finite(own.logprob))
        tops.append(_top(position, as_ids))
        offset += len(own.decoded_token or "")
    return {"text_offset": offsets, "token_logprobs": sampled, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(
    token_ids: Sequence[int],
    positions: SampleLogprobs,
    *,
    num_top: int,
    named: Sequence[int] | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return the object ``logprobs`` of chat completions: one item per token.

    Args:
        token_ids: The tokens.
        positions: One per token.
        num_top: How many of the most likely tokens to list; -1: all of them.
        named: List these tokens instead.
        as_ids: Write tokens as ``token_id:7``.
    """
    content: list[dict[str, Any]] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position, key=lambda other: -_finite(position[other].logprob))
        others = [other for other in ranked if other in named] if named is not None else ranked
        if named is None and num_top >= 0:
            others = others[:num_top]
        top = [_entry(other, position[other], as_ids) for other in others]
        content.append({**_entry(token_id, position[token_id], as_ids), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(positions: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return vLLM's field ``prompt_logprobs``: for each token a map from token id to its entry, null for the first."""
    return [
        {
            str(token_id): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in position.items()
        }
        if position
        else None
        for position in positions
    ]


def _entry(token_id: int, one: Logprob, as_ids: bool) -> dict[str, Any]:
    token, raw = _token(token_id, one, as_ids), one.token_bytes
    if raw is None and one.decoded_token is not None:
        raw = one.decoded_token.encode("utf-8", "replace")
    return {"token": token, "logprob": _finite(one.logprob), "bytes": None if raw is None else list(raw)}


def _top(position: Mapping[int, Logprob], as_ids: bool) -> dict[str, float]:
    """Return log probabilities by text; of tokens with the same text that of the most likely one."""
    found: dict[str, float] = {}
    for token_id, one in position.items():
        token, logprob = _token(token_id, one, as_ids), _finite(one.logprob)
        found[token] = max(logprob, found.get(token, LEAST_LOGPROB))
    return found


def _token(token_id: int, one: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids or one.decoded_token is None else one.decoded_token


def _finite(logprob: float) -> float:
    return logprob if LEAST_LOGPROB < logprob < -LEAST_LOGPROB else LEAST_LOGPROB
