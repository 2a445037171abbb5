"""Prompts and outputs of a length that the context holds: cut, or refused."""

from jaxserve.errors import RequestError
from jaxserve.request import PromptFit, check_length
from jaxserve.sampling_params import SamplingParams


def truncated(token_ids: list[int], fit: PromptFit, max_output_tokens: int | None, max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt, truncated as its ``fit`` says.

    Args:
        token_ids: All of them.
        fit: What is asked for.
        max_output_tokens: Output tokens that must fit after the prompt; None: one.
        max_model_len: Longest context.

    Raises:
        RequestError: Fewer than one token, or more than a context holds.
    """
    kept = fit.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept == -1:
        kept = max_model_len - (1 if max_output_tokens is None else max_output_tokens)
        return token_ids[-kept:] if kept > 0 else token_ids
    if not 1 <= kept <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1, or from 1 to the model's maximum context length of {max_model_len}",
            parameter="truncate_prompt_tokens",
            value=kept,
        )
    return token_ids[-kept:]


def fitted(params: SamplingParams, num_prompt_tokens: int, max_model_len: int, is_strict: bool) -> SamplingParams:
    """The parameters with a ``max_tokens`` that the context holds.

    Args:
        params: As given.
        num_prompt_tokens: Length of the prompt.
        max_model_len: Longest context.
        is_strict: Refuse a ``max_tokens`` that it does not hold; else cut it.

    Raises:
        RequestError: The prompt leaves no room for a token, or less than it must.
    """
    room = max_model_len - num_prompt_tokens
    check_length(num_prompt_tokens, (params.max_tokens or 1) if is_strict else 1, max_model_len)
    if params.max_tokens is None or params.max_tokens > room:
        return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))
    return params
