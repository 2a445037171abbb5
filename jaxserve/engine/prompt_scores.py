"""Log-probabilities of prompts, as arrays: a long prompt with many alternatives would be millions of objects."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.sampling.logprobs import TokenLogprobs

Shown = Callable[[int], tuple[str | None, bytes | None]]
"""Returns a token's text and bytes, as ``Logprob`` has them."""


def packed_scores(
    targets: Sequence[int], first: int, scores: TokenLogprobs, count: int, shown: Shown, offsets: Sequence[int] | None
) -> PackedLogprobs:
    """Return the log-probabilities of tokens and of the most likely ones at their positions.

    Args:
        targets: The tokens.
        first: Row of ``scores`` of the first of them; the others follow.
        scores: Of a step.
        count: How many of the most likely tokens; -1 for all that the step computed.
        shown: How a token is shown; called once for each token among the entries.
        offsets: Where the text of each of ``targets`` begins; None if that is unknown.
    """
    rows, size = slice(first, first + len(targets)), scores.top.shape[1] if count < 0 else count
    tokens = np.concatenate([np.array(targets, np.int32)[:, None], scores.top_ids[rows, :size]], axis=1, dtype=np.int32)
    logprobs = np.concatenate([scores.chosen[rows, None], scores.top[rows, :size]], axis=1, dtype=np.float32)
    ranks = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape).copy()
    ranks[:, 0] = scores.ranks[rows]
    starts = np.full(tokens.shape, -1, np.int32)
    starts[:, 0] = -1 if offsets is None else offsets
    is_first = _first_of_each(tokens)
    kept = tokens[is_first]
    unique, places = np.unique(kept, return_inverse=True)
    texts, raws = zip(*map(shown, unique.tolist()), strict=True)
    text_lengths, joined_texts = _joined([None if text is None else text.encode() for text in texts], places)
    raw_lengths, joined_raws = _joined(raws, places)
    return PackedLogprobs(
        lengths=is_first.sum(axis=1, dtype=np.int32).tobytes(),
        token_ids=kept.tobytes(),
        logprobs=logprobs[is_first].tobytes(),
        ranks=ranks[is_first].tobytes(),
        text_lengths=text_lengths,
        texts=joined_texts,
        raw_lengths=raw_lengths,
        raws=joined_raws,
        offsets=starts[is_first].tobytes(),
    )


def _first_of_each(tokens: np.ndarray) -> np.ndarray:
    """Return which entries of each row are the first of their token."""
    order = np.argsort(tokens, axis=1, kind="stable")
    ordered = np.take_along_axis(tokens, order, axis=1)
    is_new = np.ones(tokens.shape, bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    found = np.empty_like(is_new)
    np.put_along_axis(found, order, is_new, axis=1)
    return found


def _joined(parts: Sequence[bytes | None], places: np.ndarray) -> tuple[bytes, bytes]:
    """Return the lengths of the parts at some places, -1 for None, and these parts joined."""
    lengths = np.array([-1 if part is None else len(part) for part in parts], np.int32)
    if not any(parts):
        return lengths[places].tobytes(), b""
    return lengths[places].tobytes(), b"".join([parts[place] or b"" for place in places.ravel().tolist()])
