"""A request as the HTTP and gRPC APIs hand it to the engine process."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import check_length
from jaxserve.sampling_params import SamplingParams

MAX_CONVERTED_TOKENS = 1 << 18
"""Most tokens converted to text in one request: more would keep others waiting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and what to do with it. Exactly one of ``text``, ``token_ids`` and ``chat`` is given.

    Attributes:
        text: Text, to be tokenized.
        token_ids: Token ids as they are; checked in the engine process.
        chat: Arguments of ``AsyncLLM.chat``: ``messages`` (OpenAI's form) and, where given, ``tools``,
            ``chat_template``, ``add_generation_prompt``, ``continue_final_message``, ``chat_template_kwargs``. JSON
            values only.
        params: How to sample. ``output_kind`` is DELTA (an output a step, each with what is new) or FINAL_ONLY.
        priority: Lower runs sooner.
        cache_salt: Of the prefix cache.
        timeout_s: Seconds until the deadline; None for none.
        is_strict_length: Whether more tokens than the context has room for are an error; else they are cut.
        truncate_prompt_tokens: Keep this many tokens of the prompt, the last ones; -1: as many as the context holds.
        add_special_tokens: Put around a text what the model expects around one.
        pooling: Pool hidden states in place of generating; ``params`` is then not read.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Mapping[str, Any] | None = None
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    is_strict_length: bool = True
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    pooling: PoolingParams | None = None

    def __post_init__(self):
        num_prompts = sum(prompt is not None for prompt in (self.text, self.token_ids, self.chat))
        if num_prompts != 1:
            raise RequestError(f"a request has exactly one of text, token_ids and chat; got {num_prompts}")
        if self.text == "":
            raise RequestError("the prompt must not be empty", parameter="prompt", value="")


def within_context(token_ids: Sequence[int], truncate_prompt_tokens: int | None, max_model_len: int) -> tuple[int, ...]:
    """Token ids of a prompt; where they are cut anyway, the last ones alone.

    Args:
        token_ids: As they came: there may be very many, and none was looked at.
        truncate_prompt_tokens: As in ``EngineRequest``.
        max_model_len: Longest context.

    Raises:
        RequestError: They are too many for the context.
    """
    if len(token_ids) > max_model_len and truncate_prompt_tokens is None:
        check_length(len(token_ids), 1, max_model_len)
    return tuple(token_ids[-max_model_len:])


def check_converted(name: str, num_tokens: int) -> None:
    """Reject a request to convert more than ``MAX_CONVERTED_TOKENS`` tokens to text.

    Args:
        name: The parameter that asks for the text.
        num_tokens: Number of tokens.

    Raises:
        RequestError: There are too many.
    """
    if num_tokens > MAX_CONVERTED_TOKENS:
        message = f"{name}: expected at most {MAX_CONVERTED_TOKENS} tokens at once, got {num_tokens}"
        raise RequestError(message, parameter=name, value=num_tokens)
