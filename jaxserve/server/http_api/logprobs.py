"""Log probabilities in the forms of completions and of chat completions. JSON has no infinity: -9999 stands for it."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.server.http_api.long_lists import LongList
from jaxserve.server.long_work import MAX_ENTRIES_ON_LOOP

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
    tokens, sampled, offsets = list[str](), list[float | None](), list[int]()
    rest, tops = iter(token_ids), list[dict[str, float] | None]()
    is_short = _is_short(positions)
    for part in _parts(positions):
        for token_id, position in zip(itertools.islice(rest, len(part)), part, strict=True):
            own = position[token_id] if position else None
            if own is not None and own.text_offset is not None:
                offset = begin + own.text_offset
            offsets.append(offset)
            text = _text_of(token_id, own, as_ids, first_token)
            tokens.append(text)
            sampled.append(None if own is None else _finite(own.logprob))
            offset += len(first_token if own is None else own.decoded_token or "")
            if is_short:
                tops.append(_top(position, as_ids) if position else None)

    def top_parts() -> Iterator[list[Any]]:
        for part in _parts(positions):
            yield [_top(position, as_ids) if position else None for position in part]

    return {
        "text_offset": offsets,
        "token_logprobs": sampled,
        "tokens": tokens,
        "top_logprobs": tops if is_short else LongList(top_parts),
    }


def joined_logprobs(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists of two objects of ``completion_logprobs``, one after the other."""
    return {name: _joined(first[name], then[name]) for name in then}


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

    def entry(token_id: int, position: Mapping[int, Logprob]) -> dict[str, Any]:
        ranked = sorted(position, key=lambda other: -_finite(position[other].logprob))
        others = [other for other in ranked if other in named] if named is not None else ranked
        if named is None and num_top >= 0:
            others = others[:num_top]
        top = [_entry(other, position[other], as_ids) for other in others]
        return {**_entry(token_id, position[token_id], as_ids), "top_logprobs": top}

    def parts() -> Iterator[list[Any]]:
        rest = iter(token_ids)
        for part in _parts(positions):
            pairs = zip(itertools.islice(rest, len(part)), part, strict=True)
            yield [entry(token_id, position or {}) for token_id, position in pairs]

    return {"content": _written(positions, parts)}


def prompt_logprobs(positions: PromptLogprobs) -> Any:
    """Return vLLM's field ``prompt_logprobs``: for each token a map from token id to its entry, null for the first."""

    def parts() -> Iterator[list[Any]]:
        for part in _parts(positions):
            yield [_prompt_entry(position) if position else None for position in part]

    return _written(positions, parts)


def _prompt_entry(position: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in position.items()
    }


def _is_short(positions: SampleLogprobs | PromptLogprobs) -> bool:
    """Whether all entries may be objects at once."""
    return not isinstance(positions, PackedLogprobs) or positions.num_entries <= MAX_ENTRIES_ON_LOOP


def _parts(positions: SampleLogprobs | PromptLogprobs) -> Iterator[Sequence[Position]]:
    """Yield the positions of an output, at most ``MAX_ENTRIES_ON_LOOP`` entries of long ones at a time."""
    if not isinstance(positions, PackedLogprobs):
        yield positions
        return
    widest = max(1, -(-positions.num_entries // max(1, len(positions))))
    yield from positions.parts(max(1, MAX_ENTRIES_ON_LOOP // widest))


def _written(positions: SampleLogprobs | PromptLogprobs, parts: Callable[[], Iterator[list[Any]]]) -> Any:
    """Return a list, or a ``LongList`` if its positions have many entries."""
    return [item for part in parts() for item in part] if _is_short(positions) else LongList(parts)


def _joined(first: Any, then: Any) -> Any:
    if not (isinstance(first, LongList) or isinstance(then, LongList)):
        return [*first, *then]

    def parts() -> Iterator[list[Any]]:
        for each in (first, then):
            yield from each.parts() if isinstance(each, LongList) else (each,)

    return LongList(parts)


def _text_of(token_id: int, own: Logprob | None, as_ids: bool, first_token: str) -> str:
    if own is None and not as_ids:
        return first_token
    return f"token_id:{token_id}" if own is None else _token(token_id, own, as_ids)


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
