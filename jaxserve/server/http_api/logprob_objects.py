"""Log probabilities as OpenAI's two interfaces write them. There is no infinity in JSON: -9999 stands for it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.logprobs import Logprob, PromptLogprobs, SampleLogprobs

LEAST_LOGPROB = -9999.0

Position = Mapping[int, Logprob] | None


def completion_logprobs(
    token_ids: Sequence[int],
    positions: SampleLogprobs | PromptLogprobs,
    *,
    offset: int = 0,
    as_ids: bool = False,
    first_token: str = "",
) -> dict[str, Any]:
    """The object of completions: a list for each kind of thing, an item a token.

    Args:
        token_ids: The tokens.
        positions: One a token; None (or nothing) for a prompt's first.
        offset: Characters of the tokens before the first one.
        as_ids: Write tokens as ``token_id:7``.
        first_token: Text of a token without position.
    """
    tokens, chosen, tops = list[str](), list[float | None](), list[dict[str, float] | None]()
    for token_id, position in zip(token_ids, positions, strict=True):
        if not position:
            tokens.append(_written(token_id, first_token, as_ids))
            chosen.append(None)
            tops.append(None)
            continue
        tokens.append(_token(token_id, position[token_id], as_ids))
        chosen.append(_finite(position[token_id].logprob))
        tops.append(_top(position, as_ids))
    offsets = itertools.accumulate(map(len, tokens[:-1]), initial=offset) if tokens else ()
    return {"text_offset": list(offsets), "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}


def end_offset(logprobs: Mapping[str, Any]) -> int:
    """Where the token behind the last one of a completion's logprobs begins."""
    return logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The logprobs of two parts of a text, one behind the other."""
    return {name: [*first[name], *second[name]] for name in first}


def chat_logprobs(
    token_ids: Sequence[int],
    positions: SampleLogprobs,
    *,
    num_top: int,
    named: Sequence[int] | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The object of chat: one item a token.

    Args:
        token_ids: The tokens.
        positions: One a token.
        num_top: How many of the likeliest tokens to give; -1: all that there are.
        named: Give these tokens instead.
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
    """The field ``prompt_logprobs`` of vLLM: token id -> what is known of it, null for the first token."""
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
    token = _token(token_id, one, as_ids)
    return {"token": token, "logprob": _finite(one.logprob), "bytes": list(token.encode("utf-8", "replace"))}


def _top(position: Mapping[int, Logprob], as_ids: bool) -> dict[str, float]:
    """Text -> log probability; of tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for token_id, one in position.items():
        token, logprob = _token(token_id, one, as_ids), _finite(one.logprob)
        found[token] = max(logprob, found.get(token, LEAST_LOGPROB))
    return found


def _token(token_id: int, one: Logprob, as_ids: bool) -> str:
    return _written(token_id, one.decoded_token or "", as_ids)


def _written(token_id: int, token: str, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else token


def _finite(logprob: float) -> float:
    return logprob if LEAST_LOGPROB < logprob < -LEAST_LOGPROB else LEAST_LOGPROB
