"""Prompts and outputs of a length that the context holds: cut, or refused."""

from jaxserve.errors import RequestError
from jaxserve.request import PromptFit
from jaxserve.sampling_params import SamplingParams


def truncated(token_ids: list[int], fit: PromptFit, max_output_tokens: int | None, max_model_len: int) -> list[int]:
    """The last tokens of a prompt, so many as its ``fit`` asks for.

    Args:
        token_ids: All of them.
        fit: What is asked for.
        max_output_tokens: Tokens that must find room behind the prompt; None: one.
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
    if is_strict and (room < 1 or (params.max_tokens is not None and params.max_tokens > room)):
        asked = 1 if params.max_tokens is None else params.max_tokens
        parameter, value = ("input_tokens", num_prompt_tokens) if room < 1 else ("max_tokens", asked)
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains at least {num_prompt_tokens} input tokens, for a total of at least "
            f"{num_prompt_tokens + asked} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            parameter=parameter,
            value=value,
        )
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, and one must be left to generate; "
            f"the prompt contains {num_prompt_tokens}"
        )
    if params.max_tokens is None or params.max_tokens > room:
        return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))
    return params
