"""Requests that ask for a vector of their prompt in place of a text, and the vector."""

import numpy as np
from jaxtyping import Float

from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.errors import RequestError
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import PromptInput
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.sequence import Sequence

_SMALLEST_LENGTH = 1e-12  # vectors of less are not made longer
_NOTHING_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)


def pooling_state(
    prompt: PromptInput,
    token_ids: list[int],
    params: PoolingParams,
    limits: ModelLimits,
    *,
    request_id: str,
    priority: int,
    arrival_s: float,
    queued_s: float,
) -> RequestState:
    """The state of a request for a vector: one sequence that ends with its prompt.

    A mean needs the hidden state of each token, so its prompt is never read from the prefix cache.

    Raises:
        RequestError: More tokens than a context can hold.
    """
    length = len(token_ids)
    if length > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{length} input tokens. Please reduce the length of the input prompt.",
            parameter="input_tokens",
            value=length,
        )
    sequence = Sequence(
        sequence_id=f"{request_id}-0",
        token_ids=list(token_ids),
        num_prompt_tokens=length,
        max_length=length,
        pooling=params.pooling,
        priority=priority,
        cache_root=limits.cache_root(prompt.cache_salt, request_id, length),
        reads_cache=params.pooling == "last",
    )
    return RequestState(
        request_id=request_id,
        prompt=prompt.prompt,
        prompt_token_ids=token_ids,
        params=_NOTHING_SAMPLED,
        samples=[Sample(0, sequence, None, None)],
        replica=0,
        arrival_s=arrival_s,
        queued_s=queued_s,
        pooling=params,
    )


def pooled_vector(total: Float[np.ndarray, " D"], num_tokens: int, params: PoolingParams) -> Float[np.ndarray, " D"]:
    """A prompt's vector, float64, from the sum of the hidden states that its pooling takes.

    Args:
        total: The sum.
        num_tokens: Tokens of the prompt.
        params: How to pool.
    """
    vector = total.astype(np.float64)
    if params.pooling == "mean":
        vector = vector / num_tokens
    if params.normalize:
        vector = vector / max(np.linalg.norm(vector), _SMALLEST_LENGTH)
    return vector
