"""Converts prompts as users write them to a plain list: the first check, shared by all APIs.

`SamplingParams` is in `jaxserve.sampling_params`, results are in `jaxserve.outputs`.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

from jaxserve.errors import RequestError
from jaxserve.field_checks import integer, sequence
from jaxserve.parsers import LastMessage
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import SamplingParams

PROMPT_FORMS = "a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
MAX_PRIORITY = 2**63 - 1
ParamsKind = type[SamplingParams] | type[PoolingParams]
_PARAMS_NAMES: Mapping[ParamsKind, str] = MappingProxyType(
    {SamplingParams: "sampling_params", PoolingParams: "pooling_params"}
)
Params = TypeVar("Params", bound=SamplingParams | PoolingParams)
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFit:
    """How a prompt is fitted into the context."""

    is_strict: bool = False
    """Whether it is an error if the output may exceed the context; otherwise `max_tokens` is reduced."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt, this many; -1: as many as leave room for the output."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds the model's special tokens to text."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt: text to be tokenized, or token ids with their text, if it was given."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    """If not None these are used, and `prompt` is only returned. Each is >= 0; the engine checks the upper bound."""
    params: SamplingParams | PoolingParams | None
    """None: the model's defaults."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached pages."""
    fit: PromptFit = PromptFit()
    is_chat: bool = False
    """Whether the prompt is a conversation rendered by a template."""
    last_message: LastMessage | None = None
    """The last message of the conversation, which tells whether its end is the user's text or the assistant's."""


def parse_prompts(prompts: Any, params: Any = None, kind: ParamsKind = SamplingParams) -> list[PromptInput]:
    """Read the prompt argument of `LLM.generate` and `LLM.embed`.

    Args:
      prompts: A string, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a sequence of those.
        The dicts may also have `cache_salt`. An empty sequence means no prompts.
      params: `SamplingParams` for all prompts, a sequence with one (or None) per prompt, or None.
      kind: `PoolingParams` if `params` must be of that class.

    Returns:
      One `PromptInput` per prompt, in order.

    Raises:
      RequestError: A prompt is invalid (the message has its index), or the numbers of prompts and params differ.
    """
    items = _items(prompts)
    return [
        _parse(index, item, one)
        for index, (item, one) in enumerate(zip(items, _for_each(params, len(items), kind), strict=True))
    ]


def parse_prompt(prompt: Any, params: Any = None, kind: ParamsKind = SamplingParams) -> PromptInput:
    """Read the prompt argument of `AsyncLLM.generate` and `AsyncLLM.encode`: one prompt, as for `parse_prompts`."""
    inputs = parse_prompts(prompt, params, kind)
    if len(inputs) != 1:
        name = "generate" if kind is SamplingParams else "encode"
        raise RequestError(f"{name} takes one prompt, got {len(inputs)}")
    return inputs[0]


def params_for_each(params: Any, num_prompts: int) -> list[SamplingParams | None]:
    """Return one `SamplingParams` (or None, the model's defaults) for each prompt.

    Raises:
      RequestError: A sequence of another length, or an item of another type.
    """
    return _for_each(params, num_prompts, SamplingParams)


def check_length(num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> None:
    """Reject a prompt and output that together exceed the context.

    Args:
      num_prompt_tokens: Tokens of the prompt.
      num_output_tokens: Tokens to be generated; at least 1.
      max_model_len: Longest context in tokens.

    Raises:
      RequestError: The context is too short.
    """
    room = max_model_len - num_prompt_tokens
    if num_output_tokens <= room:
        return
    parameter, value = ("input_tokens", num_prompt_tokens) if room < 1 else ("max_tokens", num_output_tokens)
    raise RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_output_tokens} "
        f"output tokens and your prompt contains at least {num_prompt_tokens} input tokens, for a total of at least "
        f"{num_prompt_tokens + num_output_tokens} tokens. Please reduce the length of the input prompt or the number "
        "of requested output tokens.",
        parameter=parameter,
        value=value,
    )


def _for_each(params: Any, num_prompts: int, kind: type[Params]) -> "list[Params | None]":
    name, expected = _PARAMS_NAMES[kind], kind.__name__
    if params is None or isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"{name} must be {expected} or a list of them, got {type(params).__name__}")
    listed = list(cast("Sequence[Any]", params))
    if len(listed) != num_prompts:
        message = f"the lengths of prompts ({num_prompts}) and {name} ({len(listed)}) must be the same"
        raise RequestError(message)
    for index, item in enumerate(listed):
        if item is not None and not isinstance(item, kind):
            raise RequestError(f"{name}[{index}] must be {expected}, got {type(item).__name__}")
    return listed


def priorities_for_each(priority: Any, num_prompts: int) -> list[int]:
    """Return the priority of each prompt, 0 if None is given; the lowest run first.

    Raises:
      RequestError: Not a list, wrong length, or an item is not an int.
    """
    if priority is None:
        return [0] * num_prompts
    listed = sequence("priority", priority)
    if len(listed) != num_prompts:
        raise RequestError(f"the lengths of prompts ({num_prompts}) and priority ({len(listed)}) must be the same")
    return [integer(f"priority[{index}]", one, -MAX_PRIORITY, MAX_PRIORITY) for index, one in enumerate(listed)]


def _items(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be {PROMPT_FORMS}, or a list of those; got {type(prompts).__name__}")
    listed = list(cast("Sequence[Any]", prompts))
    if listed and isinstance(listed[0], numbers.Integral):
        return [listed]
    return listed


def _parse(index: int, item: Any, params: SamplingParams | PoolingParams | None) -> PromptInput:
    if isinstance(item, str):
        return PromptInput(_text(index, item), None, params)
    if isinstance(item, Mapping):
        return _parse_mapping(index, cast("Mapping[str, Any]", item), params)
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return PromptInput(None, _token_ids(index, cast("Sequence[Any]", item)), params)
    raise RequestError(f"prompt {index} must be {PROMPT_FORMS}; got {type(item).__name__}")


def _parse_mapping(index: int, item: Mapping[str, Any], params: SamplingParams | PoolingParams | None) -> PromptInput:
    unknown = sorted(set(item) - set(_KEYS), key=str)
    if unknown:
        known = ", ".join(map(repr, _KEYS))
        raise RequestError(f"prompt {index}: key {unknown[0]!r} is not supported; supported keys: {known}")
    text, token_ids = item.get("prompt"), item.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise RequestError(f"prompt {index}: the mapping has neither 'prompt' nor 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt {index}: 'prompt' must be a string, got {type(text).__name__}")
    salt = _salt(index, item.get("cache_salt"))
    if token_ids is None:
        return PromptInput(_text(index, text or ""), None, params, salt)
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RequestError(f"prompt {index}: 'prompt_token_ids' must be a list of ints, got {type(token_ids).__name__}")
    return PromptInput(text, _token_ids(index, cast("Sequence[Any]", token_ids)), params, salt)


def _salt(index: int, salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(f"prompt {index}: 'cache_salt' must be a non-empty string, got {salt!r}")
    return _text(index, salt)


def _text(index: int, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt {index} is not valid Unicode: {error}") from error
    return text


def _token_ids(index: int, token_ids: Sequence[Any]) -> tuple[int, ...]:
    if not token_ids:
        raise RequestError(f"prompt {index} has no token ids; at least one is required", parameter="prompt")
    if all(type(token_id) is int for token_id in token_ids):
        checked: tuple[int, ...] = tuple(token_ids)
    else:
        checked = tuple(_token_id(index, position, token_id) for position, token_id in enumerate(token_ids))
    if min(checked) < 0:
        raise RequestError(f"prompt {index}: token ids must be at least 0, got {min(checked)}", parameter="prompt")
    return checked


def _token_id(index: int, position: int, token_id: Any) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
        raise RequestError(f"prompt {index}: token id {position} must be an int, got {token_id!r}")
    return int(token_id)
