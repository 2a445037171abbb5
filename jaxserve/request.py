"""Prompts as users write them, turned into one plain list: the first check that every front door makes.

`SamplingParams` is in `jaxserve.sampling_params`, what comes back in `jaxserve.outputs`.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams

PROMPT_FORMS = "a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt: text to be tokenized, or token ids (with the text they came from, if it was given)."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    """When not None these are used and `prompt` is only shown. Each is ≥ 0; the engine checks the vocabulary's end."""
    params: SamplingParams | None
    """None: the model's defaults."""


def parse_prompts(prompts: Any, params: Any = None) -> list[PromptInput]:
    """Reads the prompt argument of `LLM.generate`.

    Args:
      prompts: A string, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a sequence of those.
        An empty sequence is no prompts.
      params: `SamplingParams` for all prompts, a sequence with one (or None) a prompt, or None.

    Returns:
      One `PromptInput` a prompt, in order.

    Raises:
      RequestError: Naming the index of the first bad prompt, or both lengths when those of prompts and params differ.
    """
    items = _items(prompts)
    return [
        PromptInput(*_parse(index, item), params=one)
        for index, (item, one) in enumerate(zip(items, params_for_each(params, len(items)), strict=True))
    ]


def params_for_each(params: Any, num_prompts: int) -> list[SamplingParams | None]:
    """Returns one `SamplingParams` (or None, the model's defaults) for each prompt.

    Raises:
      RequestError: A sequence of another length, or an item of another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
    listed = list(cast("Sequence[Any]", params))
    if len(listed) != num_prompts:
        message = f"the lengths of prompts ({num_prompts}) and sampling_params ({len(listed)}) must be the same"
        raise RequestError(message)
    for index, one in enumerate(listed):
        if one is not None and not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{index}] must be SamplingParams, got {type(one).__name__}")
    return listed


def _items(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be {PROMPT_FORMS}, or a list of those; got {type(prompts).__name__}")
    listed = list(cast("Sequence[Any]", prompts))
    if listed and isinstance(listed[0], numbers.Integral):
        return [listed]
    return listed


def _parse(index: int, item: Any) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(item, str):
        return _text(index, item), None
    if isinstance(item, Mapping):
        return _parse_mapping(index, cast("Mapping[str, Any]", item))
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return None, _token_ids(index, cast("Sequence[Any]", item))
    raise RequestError(f"prompt {index} must be {PROMPT_FORMS}; got {type(item).__name__}")


def _parse_mapping(index: int, item: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    unknown = sorted(set(item) - {"prompt", "prompt_token_ids"}, key=str)
    if unknown:
        message = f"prompt {index}: key {unknown[0]!r} is not supported, only 'prompt' and 'prompt_token_ids'"
        raise RequestError(message)
    text, token_ids = item.get("prompt"), item.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise RequestError(f"prompt {index}: the mapping has neither 'prompt' nor 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt {index}: 'prompt' must be a string, got {type(text).__name__}")
    if token_ids is None:
        return _text(index, text or ""), None
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RequestError(f"prompt {index}: 'prompt_token_ids' must be a list of ints, got {type(token_ids).__name__}")
    return text, _token_ids(index, cast("Sequence[Any]", token_ids))


def _text(index: int, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt {index} is not valid Unicode: {error}") from error
    return text


def _token_ids(index: int, token_ids: Sequence[Any]) -> tuple[int, ...]:
    if not token_ids:
        raise RequestError(f"prompt {index} has no token ids; at least one is needed")
    if all(type(token_id) is int for token_id in token_ids):
        checked: tuple[int, ...] = tuple(token_ids)
    else:
        checked = tuple(_token_id(index, place, token_id) for place, token_id in enumerate(token_ids))
    if min(checked) < 0:
        raise RequestError(f"prompt {index}: token ids must be at least 0, got {min(checked)}")
    return checked


def _token_id(index: int, place: int, token_id: Any) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
        raise RequestError(f"prompt {index}: token id {place} must be an int, got {token_id!r}")
    return int(token_id)
