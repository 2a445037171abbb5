"""From a request's parameters to the numbers that the sampler needs."""

import hashlib
from collections.abc import Mapping, Sequence

from jaxserve.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import Sampling


def stream_seed(seed: int, index: int) -> int:
    """A 32-bit seed for sample ``index`` of a request, unlike those of other seeds and samples."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def make_sampling(
    params: SamplingParams,
    *,
    seed: int,
    vocab_size: int,
    arguments: Mapping[str, float],
    banned_ids: Sequence[int],
    banned_until: int,
    bad_ids: Sequence[int],
) -> Sampling:
    """The numbers of one sample.

    Args:
        params: What the request asks for, checked.
        seed: The sample's own, 32 bits.
        vocab_size: Token ids are below it.
        arguments: What the engine's logits processors read, with the values that change nothing.
        banned_ids: Tokens not allowed before ``min_tokens``.
        banned_until: Position of the first token that may be one of them.
        bad_ids: Tokens never allowed.
    """
    return Sampling(
        options=OptionValues(**{name: getattr(params, name) for name in SAMPLING_OPTIONS}),
        seed=seed,
        num_logprobs=_num_logprobs(params, vocab_size),
        banned_ids=tuple(banned_ids) if params.min_tokens else (),
        banned_until=banned_until,
        bad_ids=tuple(bad_ids),
        allowed_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        logit_bias=tuple((params.logit_bias or {}).items()),
        tracked_ids=tuple(params.logprob_token_ids or ()),
        arguments=_arguments(params, arguments),
    )


def _num_logprobs(params: SamplingParams, vocab_size: int) -> int:
    if params.logprob_token_ids is not None:
        return 0
    if params.logprobs is None:
        return -1
    return vocab_size if params.logprobs == -1 else params.logprobs


def _arguments(params: SamplingParams, defaults: Mapping[str, float]) -> tuple[float, ...]:
    """Numbers for the logits processors; none where the request has none of its own."""
    given = params.extra_args
    return tuple(float(given.get(name, default)) for name, default in defaults.items()) if given else ()
