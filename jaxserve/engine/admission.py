"""The one place where a request is checked against the model, and made into sequences."""

import dataclasses
import hashlib
import time

from jaxserve.engine.detokenizer import Detokenizer
from jaxserve.engine.plan import Sampling
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.outputs import PromptLogprobs
from jaxserve.request import PromptInput
from jaxserve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What a request must keep to.

    Attributes:
        max_model_len: Longest context in tokens.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end a text.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def admit(
    prompt: PromptInput,
    params: SamplingParams,
    *,
    request_id: str,
    replica: int,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    default_seed: int,
    arrival_s: float,
) -> RequestState:
    """The state of a new request.

    Args:
        prompt: Text or token ids.
        params: How to sample.
        request_id: Its name.
        replica: Index of the data slice it will run on.
        limits: What the model can take.
        tokenizer: None where the model has none.
        default_seed: Used where the parameters bring no seed.
        arrival_s: When it came, in seconds of ``time.monotonic()``.

    Raises:
        RequestError: No token ids, a token id out of the vocabulary, or more tokens than a context can hold.
    """
    token_ids = _token_ids(prompt, tokenizer, limits.vocab_size)
    params = _fitted(params, len(token_ids), limits.max_model_len)
    if params.stop_strings and tokenizer is None:
        raise RequestError("stop strings need text; the model directory has no tokenizer", parameter="stop")
    seed = default_seed if params.seed is None else params.seed
    samples = []
    for index in range(params.n):
        sequence = _sequence(f"{request_id}-{index}", token_ids, params, stream_seed(seed, index), limits)
        sequence.wants_prompt_logprobs = params.prompt_logprobs is not None and index == 0
        detokenizer = _detokenizer(token_ids, params, tokenizer)
        samples.append(Sample(index, sequence, detokenizer, None if params.logprobs is None else []))
    prompt_logprobs: PromptLogprobs | None = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None for _ in token_ids]
    return RequestState(
        request_id=request_id,
        prompt=prompt.prompt,
        prompt_token_ids=token_ids,
        params=params,
        samples=samples,
        replica=replica,
        arrival_s=arrival_s,
        queued_s=time.monotonic(),
        prompt_logprobs=prompt_logprobs,
    )


def stream_seed(seed: int, index: int) -> int:
    """A 32-bit seed for sample ``index`` of a request, unlike those of other seeds and samples."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _token_ids(prompt: PromptInput, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if prompt.prompt_token_ids is not None:
        token_ids = list(prompt.prompt_token_ids)
    elif tokenizer is None:
        raise RequestError("the model directory has no tokenizer; expected prompt_token_ids, got text")
    else:
        token_ids = tokenizer.encode(prompt.prompt or "")
    if not token_ids:
        raise RequestError("the prompt has no token ids after tokenization; at least one is needed")
    if max(token_ids) >= vocab_size:
        raise RequestError(f"token id {max(token_ids)} is out of vocabulary; expected ids from 0 to {vocab_size - 1}")
    return token_ids


def _fitted(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """The parameters with ``max_tokens`` cut to what the context holds."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, and one must be left to generate; "
            f"the prompt contains {num_prompt_tokens}"
        )
    if params.max_tokens is None or params.max_tokens > room:
        return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))
    return params


def _sequence(name: str, prompt: list[int], params: SamplingParams, seed: int, limits: ModelLimits) -> Sequence:
    stop_ids: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(limits.eos_token_ids)
    stop_ids |= {token: token for token in params.stop_token_ids or ()}
    sampling = Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        banned_ids=tuple(token for token in stop_ids if token < limits.vocab_size) if params.min_tokens else (),
        banned_until=len(prompt) + params.min_tokens,
    )
    return Sequence(
        sequence_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_length=len(prompt) + (params.max_tokens or 0),
        sampling=sampling,
        stop_ids=stop_ids,
        min_length=len(prompt) + params.min_tokens,
    )


def _detokenizer(prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> Detokenizer | None:
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(
        tokenizer.pieces(params.skip_special_tokens),
        stop=params.stop_strings,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        prompt_token_ids=prompt,
    )
