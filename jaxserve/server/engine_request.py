"""A request as the HTTP and gRPC APIs hand it to the engine process."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import integer
from jaxserve.parsers import last_message
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import MAX_PRIORITY, PromptFit, PromptInput
from jaxserve.sampling_params import SamplingParams

MAX_CONVERTED_TOKENS = 1 << 18
"""Most tokens converted to text in one request: more would keep others waiting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and what to do with it. Exactly one of ``text``, ``token_ids`` and ``chat`` is given.

    Attributes:
        text: Text, which the engine process tokenizes.
        token_ids: Token ids, which the engine process checks against the vocabulary.
        chat: Arguments of ``AsyncLLM.chat``: ``messages`` (OpenAI's form) and, if given, ``tools``,
            ``chat_template``, ``add_generation_prompt``, ``continue_final_message``, ``chat_template_kwargs``. JSON
            values only.
        params: How to sample. ``output_kind`` is DELTA (one output per step, with the new tokens) or FINAL_ONLY.
        priority: Lower runs sooner.
        cache_salt: Only requests with the same salt share cached pages.
        timeout_s: Seconds until the deadline; None for none.
        is_strict_length: Whether a ``max_tokens`` that exceeds the context is an error; else it is lowered.
        truncate_prompt_tokens: Keep this many tokens of the prompt, the last ones; -1: as many as the context holds.
        add_special_tokens: Whether the tokenizer adds special tokens to a text.
        pooling: Pool hidden states instead of generating; ``params`` is then not read.

    Raises:
        RequestError: A wrong value; ``SamplingParams`` and ``PoolingParams`` have checked theirs.
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
        if self.text == "" or self.token_ids == ():
            raise RequestError("the prompt must not be empty", parameter="prompt", value=self.text or self.token_ids)
        if self.cache_salt == "":
            raise RequestError("cache_salt must not be empty", parameter="cache_salt", value="")
        integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        length = self.truncate_prompt_tokens
        if length is not None and integer("truncate_prompt_tokens", length, -1) == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for as many as the context holds; got 0"
            raise RequestError(message, parameter="truncate_prompt_tokens", value=length)

    def prompt(self, text: str | None, token_ids: tuple[int, ...] | None) -> PromptInput:
        """Return the prompt as the engine takes it, with the text and tokens of a conversation if it is one."""
        fit = PromptFit(
            is_strict=self.is_strict_length,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
        )
        is_chat, last = self.chat is not None, None
        if self.chat is not None and self.chat.get("messages"):
            last = last_message(self.chat["messages"], continues=bool(self.chat.get("continue_final_message")))
        return PromptInput(text, token_ids, None, self.cache_salt, fit, is_chat=is_chat, last_message=last)


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
