"""Pooling requests: create their state, and compute embeddings from pooled hidden states."""

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxserve.api.errors import RequestError
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.scheduling.sequence import Sequence

_MIN_NORM = 1e-12  # avoids division by zero
_UNUSED_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)


def pooling_state(
    request: Request,
    params: PoolingParams,
    token_ids: list[int],
    limits: ModelLimits,
    *,
    arrival_s: float,
    queued_s: float,
) -> RequestState:
    """Create the state of a pooling request: one sequence that finishes once its prompt is computed.

    Mean pooling needs the hidden states of all tokens, so it does not read the prefix cache.

    Raises:
        RequestError: The prompt is longer than ``max_model_len``.
    """
    length = len(token_ids)
    if length > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{length} input tokens. Please reduce the length of the input prompt.",
            parameter="input_tokens",
            value=length,
        )
    request = dataclasses.replace(request, params=_UNUSED_PARAMS)
    sequence = Sequence(
        request,
        token_ids=token_ids,
        num_prompt_tokens=length,
        max_length=length,
        cache_root=limits.cache_root(request.cache_salt, request.request_id, length),
        reads_cache=params.pooling == "last",
    )
    return RequestState(request, token_ids, [Sample(sequence, None)], arrival_s, queued_s)


def pooled_vector(total: Float[np.ndarray, " D"], num_tokens: int, params: PoolingParams) -> Float[np.ndarray, " D"]:
    """Return a prompt's embedding in float64.

    Args:
        total: Sum of the hidden states that the pooling type selects.
        num_tokens: Length of the prompt.
        params: Pooling parameters.
    """
    vector = total.astype(np.float64)
    if params.pooling == "mean":
        vector = vector / num_tokens
    if params.normalize:
        vector = vector / max(np.linalg.norm(vector), _MIN_NORM)
    return vector
